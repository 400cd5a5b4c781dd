"""Groups: subsets, NIC selections, monitored_barrier, time-outs, destroy and re-init, device meshes."""

import json
import os
import subprocess
import sys
import time
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch_ranks import init, run_ranks  # noqa: E402

from holmes_comm import errors  # noqa: E402
from holmes_comm.nics import NicSelection  # noqa: E402
from holmes_comm.torch_backend import connections, nic_reason  # noqa: E402

LOOPBACK = NicSelection(nic_class="loopback", transport="tcp")


def groups(rank, size, store):
    init(store, rank, size, backend="cpu:holmes")
    assert dist.get_backend() == "cpu:holmes"
    dist.barrier()
    pair = dist.new_group([1, 2], backend="holmes", pg_options=LOOPBACK)
    others = dist.new_group([0, 3], backend="holmes")
    mine = pair if rank in (1, 2) else others
    assert dist.get_backend(mine) == "holmes"
    tensor = torch.tensor([rank])
    dist.all_reduce(tensor, group=mine)
    assert tensor.item() == 3
    world = torch.tensor([rank])
    dist.all_reduce(world)
    assert world.item() == 6
    report = [(row["peer"], row["transport"], row["interface"]) for row in connections(mine)]
    sent = sum(row["sent_bytes"] for row in connections(mine))
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name, expected in (("dp", rank % 2 * 2 + 2), ("tp", rank // 2 * 4 + 1)):
        value = torch.tensor([rank])
        dist.all_reduce(value, group=mesh.get_group(name))
        assert value.item() == expected
    dist.monitored_barrier()
    dist.destroy_process_group(mine)
    assert dist.group.WORLD is not None
    dist.all_reduce(world)
    return report, sent, nic_reason(None)


def test_groups_use_their_nics():
    results = run_ranks(groups, 4)
    for rank, (report, sent, reason) in enumerate(results):
        assert report
        if rank in (1, 2):
            assert {transport for _, transport, _ in report} == {"tcp"}
            assert {interface for _, _, interface in report} == {"lo"}
            assert sent > 0
        else:
            assert "shm" in {transport for _, transport, _ in report}
        assert reason


def reinitialise(rank, size, store):
    sums = []
    for _ in range(3):  # the same store and group name each time
        init(store, rank, size)
        tensor = torch.ones(4)
        pending = dist.all_reduce(tensor, async_op=True)
        pending.wait()
        sums.append(tensor.sum().item())
        dist.destroy_process_group()
    return sums


def test_destroy_and_init_again():
    assert run_ranks(reinitialise, 2) == [[8.0] * 3] * 2


def destroy_with_operations_under_way(rank, size, store, backend):
    if backend == "gloo":
        dist.init_process_group("gloo", rank=rank, world_size=size, store=store)
    else:
        init(store, rank, size)
    tensors = [torch.full((1 << 20,), rank + 1.0) for _ in range(4)]
    time.sleep(0.5 * rank)  # the others have destroyed the group by now
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    dist.destroy_process_group()
    for work in works:
        work.wait()
    return [tensor.unique().tolist() for tensor in tensors]


@pytest.mark.parametrize("backend", ["holmes", "gloo"])
def test_destroying_a_group_waits_for_what_is_under_way(backend):
    assert run_ranks(destroy_with_operations_under_way, 3, backend) == [[[6.0]] * 4] * 3


def destroy_with_a_receive_that_nobody_serves(rank, size, store):
    init(store, rank, size)
    dist.barrier()
    tensor = torch.zeros(4)
    work = dist.irecv(tensor, src=1) if rank == 0 else None
    started = time.monotonic()
    dist.destroy_process_group()
    seconds = time.monotonic() - started
    if work is not None:
        with pytest.raises(errors.HolmesError):
            work.wait()
    return seconds


def test_destroying_a_group_does_not_wait_for_ever():
    assert all(seconds < 20 for seconds in run_ranks(destroy_with_a_receive_that_nobody_serves, 2))


def barrier_without_rank_2(rank, size, store):
    init(store, rank, size)
    dist.monitored_barrier(timeout=timedelta(seconds=10))
    message = None
    if rank != 2:
        start = time.monotonic()
        with pytest.raises(errors.TimeoutError) as caught:
            dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)
        message = str(caught.value)
        assert time.monotonic() - start < 5
    else:
        time.sleep(2)
        with pytest.raises(errors.TimeoutError):  # the others gave up
            dist.monitored_barrier(timeout=timedelta(seconds=5))
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # the group is still whole
    assert tensor.item() == size
    return message


def test_monitored_barrier_names_the_missing():
    results = run_ranks(barrier_without_rank_2, 3)
    assert results[2] is None
    for rank, message in enumerate(results[:2]):
        assert f"[Rank {rank}]: Rank 2 failed to pass monitoredBarrier in 1000 ms" in message  # as Gloo's


def reduce_twice():
    for _ in range(2):
        dist.all_reduce(torch.ones(2))


def time_out(rank, size, store):
    init(store, rank, size)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    start = time.monotonic()
    if rank == 0:
        with pytest.raises(errors.CommunicatorError) as caught:
            dist.all_reduce(torch.ones(2))
        assert 0.9 < time.monotonic() - start < 6
        with pytest.raises(errors.CommunicatorError):
            dist.barrier()
        return type(caught.value).__name__, str(caught.value)
    time.sleep(2)
    with pytest.raises(errors.CommunicatorError):  # rank 0 made it dead: at the latest the second call says so
        reduce_twice()
    return None


def test_set_timeout():
    name, message = run_ranks(time_out, 2)[0]
    assert name == "TimeoutError"
    assert "rank 1" in message


def wrong_nic(rank, size, store):
    selection = NicSelection(names=("nosuch0",)) if rank == 1 else LOOPBACK
    with pytest.raises(errors.NicError) as caught:
        init(store, rank, size, pg_options=selection)
    with pytest.raises(errors.UsageError, match="pg_options is a str"):
        init(store, rank, size, pg_options="lo")
    return str(caught.value)


def test_wrong_nic_is_an_error_on_every_rank():
    for message in run_ranks(wrong_nic, 2):
        assert "nosuch0" in message


def selection_from_environment(rank, size, store):
    os.environ["HOLMES_NICS"] = "lo"
    os.environ["HOLMES_TRANSPORT"] = "tcp"
    init(store, rank, size)
    dist.barrier()
    return sorted({(row["transport"], row["interface"]) for row in connections()})


def test_selection_from_environment():
    assert run_ranks(selection_from_environment, 2) == [[("tcp", "lo")]] * 2


SCRIPT = """
import json, torch, torch.distributed as dist
from torch.distributed.distributed_c10d import BackendConfig, Backend
both = BackendConfig(Backend("cpu:holmes,cuda:nccl")).get_device_backend_map()
print(json.dumps([dist.is_backend_available("holmes"), both, dist.get_default_backend_for_device("cpu")]))
"""


def test_import_torch_registers_the_backend():
    run = subprocess.run([sys.executable, "-W", "error", "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == [True, {"cpu": "holmes", "cuda": "nccl"}, "gloo"]


HALF_INSTALLED = """
import sys
sys.modules["holmes_comm._c10d"] = None
sys.modules["holmes_comm._C"] = None
import torch, torch.distributed as dist
try:
    dist.init_process_group("holmes", store=dist.HashStore(), rank=0, world_size=1)
except ImportError as error:
    print("ImportError")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(dist.get_backend())
"""


def test_half_installed_holmes_leaves_torch_alone():
    run = subprocess.run([sys.executable, "-c", HALF_INSTALLED], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["ImportError", "gloo"]


def debug_mode(rank, size, store):
    init(store, rank, size)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    return tensor.tolist(), len(connections())


def test_torch_distributed_debug_detail(monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    for values, count in run_ranks(debug_mode, 2):
        assert values == [2.0, 2.0]
        assert count > 0


REPLACED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
both = dist.new_group([0], None, "cpu:gloo")
dist.all_reduce(torch.ones(1), group=both)
from torch.distributed.device_mesh import init_device_mesh
print(dist.get_backend(), dist.get_backend(dist.new_group([0], backend="gloo")), dist.get_backend(both))
"""


@pytest.mark.parametrize(("value", "backends"), [("gloo", ["holmes", "holmes", "cpu:holmes"]), ("", ["gloo"] * 3)])
def test_gloo_is_replaced_where_the_environment_says_so(value, backends):
    env = {**os.environ, "HOLMES_REPLACES": value}
    run = subprocess.run([sys.executable, "-c", REPLACED], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    assert [name.removeprefix("cpu:") for name in run.stdout.split()] == [n.removeprefix("cpu:") for n in backends]


def test_only_gloo_is_replaced():
    from holmes_comm.replace_gloo import replaced

    assert replaced("cpu:gloo,cuda:nccl") == "cpu:holmes,cuda:nccl"
    assert replaced("GLOO") == "holmes"
    assert replaced("nccl") == "nccl"
    assert replaced(None) is None
    env = {**os.environ, "HOLMES_REPLACES": "nccl"}
    run = subprocess.run([sys.executable, "-c", REPLACED], capture_output=True, text=True, env=env)
    assert "HOLMES_REPLACES='nccl' is not possible; it must be 'gloo', or unset" in run.stderr
    assert run.returncode != 0
