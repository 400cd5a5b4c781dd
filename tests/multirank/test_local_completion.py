"""CommunicatorOptions(local_completion=True): operations with a root end on a rank when its own part is done."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from ranks import run_threads

import holmes_comm
from holmes_comm import CommunicatorOptions, UsageError

LOCAL = CommunicatorOptions(local_completion=True)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_root_is_through_before_the_others_begin(transport):
    store = holmes_comm.LocalStore()
    is_through = threading.Event()

    def body(rank):
        comm = holmes_comm.init(store, rank, 3, name="local", transport=transport, options=LOCAL)
        data = np.full(4, float(rank))
        if rank != 0:
            assert is_through.wait(30)
        comm.broadcast(data, 0)
        is_through.set()
        comm.reduce(data, 0)
        return data.tolist()

    first, *others = run_threads(3, body, timeout_s=60)
    assert first == [0.0] * 4
    assert others == [[0.0] * 4] * 2


def test_ranks_that_do_not_agree_are_told():
    store = holmes_comm.LocalStore()

    def body(rank):
        with pytest.raises(UsageError, match=r"of rank 0 and rank 1 only one .* give every rank the same"):
            holmes_comm.init(store, rank, 2, name="split", options=CommunicatorOptions(local_completion=rank == 0))

    run_threads(2, body, timeout_s=60)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_results_are_compared_over_all_ranks(transport):
    """As without local completion: a digest that only the root was heard for found good memory faulty."""
    store = holmes_comm.LocalStore()
    options = CommunicatorOptions(local_completion=True, integrity_digest_every=1)

    def body(rank):
        comm = holmes_comm.init(store, rank, 4, name="digests", transport=transport, options=options)
        for number in range(4):
            data = np.full(1000, float(rank + number))
            comm.broadcast(data, number)
            assert (data == 2 * number).all()
            comm.reduce(data, number)
            assert (data == (8 * number if rank == number else 2 * number)).all()

    run_threads(4, body, timeout_s=60)


@pytest.mark.parametrize("count", [2, 3000])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_what_a_rank_left_behind_waits_for_the_others(transport, count):
    """A sum is in the order of ranks: the last one's part lay in its ring, and its farewell ended the operation."""
    store = holmes_comm.LocalStore()
    has_left = threading.Event()

    def body(rank):
        comm = holmes_comm.init(store, rank, 3, name="left", transport=transport, options=LOCAL)
        if rank == 1:
            assert has_left.wait(30)
        data = np.full(count, float(rank + 1))
        work = comm.reduce(data, 0, async_op=True)
        if rank == 2:
            work.wait()
            del comm
            time.sleep(0.5)  # it is gone when it has heard the root
            has_left.set()
        work.wait()
        return data[-1]

    assert run_threads(3, body, timeout_s=60)[0] == 6


#: Sends more than connections hold to a root that is late, and ends: nothing of it is lost.
LEAVES_AT_ONCE = """
import sys, time
import numpy as np
import holmes_comm
rank, port, transport = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = holmes_comm.TcpStore("127.0.0.1", port)
comm = holmes_comm.init(store, rank, 2, name="job", transport=transport)
if rank == 0:
    time.sleep(0.5)
for number in range(20):
    data = np.full(300_000, number + rank, "float64")
    if rank == 0 and number == 10:
        time.sleep(0.5)
    parts = [np.zeros_like(data) for _ in range(2)] if rank == 0 else None
    comm.gather(data, parts, 0)
    if rank == 0:
        assert all((part == number + r).all() for r, part in enumerate(parts)), number
print("right", flush=True)
"""


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_process_that_ends_at_once_loses_nothing(transport, monkeypatch):
    monkeypatch.setenv("HOLMES_LOCAL_COMPLETION", "1")
    store = holmes_comm.TcpStore("127.0.0.1", 0, is_server=True)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVES_AT_ONCE, str(rank), str(store.port), transport],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [out.split() for out, _ in said] == [["right"], ["right"]], said
    assert [rank.returncode for rank in ranks] == [0, 0], said


#: The same in processes that multiprocessing makes: it ends what it forked by os._exit.
MULTIPROCESSING = """
import multiprocessing, sys, time
import numpy as np

if sys.argv[2] == "first":
    from holmes_comm import init


def job(rank, port, operation):
    from holmes_comm import TcpStore, init

    store = TcpStore("127.0.0.1", port)
    comm = init(store, rank, 3, name="job", transport="shm" if operation == "reduce" else "tcp")
    data = np.full(2000, rank + 1.0)
    if operation == "reduce":  # what the last one has cannot be taken before the second one's is there
        if rank == 1:
            time.sleep(0.7)
        comm.reduce(data, 0)
        assert rank != 0 or (data == 6).all()
        return
    parts = [np.zeros_like(data) for _ in range(3)] if rank == 0 else None
    if rank == 0:
        time.sleep(0.7)
    for _ in range(70):
        comm.gather(data, parts, 0)
    assert rank != 0 or all((part == number + 1).all() for number, part in enumerate(parts))


if __name__ == "__main__":
    from holmes_comm import TcpStore

    store = TcpStore("127.0.0.1", 0, is_server=True)
    context = multiprocessing.get_context(sys.argv[1])
    ranks = [context.Process(target=job, args=(rank, store.port, sys.argv[3])) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]
    print("right")
"""


@pytest.mark.parametrize("operation", ["gather", "reduce"])
@pytest.mark.parametrize("imported", ["first", "late"])
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_what_multiprocessing_ends_loses_nothing(method, imported, operation, monkeypatch, tmp_path):
    monkeypatch.setenv("HOLMES_LOCAL_COMPLETION", "1")
    script = tmp_path / "job.py"
    script.write_text(MULTIPROCESSING)
    command = [sys.executable, str(script), method, imported, operation]
    ran = subprocess.run(command, timeout=120, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "right\n"), ran.stderr
