"""Groups: subsets, NIC selections, monitored_barrier, time-outs, destroy and re-init, device meshes."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch_ranks import init, run_ranks  # noqa: E402

import holmes  # noqa: E402
import holmes_comm  # noqa: E402
from holmes_comm import CommunicatorOptions, GroupOptions, errors  # noqa: E402
from holmes_comm.nics import NicSelection  # noqa: E402
from holmes_comm.torch_backend import connections, nic_reason  # noqa: E402

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
#: split_group of torch 2.14 and later leaves ranks in the order given, and a rank outside gets this.
KEEPS_ORDER = VERSION >= (2, 14)
OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER if VERSION >= (2, 14) else None
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


def return_with_other_sizes(rank, size, store):
    """One name, one store: the whole, a pair, the whole again, another pair."""
    sums = []
    for members in (range(size), (0, 1), range(size), (1, 2)):
        if rank in members:
            init(store, list(members).index(rank), len(members), timeout_s=10)
            tensor = torch.ones(4)
            dist.all_reduce(tensor)
            sums.append(tensor[0].item())
            dist.destroy_process_group()
    return sums


def test_a_group_name_returns_with_another_size():
    assert run_ranks(return_with_other_sizes, 3) == [[3.0, 2.0, 3.0], [3.0, 2.0, 3.0, 2.0], [3.0, 3.0, 2.0]]


def bind_to_the_cpu():
    """As init_process_group(device_id=...) on a GPU: torch splits bound groups only, of the accelerator's backend."""
    cpu = torch.device("cpu", 0)
    dist.group.WORLD.bound_device_id = cpu
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda *args: cpu


def summed(group, value):
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def split(rank, size, store):
    init(store, rank, size, pg_options=NicSelection(transport="tcp"))
    name = dist.group.WORLD.group_name
    bind_to_the_cpu()
    halves = dist.split_group(split_ranks=[[0, 1], [3, 2]])  # the ranks in any order
    inherited = {row["transport"] for row in connections(halves)}
    ranks = [0, 1] if rank < 2 else sorted([3, 2], reverse=KEEPS_ORDER)
    assert dist.get_process_group_ranks(halves) == ranks
    assert halves.rank() == ranks.index(rank)
    sums = [summed(halves, rank)]
    middle = dist.split_group(split_ranks=[[1, 2]], pg_options=LOOPBACK, timeout=timedelta(seconds=7))
    assert (middle is OUTSIDE) == (rank in (0, 3))
    if middle is not OUTSIDE:
        assert {row["interface"] for row in connections(middle)} == {"lo"}
        sums.append(summed(middle, rank))
        one = dist.split_group(middle, [[0], [1]])  # of ranks of the parent
        sums.append(summed(one, rank))
        assert dist.split_group(middle, [[0], [1]]).group_name != one.group_name
        assert middle._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sums += [summed(mesh.get_group(name), rank) for name in ("dp", "tp")]
    dist.group.WORLD.bound_device_id = None  # new_group takes no bound CPU
    new = dist.new_group([0, 2])
    sums += [summed(new, rank)] if rank in (0, 2) else []
    both = halves._get_backend(torch.device("cpu")), halves._get_backend(torch.device("cuda"))
    assert both[0] is both[1]
    assert dist.group.WORLD.group_name == name  # torch writes into the options that it gets
    assert dist.group.WORLD._get_backend(torch.device("cpu")).options.group_name == name
    for group in (one, middle) if middle is not OUTSIDE else ():
        dist.destroy_process_group(group)
    return sums, inherited


def test_groups_are_split_as_nccls():
    results = run_ranks(split, 4)
    assert [sums for sums, _ in results] == [[1, 2, 1, 2], [1, 3, 1, 4, 1], [5, 3, 2, 2, 5, 2], [5, 4, 5]]
    assert all(inherited == {"tcp"} for _, inherited in results)


def split_wrongly(rank, size, store):
    init(store, rank, size)
    bind_to_the_cpu()
    with pytest.raises(errors.NicError, match="nosuch0") as caught:
        dist.split_group(split_ranks=[[0, 1]], pg_options=NicSelection(names=("nosuch0",) if rank else ("lo",)))
    with pytest.raises(errors.UsageError, match="pg_options is a str"):
        dist.split_group(split_ranks=[[0, 1]], pg_options="lo")
    return str(caught.value)


def test_a_wrong_split_is_an_error_on_every_rank():
    assert len(run_ranks(split_wrongly, 2)) == 2


def mesh_with_torchcomms_asked_for(rank, size, store):
    init(store, rank, size)
    bind_to_the_cpu()
    dist.group.WORLD.bound_device_id = None
    dist.config.use_torchcomms = True
    with pytest.raises(errors.UsageError, match="TORCH_DISTRIBUTED_USE_TORCHCOMMS=1") as caught:
        dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    return str(caught.value)


def test_the_switch_to_torchcomms_is_named_where_it_breaks_a_mesh():
    if not hasattr(dist, "config"):
        pytest.skip("needs torch 2.13, which has the switch")
    run_ranks(mesh_with_torchcomms_asked_for, 2)


TORCHCOMMS = """
import torch, torch.distributed as dist
try:
    dist.init_process_group("cpu:holmes", store=dist.HashStore(), rank=0, world_size=1)
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group([0]))
    print("made", dist.get_backend(), total.item())
    dist.split_group(split_ranks=[[0]])
except Exception as error:
    print(type(error).__name__, error)
"""


def with_torchcomms(folder, built):
    """What TORCHCOMMS prints beside a torchcomms with these backends."""
    package = folder / "torchcomms"
    package.mkdir()
    (package / "__init__.py").write_text(
        "def new_comm(backend, *args, **kw):\n    raise RuntimeError('no ' + backend)\n"
        f"def is_backend_built(backend):\n    return backend in {built}\n"  # torch 2.14 asks
    )
    (package / "_comms.py").write_text(
        "class _BackendWrapper: pass\ndef _is_backend_registered(backend):\n    return False\n"
    )
    (package / "hooks.py").write_text("class FlightRecorderHook: pass\n")
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    env = {**os.environ, "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1", "PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", TORCHCOMMS], capture_output=True, text=True, env=env, check=True)
    return run.stdout.splitlines()


def test_the_switch_to_torchcomms_is_named_where_it_takes_the_group(tmp_path):
    if not hasattr(dist, "config"):
        pytest.skip("needs torch 2.13, which has the switch")
    (said,) = with_torchcomms(tmp_path, ["holmes"])
    assert said.startswith("UsageError TORCH_DISTRIBUTED_USE_TORCHCOMMS=1")


def test_torchcomms_leaves_us_the_groups_that_it_cannot_make(tmp_path):
    if VERSION < (2, 14):
        pytest.skip("needs torch 2.14, which asks torchcomms what it has")
    made, split = with_torchcomms(tmp_path, [])
    assert made == "made cpu:holmes 1.0"
    assert split.startswith("UsageError TORCH_DISTRIBUTED_USE_TORCHCOMMS=1")


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


def destroy_one_that_is_still_referred_to(rank, size, store):
    init(store, rank, size)
    group = dist.new_group(list(range(size)))
    dist.barrier(group)
    if rank == 0:
        dist.destroy_process_group(group)
        with pytest.raises(holmes_comm.CommunicatorError, match="is shut down; make a new one"):
            group.barrier().wait()
        store.wait(["told"], timedelta(seconds=60))
        return None
    began = time.monotonic()
    with pytest.raises(holmes_comm.PeerLostError, match=r"rank 0 .* destroyed its communicator during all_reduce"):
        dist.all_reduce(torch.ones(1), group=group)
    store.set("told", "1")
    return time.monotonic() - began


def test_a_group_that_is_destroyed_is_gone_though_somebody_keeps_it():
    assert run_ranks(destroy_one_that_is_still_referred_to, 2)[1] < 30


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


def odd_time_outs(rank, size, store):
    init(store, rank, size)
    group, options = dist.group.WORLD, dist.AllreduceOptions()
    for wrong in (timedelta(0), timedelta(seconds=-1), timedelta(days=200000)):
        options.timeout = wrong
        for call in (
            lambda wrong=wrong: dist.distributed_c10d._set_pg_timeout(wrong, group),
            lambda: group.allreduce([torch.ones(3)], options),
        ):
            with pytest.raises(errors.UsageError, match=r"timeout is .* must be more than 0 and at most 1e9 seconds"):
                call()
    if rank:
        time.sleep(0.3)
    tensor = torch.ones(3)
    dist.all_reduce(tensor, async_op=True).wait(timedelta(days=200000))  # 547 years
    return tensor.tolist()


def test_time_outs_that_cannot_be_meant_are_refused_and_a_long_wait_is_long():
    assert run_ranks(odd_time_outs, 2) == [[2.0] * 3] * 2


def wrong_nic(rank, size, store):
    selection = NicSelection(names=("nosuch0",)) if rank == 1 else LOOPBACK
    with pytest.raises(errors.NicError) as caught:
        init(store, rank, size, pg_options=selection)
    with pytest.raises(errors.UsageError, match="pg_options is a str"):
        init(store, rank, size, pg_options="lo")
    return str(caught.value)


SECRET = "A secret of the job 0123"


def options_of_the_engine(rank, size, store):
    init(store, rank, size)
    options = CommunicatorOptions(tls="all", transport="tcp", secret=SECRET)
    group = dist.new_group(pg_options=GroupOptions(options=options))
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2.0] * 4
    with pytest.raises(errors.UsageError, match=r"options\.timeout_s=3 says nothing to a process group"):
        dist.new_group(pg_options=GroupOptions(options=CommunicatorOptions(timeout_s=3)))
    with pytest.raises(errors.UsageError, match="dscp=99 is not possible"):
        dist.new_group(pg_options=GroupOptions(options=CommunicatorOptions(dscp=99)))
    if rank == 1:  # the other one waits for it, and not as long as it would without
        return None, 0.0
    start = time.monotonic()
    with pytest.raises(errors.TimeoutError):
        dist.new_group(pg_options=GroupOptions(options=CommunicatorOptions(connect_timeout_s=0.3)))
    return {(row["transport"], row["encryption"] != "") for row in connections(group)}, time.monotonic() - start


def test_what_pg_options_are_not_given_their_options_say():
    (paths, seconds), _ = run_ranks(options_of_the_engine, 2)
    assert paths == {("tcp", True)}
    assert seconds < 10


def groups_of_a_plan(rank, size, store):
    options = CommunicatorOptions(transport="tcp", secret=SECRET)
    init(store, rank, size, timeout_s=17, pg_options=GroupOptions(tls="all", options=options))
    plan = holmes.plan_for(holmes.gather_topology(1.0, 0), model_layers=4)
    group = holmes.process_groups(plan, kinds=["dp"]).dp
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2.0] * 4
    paths = {(row["transport"], row["encryption"] != "") for row in connections(group)}
    return paths, group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_groups_of_a_plan_are_told_what_the_default_group_was():
    assert run_ranks(groups_of_a_plan, 2) == [({("tcp", True)}, 17.0)] * 2


def groups_of_a_plan_by_environment(rank, size, store):
    init(store, rank, size)
    plan = holmes.plan_for(holmes.gather_topology(1.0, 0), model_layers=4)
    return {row["transport"] for row in connections(holmes.process_groups(plan, kinds=["dp"]).dp)}


def test_groups_of_a_plan_are_on_the_transport_of_the_environment(monkeypatch):
    monkeypatch.setenv("HOLMES_TRANSPORT", "tcp")
    assert run_ranks(groups_of_a_plan_by_environment, 2) == [{"tcp"}] * 2


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
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # torch read the variable when the server of these processes began
    init(store, rank, size)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    return tensor.tolist(), len(connections())


def test_torch_distributed_debug_detail():
    for values, count in run_ranks(debug_mode, 2):
        assert values == [2.0, 2.0]
        assert count > 0


def receive_from_anyone(rank, size, store):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    init(store, rank, size)
    assert type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__ == "_ProcessGroupWrapper"
    tensor = torch.tensor([rank])
    if rank == 0:
        assert dist.recv(tensor, src=None) == 1
    elif rank == 1:
        dist.send(tensor, dst=0)
    dist.all_reduce(tensor)  # DETAIL compares the ranks' sequence numbers
    return tensor.item()


def test_a_message_from_anyone_has_no_sequence_number():
    assert run_ranks(receive_from_anyone, 3) == [4, 4, 4]


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


def refused_in_a_block(rank, size, store):
    init(store, rank, size)
    other = 1 - rank
    expanded = torch.ones(1).expand(2)
    with pytest.raises(errors.UsageError, match="elements share memory"):
        dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(2), other), dist.P2POp(dist.irecv, expanded, other)])
    for options, call in (
        ({"device": torch.device("cpu")}, lambda: dist.isend(torch.ones(2), other)),
        ({}, lambda: dist.all_reduce(torch.ones(2))),
    ):
        with contextlib.suppress(ZeroDivisionError), dist._coalescing_manager(**options):
            call()
            raise ZeroDivisionError
    data = torch.full((2,), float(rank))
    dist.all_reduce(data)
    assert data.tolist() == [1, 1]
    if rank == 0:
        dist.send(torch.full((2,), 7.0), 1)
    else:
        dist.recv(data, 0)
        assert data.tolist() == [7, 7]
    with dist._coalescing_manager():
        dist.all_reduce(data)
    assert data.tolist() == [8, 8]
    outer = [torch.ones(2), torch.ones(2)]
    with dist._coalescing_manager():
        dist.all_reduce(outer[0])
        with pytest.raises(ValueError, match="non-empty op list"), dist._coalescing_manager():
            pass
        dist.all_reduce(outer[1])
    assert [one.tolist() for one in outer] == [[2, 2], [2, 2]]


def test_a_block_that_ends_in_an_exception_takes_nothing_that_comes_later():
    run_ranks(refused_in_a_block, 2)


def blocks_of_two_threads(rank, size, store):
    init(store, rank, size)
    backend = holmes_comm.torch_backend._backend(None)
    here = threading.Barrier(2)
    received = [torch.zeros(3), torch.zeros(3)]

    def run(number):
        backend._start_coalescing()
        here.wait(20)
        backend.send([torch.full((3,), 10.0 * number + rank)], 1 - rank, number)
        here.wait(20)
        backend.recv([received[number]], 1 - rank, number)
        here.wait(20)
        backend._end_coalescing().wait()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    return [one.tolist() for one in received]


def test_each_thread_has_its_own_block():
    assert run_ranks(blocks_of_two_threads, 2) == [[[1] * 3, [11] * 3], [[0] * 3, [10] * 3]]


def batches_of_three_threads(rank, size, store):
    init(store, rank, size)
    other = 1 - rank

    def run(number):
        for i in range(100):
            received = [torch.zeros(3), torch.zeros(3)]
            calls = []
            for j, one in enumerate(received):
                sent = torch.full((3,), 1000.0 * number + i + j)
                calls.append(dist.P2POp(dist.isend, sent, other, tag=10 * number + j))
                calls.append(dist.P2POp(dist.irecv, one, other, tag=10 * number + j))
            for work in dist.batch_isend_irecv(calls):
                work.wait()
            assert [one[0].item() for one in received] == [1000 * number + i, 1000 * number + i + 1]

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, range(3)))


def test_several_threads_batch_messages_on_one_group():
    run_ranks(batches_of_three_threads, 2)


def futures_of_a_reduce(rank, size, store):
    init(store, rank, size)
    data = torch.ones(2)
    (result,) = dist.reduce(data, 0, async_op=True).get_future().wait()
    return result is data or result.data_ptr() == data.data_ptr()


def test_the_future_of_a_reduce_has_a_tensor_on_every_rank():
    assert run_ranks(futures_of_a_reduce, 2) == [True, True]
