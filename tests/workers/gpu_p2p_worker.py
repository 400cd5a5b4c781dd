"""One case of sends and receives of a GPU's memory over the host engine, on the fake CUDA driver:
`python gpu_p2p_worker.py CASE`. Ranks are threads, each with a (fake) GPU of its own.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import threading
import time

import numpy as np
from fake_gpu import Array, copy, keep_busy, make_stream, synchronize
from ranks import run_threads

import holmes_comm

RING_BYTES = 256 * 1024
SLOT_BYTES = RING_BYTES // 8
SIZES = [0, 1, 7, 1000, SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 1, RING_BYTES + 3, 5 * RING_BYTES + 12345]
_names = itertools.count()


def run(size, body, *, transport="tcp", timeout_s=20.0):
    store = holmes_comm.LocalStore()
    name = f"p2p{next(_names)}"

    def rank_body(rank):
        comm = holmes_comm.init(
            store, rank, size, name=name, transport=transport, timeout_s=timeout_s, connect_timeout_s=20.0
        )
        return body(comm)

    return run_threads(size, rank_body)


def values(count, seed):
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def place(array, where, rank):
    """Host memory, or the memory of this rank's GPU."""
    return Array(array, rank) if where == "gpu" else array.copy()


def seen(array):
    return array.values if isinstance(array, Array) else array


def expect(condition, seen):
    assert condition, repr(seen)


def failure_of(call):
    try:
        call()
    except holmes_comm.HolmesError as error:
        return error
    raise AssertionError("no error where one is due")


def case_sizes():
    """Every size, between GPUs and between a GPU and host memory, blocking and not."""

    def body(comm):
        for seed, count in enumerate(SIZES):
            sent = values(count, seed)
            for source, target in [("gpu", "gpu"), ("gpu", "host"), ("host", "gpu")]:
                for is_async in (False, True):
                    if comm.rank == 0:
                        data = place(sent, source, 0)
                        work = comm.send(data, 1, async_op=is_async)
                    else:
                        data = place(np.zeros(count, np.uint8), target, 1)
                        work = comm.recv(data, 0, async_op=is_async)
                    if is_async:
                        work.wait()
                    np.testing.assert_array_equal(seen(data), sent)
        assert pinned_bytes() <= 2 * RING_BYTES  # one rank's sends, the other's receives

    for transport in ("tcp", "shm"):
        run(2, body, transport=transport)


def driver():
    return ctypes.CDLL(os.environ["HOLMES_CUDA_LIBRARY"])


def pinned_bytes():
    function = driver().fake_cuda_pinned_bytes
    function.restype = ctypes.c_size_t
    return function()


def case_streams():
    """A send sees what its stream does before it, and a receive comes after that; the end is the data's."""
    count = 3 * RING_BYTES

    def body(comm):
        rank, stream = comm.rank, make_stream()
        fresh = values(count, 10 + rank)
        source, data = Array(fresh, rank), Array(np.zeros(count, np.uint8), rank, stream)
        before, after = Array(np.full(count, 9, np.uint8), rank), Array(np.zeros(count, np.uint8), rank)
        keep_busy(stream, 100)
        if rank == 0:
            copy(data, source, stream)  # "computes" what is sent
            comm.send(data, 1)
            copy(data, before, stream)  # may be overwritten at once
            synchronize(stream)
        else:
            copy(after, before, stream)
            copy(data, after, stream)  # writes the buffer before the message does
            comm.recv(data, 0)
            copy(after, data, stream)
            synchronize(stream)
            np.testing.assert_array_equal(after.values, values(count, 10))
        # The same with a Work; nothing is done before the stream gets there.
        keep_busy(stream, 100)
        if rank == 0:
            copy(data, source, stream)
            work = comm.send(data, 1, async_op=True)
        else:
            work = comm.recv(data, 0, async_op=True)
        assert not work.is_completed()
        other = make_stream()
        work.wait_stream(other)
        copy(after, data, other)
        synchronize(other)
        np.testing.assert_array_equal(after.values, values(count, 10))
        assert work.elapsed_s > 0.05

    run(2, body)


def case_in_flight():
    """Many messages of all sizes in both directions at once, their receives posted in another order."""
    rng = np.random.default_rng(5)
    sizes = [int(size) for size in rng.integers(0, 3 * RING_BYTES, 8)] + SIZES
    order = list(rng.permutation(len(sizes)))

    def body(comm):
        rank = comm.rank
        peers = [peer for peer in range(comm.size) if peer != rank]
        sends = [
            (comm.send(place(values(size, 100 * rank + tag), "gpu" if tag % 3 else "host", rank), p, tag, True))
            for tag, size in enumerate(sizes)
            for p in peers
        ]
        received = []
        for tag in order:
            for peer in peers:
                data = place(np.zeros(sizes[tag], np.uint8), "gpu" if (tag + peer) % 4 else "host", rank)
                received.append((peer, tag, data, comm.recv(data, peer, tag, async_op=True)))
        for peer, tag, data, work in received:
            work.wait()
            np.testing.assert_array_equal(seen(data), values(sizes[tag], 100 * peer + tag))
        for work in sends:
            work.wait()
        # Together, and from whoever sends.
        out = Array(values(RING_BYTES * 2, rank), rank)
        into = Array(np.zeros(RING_BYTES * 2, np.uint8), rank)
        for work in comm.batch([("send", out, (rank + 1) % 3, 7), ("recv", into, (rank - 1) % 3, 7)]):
            work.wait()
        np.testing.assert_array_equal(into.values, values(RING_BYTES * 2, (rank - 1) % 3))
        if rank == 0:
            sources = {comm.recv(into, tag=9) for _ in peers}
            assert sources == set(peers)
        else:
            comm.send(out, 0, tag=9)
        comm.barrier()

    run(3, body)
    run(3, body, transport="shm")


def case_arguments():
    def body(comm):
        rank = comm.rank
        data = Array(np.zeros(10), rank)
        for call, text in [
            (lambda: comm.all_reduce(data), "all_reduce: tensor (Array)"),
            (lambda: comm.send(data, rank), "itself"),
            (lambda: comm.send(data, 5), "not a rank"),
        ]:
            error = failure_of(call)
            expect(isinstance(error, holmes_comm.UsageError) and text in str(error), str(error))
        comm.barrier()
        # The ends disagree: both hear of it, with the sizes of the whole message.
        if rank == 0:
            error = failure_of(lambda: (comm.send(Array(np.zeros(RING_BYTES), 0), 1), comm.barrier()))
        else:
            error = failure_of(lambda: comm.recv(Array(np.zeros(RING_BYTES + 1), 1), 0))
        expect(
            isinstance(error, holmes_comm.MismatchError) and f"{8 * RING_BYTES} bytes of float64" in str(error), error
        )

    run(2, body)


def case_deadline():
    """A GPU that does not get to the message; the buffer is free for others only when its copies have ended."""

    streams = [make_stream(), make_stream()]

    def body(comm):
        stream = streams[comm.rank]
        keep_busy(stream, 4000)
        data = Array(np.zeros(4 * RING_BYTES, np.uint8), comm.rank, stream if comm.rank == 0 else None)
        error = failure_of(lambda: comm.send(data, 1, timeout_s=0.4) if comm.rank == 0 else comm.recv(data, 0))
        assert isinstance(error, holmes_comm.TimeoutError), repr(error)
        assert driver().cuStreamQuery(ctypes.c_void_p(stream)) != 0  # nobody waited for the GPU
        assert "0 bytes copied from the GPU" in str(error), str(error)

    run(2, body)
    for stream in streams:  # the fake ends the process where memory is freed that a queued copy uses
        synchronize(stream)
    until = time.monotonic() + 30
    while pinned_bytes() > 0 and time.monotonic() < until:
        time.sleep(0.01)
    assert pinned_bytes() == 0


def case_abort():
    """Ended while copies are under way in both directions; their memory stays until they end."""
    started = threading.Barrier(2)

    def body(comm):
        rank = comm.rank
        works = []
        for tag in range(4):
            works.append(comm.send(Array(np.zeros(2 * RING_BYTES, np.uint8), rank), 1 - rank, tag, async_op=True))
            works.append(comm.recv(Array(np.zeros(2 * RING_BYTES, np.uint8), rank), 1 - rank, tag, async_op=True))
        time.sleep(0.01)
        started.wait()
        if rank == 0:
            comm.abort("enough")
        for work in works:
            try:
                work.wait(10.0)
            except holmes_comm.AbortedError as error:
                expect("enough" in str(error), error)
        del works, work
        error = failure_of(lambda: comm.recv(Array(np.zeros(3), rank), 1 - rank))
        expect(isinstance(error, holmes_comm.AbortedError) and "enough" in str(error), error)

    run(2, body)


def case_copy_fails():
    def body(comm):
        comm.barrier()
        os.environ["FAKE_CUDA_FAULT"] = "copy"
        data = Array(np.zeros(1000), comm.rank)
        error = failure_of(lambda: comm.send(data, 1) if comm.rank == 0 else comm.recv(data, 0))
        assert isinstance(error, holmes_comm.SystemError), repr(error)
        expect("GPU: CUDA_ERROR_ILLEGAL_ADDRESS (700)" in str(error), str(error))

    run(2, body)


def case_no_pinned_memory():
    os.environ["FAKE_CUDA_FAULT"] = "pinned"

    def body(comm):
        data = Array(np.zeros(1000), comm.rank)
        error = failure_of(lambda: comm.send(data, 1) if comm.rank == 0 else comm.recv(data, 0))
        expect(isinstance(error, holmes_comm.SystemError) and "HOLMES_PINNED_RING_BYTES" in str(error), repr(error))

    run(2, body)


if __name__ == "__main__":
    globals()[f"case_{sys.argv[1]}"]()
    print("passed")
