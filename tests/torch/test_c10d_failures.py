"""A killed rank and a mismatched call: the named error on every survivor, soon, and a new group afterwards."""

import os
import signal
import time
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch_ranks import init, run_ranks  # noqa: E402

from holmes_comm import errors  # noqa: E402
from holmes_comm.nics import NicSelection  # noqa: E402

VICTIM = 1


def lose_a_rank(rank, size, store, transport):
    init(store, rank, size, pg_options=NicSelection(transport=transport))
    tensor = torch.ones(4 << 20)
    dist.all_reduce(tensor)
    if rank == VICTIM:
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(50)]
        works[1].wait()
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(50)]
    with pytest.raises(errors.PeerLostError) as caught:
        works[-1].wait()
    elapsed_s = time.monotonic() - start
    error = caught.value
    with pytest.raises(errors.CommunicatorError):  # dead, and says so
        dist.barrier()
    dist.destroy_process_group()
    survivors = [r for r in range(size) if r != VICTIM]
    init(dist.PrefixStore("rebuilt", store), survivors.index(rank), len(survivors))
    total = torch.ones(1)
    dist.all_reduce(total)
    return error.peer, error.rank, str(error), elapsed_s, total.item()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_killed_rank(transport):
    results = run_ranks(lose_a_rank, 3, transport, lost=(VICTIM,))
    for rank in (0, 2):
        peer, reporter, message, elapsed_s, total = results[rank]
        assert peer == VICTIM
        assert reporter in (0, 2)  # who saw it first
        assert f"rank {VICTIM}" in message
        assert elapsed_s < 15
        assert total == 2


def lose_a_rank_in_backward(rank, size, store):
    from torch.nn.parallel import DistributedDataParallel

    init(store, rank, size)
    model = DistributedDataParallel(torch.nn.Linear(256, 256))
    model(torch.ones(2, 256)).sum().backward()
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(errors.PeerLostError) as caught:
        model(torch.ones(2, 256)).sum().backward()
    return str(caught.value)


def test_killed_rank_in_backward():
    assert f"rank {VICTIM}" in run_ranks(lose_a_rank_in_backward, 2, lost=(VICTIM,))[0]


def mismatch(rank, size, store):
    init(store, rank, size)
    with pytest.raises(errors.MismatchError) as caught:
        dist.all_reduce(torch.ones(4 + rank))
    with pytest.raises(errors.HolmesError):  # dead on every rank
        dist.barrier()
    return str(caught.value)


def test_mismatch():
    for message in run_ranks(mismatch, 2):
        assert "all_reduce" in message


COALESCED = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(300), group=group),
    "all_gather": lambda group: dist.all_gather_into_tensor(torch.ones(1200), torch.ones(300), group=group),
    "reduce_scatter": lambda group: dist.reduce_scatter_tensor(torch.ones(300), torch.ones(1200), group=group),
}


def lists_of_different_length(rank, size, store, environment):
    """What one list has more than the others would be taken for the call that follows theirs."""
    os.environ.update(environment, HOLMES_CLUSTER="ab"[rank // 2])
    init(store, rank, size)
    messages = []
    for name, call in COALESCED.items():
        group = dist.new_group(list(range(size)))
        dist.barrier()

        def list_and_more(call=call, group=group):
            with dist._coalescing_manager(group=group):
                for _ in range(2 if rank == 1 else 1):
                    call(group)
            call(group)
            dist.barrier(group=group)

        with pytest.raises(errors.HolmesError) as caught:
            list_and_more()
        messages.append((name, str(caught.value)))
    return messages


@pytest.mark.parametrize("min_bytes", ["never", "0"], ids=["flat", "hierarchical"])
def test_coalesced_lists_of_different_length_are_a_mismatch(min_bytes):
    for messages in run_ranks(lists_of_different_length, 4, {"HOLMES_HIERARCHICAL_MIN_BYTES": min_bytes}):
        for name, message in messages:
            assert f"{name} #" in message, message
            assert "place in a list" in message, message
            assert ("hierarchical" in message) == (min_bytes == "0")


def abort(rank, size, store):
    init(store, rank, size)
    work = dist.all_reduce(torch.ones(4), async_op=True) if rank == 0 else dist.irecv(torch.ones(1), 0)
    if rank == 0:
        store.wait(["posted"])  # else the abort may come while the other rank still makes the group
        dist.distributed_c10d._abort_process_group()
    else:
        store.set("posted", "")
    with pytest.raises(errors.AbortedError):
        work.wait()
    return True


def test_abort():
    assert all(run_ranks(abort, 2))


def wait_too_short(rank, size, store):
    init(store, rank, size)
    message = ""
    if rank == 0:
        work = dist.irecv(torch.zeros(4), src=1)
        try:
            work.wait(timedelta(seconds=0.2))
        except RuntimeError as error:
            message = str(error)
        dist.send(torch.ones(4), dst=1)
        work.wait()
    else:
        dist.recv(torch.zeros(4), src=0)
        dist.send(torch.ones(4), dst=0)
    dist.destroy_process_group()
    return message


def test_a_wait_that_is_too_short_names_what_it_was_given():
    assert "not finished after the 0.2 s given to wait" in run_ranks(wait_too_short, 2)[0]
