"""One case of the NCCL backend's tests, on the fake NCCL that the environment names: `python nccl_worker.py CASE`.

Ranks are threads, each with a (fake) GPU of its own. A process per case: the stock NCCL of a process is chosen once.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import numpy as np
from fake_gpu import Array, copy, keep_busy, make_stream, synchronize
from ranks import run_threads

import holmes_comm

FLOATS = ["float64", "float32", "float16"]
INTEGERS = ["int8", "int32", "int64", "uint8"]
OPERATIONS = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}


def make(store, rank, size, *, timeout_s=20.0, name="test", **options):
    return holmes_comm.init(
        store,
        rank,
        size,
        backend="nccl",
        device=options.pop("device", rank),
        name=name,
        timeout_s=timeout_s,
        connect_timeout_s=options.pop("connect_timeout_s", 20.0),
        **options,
    )


def run(size, body, **options):
    store = holmes_comm.LocalStore()
    return run_threads(size, lambda rank: body(make(store, rank, size, **options)))


def failure_of(call):
    """The error that `call` raises, and the seconds until then."""
    start = time.monotonic()
    try:
        call()
    except holmes_comm.HolmesError as error:
        return error, time.monotonic() - start
    raise AssertionError("no error where one is due")


def expect(condition, seen):
    assert condition, repr(seen)


def contribution(rank, count, dtype):
    generator = np.random.default_rng(100 * rank + count)
    if dtype == "bool":
        return generator.integers(0, 2, count).astype(bool)
    low, high = (0.5, 1.5) if dtype in FLOATS else (1, 3)
    return generator.uniform(low, high, count).astype(dtype)


def assert_close(actual, wanted, dtype):
    if dtype in FLOATS:
        eps = np.finfo(dtype).eps
        np.testing.assert_allclose(actual.astype("float64"), wanted, rtol=4 * eps)
    else:
        np.testing.assert_array_equal(actual, wanted.astype(dtype))


def case_collectives():
    def body(comm):
        rank, size = comm.rank, comm.size
        assert comm.device == rank
        for dtype in [*FLOATS, *INTEGERS]:
            for op in [*OPERATIONS, *(["avg"] if dtype in FLOATS else [])]:
                for count in (1, 1021):
                    parts = [contribution(r, count * size, dtype) for r in range(size)]
                    wide = [part.astype("float64") for part in parts]
                    wanted = sum(wide) / size if op == "avg" else wide[0]
                    if op != "avg":
                        for part in wide[1:]:
                            wanted = OPERATIONS[op](wanted, part)
                    data = Array(parts[rank], rank)
                    comm.all_reduce(data, op, async_op=True).wait()
                    assert_close(data.values, wanted, dtype)
                    output = Array(np.zeros(count, dtype), rank)
                    comm.reduce_scatter(output, Array(parts[rank], rank), op, async_op=True).wait()
                    assert_close(output.values, wanted[rank * count : (rank + 1) * count], dtype)
                    pieces = Array(parts[rank], rank)
                    root = size - 1
                    comm.reduce(pieces, root, op, async_op=True).wait()
                    assert_close(pieces.values, wanted if rank == root else wide[rank], dtype)
        flags = [contribution(r, 77, "bool") for r in range(size)]
        for op, numpy_op in (("sum", np.logical_or), ("band", np.logical_and), ("product", np.logical_and)):
            data = Array(flags[rank], rank)
            comm.all_reduce(data, op, async_op=True).wait()
            np.testing.assert_array_equal(data.values, numpy_op.reduce(flags))

        for dtype in ["float32", "int16", "bool"]:  # NCCL has no int16; moved it can be
            count = 50
            parts = [np.full(count * size, r % 2 if dtype == "bool" else r + 1, dtype) for r in range(size)]
            gathered = Array(np.zeros(count * size * size, dtype), rank)
            comm.all_gather(gathered, Array(parts[rank], rank), async_op=True).wait()
            np.testing.assert_array_equal(gathered.values, np.concatenate(parts))
            everything = Array(np.zeros(count * size, dtype), rank)
            comm.all_to_all(everything, Array(parts[rank], rank), async_op=True).wait()
            np.testing.assert_array_equal(everything.values, np.concatenate([part[:count] for part in parts]))
            data = Array(parts[rank], rank)
            comm.broadcast(data, size - 1, async_op=True).wait()
            np.testing.assert_array_equal(data.values, parts[size - 1])
            collected = [Array(np.zeros(count * size, dtype), rank) for _ in range(size)] if rank == 0 else None
            comm.gather(Array(parts[rank], rank), collected, 0, async_op=True).wait()
            if collected is not None:
                np.testing.assert_array_equal(np.stack([one.values for one in collected]), np.stack(parts))
            share = Array(np.zeros(count, dtype), rank)
            source = Array(np.repeat(np.arange(size), count).astype(dtype), rank) if rank == 0 else None
            comm.scatter(share, source, 0, async_op=True).wait()
            np.testing.assert_array_equal(share.values, np.full(count, rank).astype(dtype))

        # Uneven counts.
        counts = [3 * r + 1 for r in range(size)]
        outputs = [Array(np.zeros(n, "float32"), rank) for n in counts]
        comm.all_gather(outputs, Array(np.full(counts[rank], rank, "float32"), rank), async_op=True).wait()
        for r, output in enumerate(outputs):
            np.testing.assert_array_equal(output.values, np.full(counts[r], r))
        inputs = [Array(np.full(n, rank + 1, "float32"), rank) for n in counts]
        share = Array(np.zeros(counts[rank], "float32"), rank)
        comm.reduce_scatter(share, inputs, async_op=True).wait()
        np.testing.assert_array_equal(share.values, np.full(counts[rank], size * (size + 1) / 2))

        # Lists whose buffers lie side by side on one rank and apart on the others.
        whole = Array(np.zeros(8 * size, "float32"), rank)
        beside = [whole.part(8 * r, 8 * r + 8) for r in range(size)]
        apart = [Array(np.zeros(8, "float32"), rank) for _ in range(size)]
        outputs = beside if rank == 0 else apart
        comm.all_gather(outputs, Array(np.full(8, rank, "float32"), rank), async_op=True).wait()
        for r, output in enumerate(outputs):
            np.testing.assert_array_equal(output.values, np.full(8, r))
        share = Array(np.zeros(8, "float32"), rank)
        comm.reduce_scatter(share, outputs, async_op=True).wait()
        np.testing.assert_array_equal(share.values, np.full(8, rank * size))

        # A ring in which all send first.
        mine, other = Array(np.full(1000, rank, "int64"), rank), Array(np.zeros(1000, "int64"), rank)
        works = comm.batch([("send", mine, (rank + 1) % size, 0), ("recv", other, (rank - 1) % size, 0)])
        for work in works:
            work.wait()
        assert set(other.values) == {(rank - 1) % size}
        # To all, itself too, as NCCL lets a group do.
        outputs = [Array(np.zeros(10, "int64"), rank) for _ in range(size)]
        inputs = [Array(np.full(10, 10 * rank + peer), rank) for peer in range(size)]
        block = [("send", one, peer, 0) for peer, one in enumerate(inputs)]
        for work in comm.batch(block + [("recv", one, peer, 0) for peer, one in enumerate(outputs)]):
            work.wait()
        assert [set(one.values) for one in outputs] == [{10 * peer + rank} for peer in range(size)]
        if rank == 0:
            comm.send(mine, 1, async_op=True).wait()
        elif rank == 1:
            comm.recv(other, 0, async_op=True).wait()
            assert set(other.values) == {0}
        comm.barrier()

        half = comm.split(rank % 2, rank)
        data = Array(np.array([float(rank)]), rank)
        half.all_reduce(data, async_op=True).wait()
        assert data.values[0] == sum(range(rank % 2, size, 2))
        assert comm.split(-1 if rank else 0) is None or rank == 0
        assert "NCCL" in comm.description
        assert "Socket over lo" in comm.description
        assert any(row["transport"] for row in comm.connections())

    run(4, body)


def case_leave():
    """A rank that takes no part in a split may leave at once: the others' calls under way are not its concern."""

    def body(comm):
        return comm.split(-1 if comm.rank else 0)

    for _ in range(10):  # the rank's end races with its peers' calls
        parts = run(4, body)
        assert [part is None for part in parts] == [False, True, True, True]


def case_streams():
    """A call runs after what its stream has, and what is put on the stream later runs after the call."""

    def body(comm):
        rank, size = comm.rank, comm.size
        stream = make_stream()
        source = Array(np.full(1000, rank + 1.0), rank)
        data = Array(np.zeros(1000), rank, stream)
        result = Array(np.zeros(1000), rank)
        keep_busy(stream, 100)
        copy(data, source, stream)
        comm.all_reduce(data)  # returns at once
        assert not result.values.any()
        copy(result, data, stream)
        synchronize(stream)
        assert set(result.values) == {size * (size + 1) / 2}

        other = make_stream()
        late = Array(np.zeros(1000), rank)
        data = Array(np.full(1000, 2.0), rank, stream)
        keep_busy(stream, 50)
        work = comm.all_reduce(data, async_op=True)
        assert not work.is_completed()
        work.wait_stream(other)
        copy(late, data, other)
        synchronize(other)
        assert set(late.values) == {2.0 * size}
        work.wait(5.0)
        assert work.state == "completed"
        assert work.elapsed_s > 0.04

    run(2, body)


def case_images():
    """Communicators of several NIC profiles in one process, on one device each, in any mixture."""

    def body(rank, store):
        comms = [make(store, rank, 2, name=f"c{i}", nccl_variables={"NCCL_HOLMES_NUMBER": str(i)}) for i in range(3)]
        comms.append(make(store, rank, 2, name="stock"))
        assert len({comm.description for comm in comms}) == 4
        data = [Array(np.full(100, rank + 1.0), rank) for _ in comms]
        works = [comm.all_reduce(one, async_op=True) for _ in range(5) for comm, one in zip(comms, data, strict=True)]
        for work in works:
            work.wait()
        for one in data:
            assert set(one.values) == {3.0 * 2**4}

    before = dict(os.environ)
    store = holmes_comm.LocalStore()
    run_threads(2, lambda rank: body(rank, store))
    assert dict(os.environ) == before


def case_site_transport():
    """A plugin of the site is used where no NIC is asked for, also in an image; a selection is kept as ever."""
    os.environ["NCCL_NET_PLUGIN"] = "of-the-site"

    def body(rank, store):
        cases = [
            ("stock", {}, "stock library", "the site's transport"),
            ("image", {"nccl_variables": {"NCCL_HOLMES_NUMBER": "1"}}, " image ", "the site's transport"),
            ("chosen", {"nics": holmes_comm.NicSelection(names=("lo",))}, " image ", "Socket over lo"),
        ]
        for name, options, library, transport in cases:
            comm = make(store, rank, 2, name=name, **options)
            expect(library in comm.description and transport in comm.description, comm.description)
            data = Array(np.ones(10), rank)
            comm.all_reduce(data, async_op=True).wait()
            assert set(data.values) == {2.0}
            comm.barrier()

    store = holmes_comm.LocalStore()
    run_threads(2, lambda rank: body(rank, store))


def case_arguments():
    def body(comm):
        rank = comm.rank
        usage = holmes_comm.UsageError
        refused = [
            (lambda: comm.all_reduce(np.zeros(3)), "lives on DLPack device type 1"),
            (lambda: comm.all_reduce(Array(np.zeros(3), 5)), f"not in the memory of GPU {rank}"),
            (lambda: comm.all_reduce(Array(np.zeros(3, "int16"), rank)), "int16"),
            (lambda: comm.all_reduce(Array(np.zeros(3, "int32"), rank), "bxor"), "'bxor' of int32"),
            (lambda: comm.all_reduce(Array(np.zeros(3, "int32"), rank), "avg"), "avg"),
            (lambda: comm.all_reduce(Array(np.zeros(3, "complex64"), rank)), "not supported"),
            (lambda: comm.send(Array(np.zeros(3), rank), rank), "itself"),
            (lambda: comm.send(Array(np.zeros(3), rank), 1 - rank, tag=4), "no tags"),
            (lambda: comm.recv(Array(np.zeros(3), rank)), "name the source"),
            (lambda: comm.broadcast(Array(np.zeros(3), rank), 7), "not a rank"),
            (lambda: comm.all_gather(Array(np.zeros(6), rank), Array(np.zeros(5), rank)), "holds 3"),
            (lambda: comm.gather(Array(np.zeros(5), rank), Array(np.zeros(6), rank), rank), "holds 3"),
            (lambda: comm.scatter(Array(np.zeros(3), rank), Array(np.zeros(10), rank), rank), "holds 3"),
            (lambda: comm.all_to_all(Array(np.zeros(6), rank), Array(np.zeros(10), rank)), "holds 3"),
            (lambda: comm.reduce_scatter(Array(np.zeros(3), rank), Array(np.zeros(10), rank)), "holds 3"),
        ]
        for call, text in refused:
            error, _ = failure_of(call)
            expect(isinstance(error, usage) and text in str(error), (text, str(error)))
        comm.barrier()  # still usable
        if "2.18" in comm.description:
            error, _ = failure_of(lambda: comm.register_buffer(Array(np.zeros(3), rank)))
            assert "2.19" in str(error)
        else:
            data = Array(np.zeros(3), rank)
            comm.deregister_buffer(comm.register_buffer(data))
        comm.barrier()  # who leaves ends the other's

    run(2, body)


def set_fault(fault):
    os.environ["FAKE_NCCL_FAULT"] = fault


def case_init_fail():
    set_fault("init_fail@1")
    store = holmes_comm.LocalStore()

    def body(rank):
        error, seconds = failure_of(lambda: make(store, rank, 2, connect_timeout_s=20.0))
        assert isinstance(error, holmes_comm.CommunicatorError), error
        assert seconds < 5, "the other rank's failure was not noticed"
        return str(error)

    texts = run_threads(2, body)
    assert "set-up fails as asked" in texts[1], texts
    assert "rank 1" in texts[0], texts


def case_init_hang():
    set_fault("init_hang@1")
    store = holmes_comm.LocalStore()

    def body(rank):
        error, seconds = failure_of(lambda: make(store, rank, 2, connect_timeout_s=2.0))
        expect(isinstance(error, holmes_comm.CommunicatorError) and seconds < 10, error)

    run_threads(2, body)


def expect_end(fault, kinds, text, size=2):
    """With this fault, every rank's all_reduce ends with one of `kinds` in time, and so does every later call."""

    def body(comm):
        comm.barrier()
        comm.all_reduce(Array(np.ones(10), comm.rank), async_op=True).wait()
        barrier.wait()
        set_fault(fault)
        barrier.wait()
        error, seconds = failure_of(lambda: comm.all_reduce(Array(np.ones(10), comm.rank), async_op=True).wait())
        assert isinstance(error, kinds), repr(error)
        assert seconds < 12, seconds
        assert comm.is_dead
        again, seconds = failure_of(lambda: comm.all_reduce(Array(np.ones(10), comm.rank)))
        expect("is dead" in str(again) and seconds < 1, (again, seconds))
        failure_of(comm.barrier)
        return str(error)

    barrier = threading.Barrier(size)
    texts = run(size, body, timeout_s=2.0)
    assert any(text in one for one in texts), texts


def case_stream_hang():
    expect_end("stream_hang@1", holmes_comm.CommunicatorError, "not finished at its deadline")


def case_async_error():
    expect_end("async_error@1", holmes_comm.CommunicatorError, "asynchronous error as asked")


def case_call_hang():
    # A thread that NCCL never lets go cannot be helped; the others are.
    store = holmes_comm.LocalStore()
    ready_to_fail = threading.Barrier(2)

    def body(rank):
        comm = make(store, rank, 2, timeout_s=2.0)
        comm.barrier()
        ready_to_fail.wait()
        set_fault("call_hang@1")
        ready_to_fail.wait()
        if rank == 1:
            threading.Thread(target=lambda: comm.all_reduce(Array(np.ones(10), rank)), daemon=True).start()
            time.sleep(0.2)
            error, seconds = failure_of(lambda: comm.barrier(timeout_s=1.0))
            expect(isinstance(error, holmes_comm.TimeoutError) and seconds < 3, error)
        else:
            error, seconds = failure_of(lambda: comm.all_reduce(Array(np.ones(10), rank), async_op=True).wait())
            expect(isinstance(error, holmes_comm.CommunicatorError) and seconds < 5, error)
        return comm

    comms = run_threads(2, body)
    sys.stdout.flush()
    os._exit(0 if len(comms) == 2 else 1)


def case_abort():
    """abort never blocks; peers are told."""

    def body(comm):
        if comm.rank == 0:
            work = comm.all_reduce(Array(np.ones(10), 0), async_op=True)  # rank 1 takes no part
            start = time.monotonic()
            comm.abort("enough")
            assert time.monotonic() - start < 1
            error, seconds = failure_of(work.wait)
            assert isinstance(error, holmes_comm.AbortedError)
            assert "enough" in str(error)
            assert seconds < 1
        else:
            deadline = time.monotonic() + 10
            while not comm.is_dead and time.monotonic() < deadline:
                time.sleep(0.01)
            error, _ = failure_of(lambda: comm.all_reduce(Array(np.ones(10), 1), async_op=True))
            expect(isinstance(error, holmes_comm.AbortedError) and "enough" in str(error), error)

    run(2, body)
    sys.stdout.flush()
    os._exit(0)


def case_wide():
    """Of eight ranks each is connected with its row and column alone; who aborts or leaves is heard of by all."""
    os.environ["HOLMES_WIDE_MIN_RANKS"] = "5"
    size, ending = 8, 4  # not connected with ranks 1 to 3
    all_done = threading.Barrier(size)

    def abort(comm, data):
        if comm.rank == ending:
            comm.abort("enough")
            return
        error, seconds = failure_of(lambda: comm.all_reduce(data, async_op=True).wait())
        expect(isinstance(error, holmes_comm.AbortedError) and "rank 4" in str(error) and "enough" in str(error), error)
        assert seconds < 5, seconds

    def leave(comm, data):
        if comm.rank == ending:
            return
        error, seconds = failure_of(lambda: comm.all_reduce(data, async_op=True).wait())
        expect(isinstance(error, holmes_comm.CommunicatorError) and seconds < 8, (error, seconds))

    for end in (abort, leave):

        def body(comm, end=end):
            peers = {row["peer"] for row in comm.connections()}
            assert len(peers) <= 5, peers
            assert comm.rank not in (1, 2, 3) or ending not in peers, peers
            data = Array(np.ones(10), comm.rank)
            comm.all_reduce(data, async_op=True).wait()
            assert set(data.values) == {float(size)}
            all_done.wait()
            end(comm, data)

        run(size, body)


def case_abort_hang():
    """As case_abort, where NCCL's own abort never returns."""
    set_fault("abort_hang@0")
    case_abort()


def case_rebuild():
    """After a failure a new communicator works in the same process."""

    def body(rank):
        first = make(store, rank, 2, timeout_s=1.0, name="first")
        if rank == 0:
            error, _ = failure_of(lambda: first.all_reduce(Array(np.ones(10), 0), async_op=True).wait())
            assert isinstance(error, holmes_comm.TimeoutError), error
        barrier.wait()
        second = make(store, rank, 2, name="second")
        data = Array(np.ones(10), rank)
        second.all_reduce(data, async_op=True).wait()
        assert set(data.values) == {2.0}

    store = holmes_comm.LocalStore()
    barrier = threading.Barrier(2)
    run_threads(2, body)


if __name__ == "__main__":
    globals()[f"case_{sys.argv[1]}"]()
    print("passed")
