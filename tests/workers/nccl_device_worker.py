"""Further cases of the NCCL backend's tests, as nccl_worker.py: `python nccl_device_worker.py CASE`.

Reductions that only devices have, groups, CUDA graphs, registered buffers, order on a device, shrinking.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
import time

import numpy as np
from fake_gpu import (
    Array,
    capture,
    copy,
    count,
    destroy,
    end_capture,
    keep_busy,
    launch,
    make_stream,
    most_owners,
    synchronize,
    take_calls,
)
from nccl_worker import FLOATS, assert_close, expect, failure_of, make, run, set_fault
from ranks import run_threads

import holmes_comm

#: Its version: "2.18.03".
NCCL = re.sub(r"\D*(\d)(\d\d)(\d\d)\D*", r"\1.\2.\3", os.path.basename(os.environ["HOLMES_NCCL_LIBRARY"]))


def case_reductions():
    """avg and sums of multiplied contributions, of every floating type."""

    def body(comm):
        rank, size = comm.rank, comm.size
        for dtype in FLOATS:
            parts = [np.full(100 * size, r + 1, dtype) for r in range(size)]
            total = sum(part.astype("float64") for part in parts)
            data = Array(parts[rank], rank)
            comm.all_reduce(data, "avg", async_op=True).wait()
            assert_close(data.values, total / size, dtype)
            for factor in (0.25, -3.0, 0.25, 1 / 1024):  # one of them twice
                data = Array(parts[rank], rank)
                comm.all_reduce(data, premultiply=factor, async_op=True).wait()
                assert_close(data.values, total * factor, dtype)
                output = Array(np.zeros(100, dtype), rank)
                comm.reduce_scatter(output, Array(parts[rank], rank), premultiply=factor, async_op=True).wait()
                assert_close(output.values, total[:100] * factor, dtype)
        for dtype, op, text in (("int32", "sum", "floating point"), ("float32", "max", "for sums")):
            error, _ = failure_of(lambda d=dtype, o=op: comm.all_reduce(Array(np.ones(3, d), rank), o, premultiply=2.0))
            expect(isinstance(error, holmes_comm.UsageError) and text in str(error), error)

    run(2, body)


def case_groups():
    """What a group's block calls starts together at its end, and nothing of it after an exception."""

    def body(comm):
        rank, size = comm.rank, comm.size
        data = [Array(np.full(50, rank + 1.0), rank) for _ in range(4)]
        gathered = Array(np.zeros(50 * size), rank)
        mine, other = Array(np.full(9, float(rank)), rank), Array(np.zeros(9), rank)
        with comm.group(async_op=True) as group:
            for one in data:
                work = comm.all_reduce(one, async_op=True)
                error, _ = failure_of(work.wait)
                assert "when its group ends" in str(error), error
            comm.all_gather(gathered, Array(np.full(50, float(rank)), rank))
            comm.send(mine, 1 - rank)
            comm.recv(other, 1 - rank)
            error, _ = failure_of(comm.barrier)
            assert "cannot be part of a group" in str(error), error
        group.work.wait()
        work.wait()
        for one in data:
            assert set(one.values) == {3.0}
        assert list(gathered.values) == [float(r) for r in range(size) for _ in range(50)]
        assert set(other.values) == {1.0 - rank}

        try:
            with comm.group():
                work = comm.all_reduce(data[0], async_op=True)
                raise KeyError
        except KeyError:
            pass
        error, _ = failure_of(work.wait)
        assert "did not start" in str(error), error
        with comm.group():
            pass
        stream = make_stream()
        late = Array(np.full(50, 1.0), rank, stream)
        result = Array(np.zeros(50), rank)
        keep_busy(stream, 30)
        with comm.group():  # one that is not async: the stream goes on behind it
            comm.all_reduce(late)
        copy(result, late, stream)
        synchronize(stream)
        assert set(result.values) == {2.0}
        comm.barrier()

    run(2, body)


def case_graphs():
    """Captured operations run at each launch; a host cannot wait for them."""

    def body(rank, store):
        comms = [make(store, rank, 2, name=f"g{i}", nccl_variables={"NCCL_HOLMES_NUMBER": str(i)}) for i in range(2)]
        stream = make_stream()
        data, more = Array(np.ones(20), rank, stream), Array(np.ones(20), rank, stream)
        comms[0].all_reduce(data)  # connects; also what runs before a capture is not part of it
        synchronize(stream)
        assert set(data.values) == {2.0}
        capture(stream)
        comms[0].all_reduce(data)
        work = comms[1].all_reduce(more, async_op=True)  # another image in the same graph
        work.wait_stream()
        comms[0].all_reduce(more)
        error, _ = failure_of(work.wait)
        expect(isinstance(error, holmes_comm.UsageError) and "CUDA graph" in str(error), error)
        graph = end_capture(stream)
        assert set(data.values) == {2.0}  # nothing has run
        for launches in (1, 2):
            launch(graph, stream)
            synchronize(stream)
            assert set(data.values) == {2.0 * 2**launches}
            assert set(more.values) == {4.0**launches}
        destroy(graph)
        comms[1].all_reduce(data, async_op=True).wait()  # and outside of it as ever
        for comm in comms:
            comm.barrier()

    store = holmes_comm.LocalStore()
    run_threads(2, lambda rank: body(rank, store))


def case_registration():
    def body(comm):
        data = Array(np.ones(1000), comm.rank)
        if "2.18" in comm.description:
            error, _ = failure_of(lambda: comm.register_buffer(data))
            expect(isinstance(error, holmes_comm.UsageError) and "use 2.19 or later" in str(error), error)
        else:
            handle = comm.register_buffer(data)
            comm.all_reduce(data, async_op=True).wait()
            assert set(data.values) == {2.0}
            comm.deregister_buffer(handle)
            error, _ = failure_of(lambda: comm.deregister_buffer(handle))
            expect(isinstance(error, holmes_comm.UsageError) and "no such registration" in str(error), error)
        error, _ = failure_of(lambda: comm.register_buffer(np.ones(3)))
        assert isinstance(error, holmes_comm.UsageError)
        comm.barrier()

    run(2, body)


def case_side_by_side():
    """Communicators of one device do not wait for each other, of one library or of several."""

    def body(rank, store):
        variables = [{"NCCL_HOLMES_NUMBER": str(i)} for i in range(3)]
        comms = [make(store, rank, 2, name=f"o{i}", nccl_variables=one) for i, one in enumerate(variables)]
        comms.append(make(store, rank, 2, name="again", nccl_variables=variables[0]))  # two of one image
        comms.append(make(store, rank, 2, name="stock"))
        streams = [make_stream() for _ in range(3)]
        data = [Array(np.ones(5000), rank, streams[i % 3]) for i in range(len(comms))]
        works = []
        for turn in range(12):
            for i, comm in enumerate(comms):
                # Streams change, some are busy, some calls are asynchronous.
                if (turn + i + rank) % 5 == 0:
                    keep_busy(streams[i % 3], 3)
                works.append(comm.all_reduce(data[i], async_op=(turn + i) % 2 == 0))
                if works[-1] is not None:
                    works[-1].wait_stream()
        for stream in streams:
            synchronize(stream)
        for one in data:
            assert set(one.values) == {2.0**12}
        # One rank calls two of them the other way round, and one that is behind a busy stream holds up nobody.
        keep_busy(streams[0], 300)
        waiting = comms[0].all_reduce(data[0], async_op=True)
        start = time.monotonic()
        works = [comms[i].all_reduce(data[i], async_op=True) for i in ((1, 4) if rank else (4, 1))]
        for work in works:
            work.wait()
        assert time.monotonic() - start < 0.25
        waiting.wait()
        assert time.monotonic() - start > 0.25
        for comm in comms:
            comm.barrier()

    store = holmes_comm.LocalStore()
    run_threads(2, lambda rank: body(rank, store))
    assert most_owners() > 1
    assert count("in_progress") == 0, "a call returned before its operation was on the device"


def case_small_gpu():
    """Kernels of two libraries that the ranks start in another order fit on a small GPU together."""
    os.environ["FAKE_CUDA_MULTIPROCESSORS"] = "48"

    def body(rank, store):
        comms = [make(store, rank, 2, name="stock", timeout_s=10.0)]
        comms.append(make(store, rank, 2, name="image", timeout_s=10.0, nccl_variables={"NCCL_HOLMES_NUMBER": "1"}))
        data = [Array(np.ones(100), rank) for _ in comms]
        for _ in range(20):
            works = [comms[i].all_reduce(data[i], async_op=True) for i in ((0, 1) if rank else (1, 0))]
            for work in works:
                work.wait()
        for one in data:
            assert set(one.values) == {2.0**20}

    store = holmes_comm.LocalStore()
    run_threads(2, lambda rank: body(rank, store))


def case_graph_lives():
    """Graphs that are not destroyed keep the ends of their communicators waiting, by force too, and nobody else."""

    def body(rank, store):
        comms = [make(store, rank, 2, name=f"l{i}", nccl_variables={"NCCL_HOLMES_NUMBER": str(i)}) for i in range(2)]
        comms.append(make(store, rank, 2, name="l2", nccl_variables={"NCCL_HOLMES_NUMBER": "0"}))
        comms.append(make(store, rank, 2, name="l3", nccl_variables={"NCCL_HOLMES_NUMBER": "0"}))
        stream = make_stream()
        data = Array(np.ones(20), rank, stream)
        for comm in comms:
            comm.all_reduce(data)
        synchronize(stream)
        graphs = []
        for comm in comms[:2]:
            capture(stream)
            comm.all_reduce(data)
            graphs.append(end_capture(stream))
        barrier.wait()
        comms.pop(0)
        comms.pop(0).abort("it has a living graph")
        barrier.wait()
        start = time.monotonic()
        for comm in comms:
            comm.all_reduce(data, async_op=True).wait()
            comm.barrier()
        assert time.monotonic() - start < 1.0
        for graph in graphs:
            destroy(graph)

    store = holmes_comm.LocalStore()
    barrier = threading.Barrier(2)
    run_threads(2, lambda rank: body(rank, store))


def case_capture_undisturbed():
    """Nothing that happens beside a capture breaks it: operations under way, waits, new communicators, messages."""

    def body(rank, store):
        comm = make(store, rank, 2, name="captured")
        stream, busy = make_stream(), make_stream()
        data, other = Array(np.ones(20), rank, stream), Array(np.ones(20), rank, busy)
        comm.all_reduce(data)
        synchronize(stream)
        keep_busy(busy, 100)
        pending = comm.all_reduce(other, async_op=True)  # asked for by the watchdog
        capture(stream)
        comm.all_reduce(data)
        beside = threading.Thread(target=lambda: made.append(make(store, rank, 2, name="new")))
        made = []
        beside.start()
        pending.wait()
        beside.join()
        graph = end_capture(stream)
        launch(graph, stream)
        synchronize(stream)
        assert set(data.values) == {4.0}
        assert not comm.is_dead
        destroy(graph)
        made[0].barrier()

    store = holmes_comm.LocalStore()
    run_threads(2, lambda rank: body(rank, store))


def case_refused():
    """What NCCL itself refuses is the caller's error, and leaves the communicator usable."""

    def body(comm):
        data = Array(np.ones(10), comm.rank)
        comm.all_reduce(data, async_op=True).wait()
        barrier.wait()
        set_fault("refuse_kept@0")
        barrier.wait()
        if comm.rank == 0:
            error, _ = failure_of(lambda: comm.all_reduce(data))
            expect(isinstance(error, holmes_comm.UsageError) and "invalid argument as asked" in str(error), error)
        # It stays NCCL's asynchronous error, of which the watchdog hears more than once.
        busy = make_stream()
        keep_busy(busy, 600)
        comm.broadcast(Array(np.ones(10), comm.rank, busy), 0, async_op=True).wait()
        barrier.wait()
        set_fault("")
        barrier.wait()
        stream = make_stream()
        for _ in range(3):  # the watchdog has time to look
            keep_busy(stream, 100)
            data = Array(np.ones(10), comm.rank, stream)
            comm.all_reduce(data, async_op=True).wait()
            assert set(data.values) == {2.0}
        assert not comm.is_dead
        barrier.wait()  # nobody leaves before

    barrier = threading.Barrier(2)
    run(2, body)


def case_exit():
    """A process that ends with operations under way asks nothing of the driver after its end."""

    def body(comm):
        stream = make_stream()
        data = Array(np.ones(10), comm.rank, stream)
        comm.all_reduce(data, async_op=True).wait()
        keep_busy(stream, 5000)
        work = comm.all_reduce(data, async_op=True)
        for living in (comm, data, work):  # to the very end
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(living))

    run(2, body)


def survivors(comm, excluded, new_size, text=""):
    """The communicator without `excluded` works."""
    rest = comm.shrink(excluded)
    assert rest.size == new_size
    assert rest.rank == comm.rank - sum(rank < comm.rank for rank in excluded)
    data = Array(np.full(10, comm.rank + 1.0), comm.rank)
    rest.all_reduce(data, async_op=True).wait()
    assert set(data.values) == {sum(r + 1.0 for r in range(comm.size) if r not in excluded)}
    expect(text in rest.description, rest.description)
    error, _ = failure_of(comm.barrier)
    expect("it was shrunk" in str(error) or "is dead" in str(error), error)
    return rest


def case_settings():
    """What the options say reaches NCCL, and is refused where its version does not know it."""
    old = "2.18" in NCCL
    settings = {"min_ctas": 2, "max_ctas": 4, "cga_cluster_size": 1, "high_priority": True}
    if not old:
        settings |= {"traffic_class": 7, "cta_policy": 1, "comm_name": "gradients"}

    def body(comm):
        data = Array(np.ones(10), comm.rank)
        comm.all_reduce(data, async_op=True).wait()
        assert set(data.values) == {2.0}

    run(2, body, nccl=holmes_comm.NcclSettings(**settings))
    told = ["minCTAs=2", "maxCTAs=4", "cgaClusterSize=1", "stream of high priority"]
    told += [] if old else ["trafficClass=7", "CTAPolicy=1", "commName=gradients"]
    for what in told:
        assert count(what) == 2, (what, count(what))
    wrongs = [({"min_ctas": 0}, "min_ctas=0 is not possible"), ({"min_ctas": 8, "max_ctas": 4}, "is more than")]
    wrongs += [({"cta_policy": 1}, "2.27.0 or later")] if old else []
    for wrong, text in wrongs:
        error, _ = failure_of(lambda w=wrong: run(2, body, nccl=holmes_comm.NcclSettings(**w)))
        expect(isinstance(error, holmes_comm.UsageError) and text in str(error), error)


def check_parts(comm, text, is_shared=False):
    """Ranks 0 and 2, and ranks 1 and 3 in the other order, work apart; then together as before."""
    key = -comm.rank if comm.rank % 2 else comm.rank
    part = comm.split(comm.rank % 2, key)
    assert part.rank == (comm.rank // 2 if comm.rank % 2 == 0 else 1 - comm.rank // 2)
    expect((text in part.description) == bool(text), part.description)
    for one in (part, comm, part):
        data = Array(np.full(10, comm.rank + 1.0), comm.rank)
        one.all_reduce(data, async_op=True).wait()
        members = range(4) if one is comm else range(comm.rank % 2, 4, 2)
        assert set(data.values) == {sum(r + 1.0 for r in members)}
    assert count("splitShare=1") == (8 if is_shared else 0)  # of the whole and of its parts
    return part


def case_split():
    """NCCL splits one communicator; a rank may stay out of it."""

    def body(comm):
        check_parts(comm, "split from")
        alone = comm.split(-1 if comm.rank == 3 else 0, comm.rank)
        assert (alone is None) == (comm.rank == 3)
        if alone is not None:
            data = Array(np.ones(10), comm.rank)
            alone.all_reduce(data, async_op=True).wait()
            assert set(data.values) == {3.0}
        comm.barrier()

    run(4, body)


def case_split_share():
    settings = holmes_comm.NcclSettings(split_share=True)

    def body(comm):
        part = check_parts(comm, "split from", is_shared=True)
        comm.barrier()
        del part

    run(4, body, nccl=settings)


def case_split_fails():
    """Where NCCL cannot split on one rank, all parts are made anew."""
    set_fault("split_fail@2")

    def body(comm):
        part = comm.split(comm.rank % 2, comm.rank)
        expect("split from" not in part.description, part.description)
        data = Array(np.ones(10), comm.rank)
        part.all_reduce(data, async_op=True).wait()
        assert set(data.values) == {2.0}
        comm.barrier()

    run(4, body)


def case_calls():
    """An exchange of equal parts is one call where NCCL has it; a host that waits makes few calls of CUDA."""
    has_all_to_all = not any(f"{old}." in NCCL for old in ("2.18", "2.21", "2.27"))

    def body(comm):
        rank, size = comm.rank, comm.size
        stream = make_stream()
        output, data = Array(np.zeros(4 * size), rank, stream), Array(np.full(4 * size, rank + 1.0), rank, stream)
        comm.all_to_all(output, data)
        synchronize(stream)
        take_calls()
        comm.all_to_all(output, data)
        calls = {name: number for name, number in take_calls().items() if name.startswith("nccl")}
        wanted = (
            {"ncclAlltoAll": 1}
            if has_all_to_all
            else {"ncclGroupStart": 1, "ncclGroupEnd": 1, "ncclSend": 2, "ncclRecv": 2}
        )
        assert calls == wanted, calls
        synchronize(stream)
        assert list(output.values) == [r + 1.0 for r in range(size) for _ in range(4)]
        # Equal here, but cut by sizes that are others on other ranks.
        own = [1, 1] if rank == 0 else [1, 3]
        output, data = Array(np.zeros(sum(own)), rank, stream), Array(np.full(sum(own), rank + 1.0), rank, stream)
        take_calls()
        comm.all_to_all(output, data, own, own)
        assert "ncclAlltoAll" not in take_calls()
        synchronize(stream)
        assert list(output.values) == [1.0] * own[0] + [2.0] * own[1]
        # The host waits for a long operation, asking little and without a nap.
        data = Array(np.ones(4), rank, stream)
        keep_busy(stream, 200)
        work = comm.all_reduce(data, async_op=True)
        take_calls()
        begin = time.monotonic()
        work.wait()
        assert time.monotonic() - begin > 0.15
        calls = take_calls()
        assert sum(number for name, number in calls.items() if not name.startswith("cuCtx")) <= 6, calls

    run(2, body)


def case_no_sleep():
    """No operation, and no wait for one, has its thread sleep: what it waits for wakes it. Sleeps are counted by what
    is preloaded (counted_sleeps.cpp)."""
    sleeps = ctypes.CDLL(None).counted_sleeps

    def body(comm):
        rank, stream = comm.rank, make_stream()
        before = sleeps()
        time.sleep(0.001)
        assert sleeps() > before, "sleeps are not counted"
        data, whole = Array(np.ones(10), rank, stream), Array(np.zeros(20), rank, stream)
        comm.all_reduce(data)
        before = sleeps()
        for is_async in (False, True):
            keep_busy(stream, 100)
            works = [comm.all_reduce(data, async_op=is_async), comm.all_gather(whole, data, async_op=is_async)]
            works.append(comm.reduce_scatter(data, whole, async_op=is_async))
            with comm.group(async_op=is_async) as group:
                for _ in range(4):
                    comm.all_reduce(data)
            works.append(group.work if is_async else None)
            works += [comm.send(data, 1, async_op=is_async) if rank == 0 else comm.recv(data, 0, async_op=is_async)]
            for work in works:
                if is_async:
                    work.wait_stream(stream)
                    work.wait()
        comm.barrier()
        assert sleeps() == before, sleeps() - before

    run(2, body)


def case_wait_is_freed():
    """A host that waits for an operation that never ends is freed by its deadline, though NCCL's abort hangs too."""
    set_fault("stream_hang@0")

    def body(comm):
        if comm.rank == 1:
            time.sleep(1.5)
            return
        data = Array(np.ones(10), comm.rank)
        error, taken = failure_of(lambda: comm.all_reduce(data, async_op=True, timeout_s=0.5).wait())
        expect(isinstance(error, holmes_comm.TimeoutError), error)
        assert taken < 1.2, taken

    run(2, body)
    sys.stdout.flush()
    os._exit(0)


def case_shrink():
    """A rank leaves, then one is lost: the others go on with a communicator of their own, twice."""

    def body(comm):
        for wrong, text in (([], "no rank"), ([7], "not a rank"), ([comm.rank], "excludes itself"), ([0, 0], "twice")):
            error, _ = failure_of(lambda w=wrong: comm.shrink(w))
            expect(isinstance(error, holmes_comm.UsageError) and text in str(error), error)
        comm.barrier()
        if comm.rank == 1:
            return
        can_shrink = "NCCL 2.18" not in comm.description
        rest = survivors(comm, [1], 3, "shrunk from" if can_shrink else "")
        met.wait()
        if rest.rank == 2:
            rest.abort("lost")
            return
        error, _ = failure_of(lambda: rest.all_reduce(Array(np.ones(10), comm.rank), async_op=True).wait())
        expect(isinstance(error, holmes_comm.CommunicatorError), error)
        ready.wait()  # both have noticed
        last = rest.shrink([2])
        data = Array(np.ones(10), comm.rank)
        last.all_reduce(data, async_op=True).wait()
        assert set(data.values) == {2.0}
        expect("shrunk" not in last.description, last.description)

    met, ready = threading.Barrier(3), threading.Barrier(2)
    run(4, body)
    sys.stdout.flush()
    os._exit(0)


def case_shrink_fails():
    """Where NCCL cannot shrink on one rank, all make a new communicator."""
    set_fault("shrink_fail@2")
    kept = []

    def body(comm):
        kept.append(comm)  # rank 1 stays without taking part
        comm.barrier()
        if comm.rank != 1:
            rest = survivors(comm, [1], 2)
            expect("shrunk" not in rest.description, rest.description)

    run(3, body, connect_timeout_s=4.0)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    globals()[f"case_{sys.argv[1]}"]()
    print("passed")
