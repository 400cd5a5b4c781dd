"""broadcast, reduce and gather over sockets, in every algorithm: results, bytes on each rank, failures."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from ranks import outcomes, run_communicators
from test_collectives import DTYPES, contribution, operations

from holmes_comm import MismatchError, TimeoutError

# Empty, log2(n) steps, direct, the chain and the reducing ranks; not to be divided by ranks, cache lines or slices.
COUNTS = [0, 1, 13, 1021, 8191, 50021]
LARGE_BYTES = 4 * 2**20


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_every_dtype_operation_count_and_root(size: int) -> None:
    def body(comm):
        for number, dtype in enumerate(DTYPES):
            for count in COUNTS:
                root = (number + count) % size
                own = contribution(comm.rank, count, dtype)
                data = own.copy()
                comm.broadcast(data, root)
                np.testing.assert_array_equal(data, contribution(root, count, dtype))
                for op in operations(dtype):
                    everywhere = own.copy()
                    comm.all_reduce(everywhere, op)
                    data = own.copy()
                    comm.reduce(data, root, op)
                    # Both reduce in rank order and round once: the same bits.
                    assert data.tobytes() == (everywhere if comm.rank == root else own).tobytes(), (dtype, op, count)

    run_communicators(size, body)


@pytest.mark.parametrize("transport", ["tcp", "tls", "auto"])
def test_every_root_of_large_data_bit_for_bit_from_run_to_run(transport: str) -> None:
    size, count = 5, LARGE_BYTES // 2 + 1

    def body(comm):
        own = np.random.default_rng(comm.rank).standard_normal(count).astype("float16")
        results = []
        for root in range(size):
            data = own.copy()
            comm.reduce(data, root, "avg")
            results.append(hash(data.tobytes()) if comm.rank == root else 0)
            comm.broadcast(data, root)
            results.append(hash(data.tobytes()))
        return results

    first = run_communicators(size, body, transport=transport)
    assert all(results[1::2] == first[0][1::2] for results in first)
    assert len({results[2 * rank] for rank, results in enumerate(first)}) == 1  # whoever is the root
    assert run_communicators(size, body, transport=transport) == first


@pytest.mark.parametrize("operation", ["broadcast", "reduce"])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_no_rank_sends_or_receives_more_than_the_data(size: int, operation: str) -> None:
    def body(comm):
        def moved() -> list[int]:
            one_way = ("sent_bytes", "received_bytes")
            return [sum(each[way] for each in comm.connections() if each["purpose"] == "collective") for way in one_way]

        data = np.ones(LARGE_BYTES, "uint8")
        before = moved()
        comm.broadcast(data, 1) if operation == "broadcast" else comm.reduce(data, 1)
        return [after - start for after, start in zip(moved(), before, strict=True)]

    for sent_and_received in run_communicators(size, body):
        assert max(sent_and_received) < 1.01 * LARGE_BYTES


@pytest.mark.parametrize("transport", ["tcp", "tls"])
def test_a_large_part_of_a_gather_waits_for_its_turn(transport: str) -> None:
    """What leaves before the root is ready for it fills queues; who has entered does not wait for who has not."""
    size = 4
    waits, is_sent = threading.Event(), threading.Event()

    def sent(comm) -> int:
        return sum(each["sent_bytes"] for each in comm.connections() if each["purpose"] == "collective")

    def body(comm):
        comm.barrier()
        part = np.full(LARGE_BYTES, comm.rank, "uint8")
        whole = np.zeros(size * LARGE_BYTES, "uint8")
        before = sent(comm)
        if comm.rank == 0:
            assert waits.wait(60)
        elif comm.rank < 3:
            assert is_sent.wait(60)
        work = comm.gather(part, whole if comm.rank == 0 else None, 0, async_op=True)
        if comm.rank == 3:
            time.sleep(0.5)
            assert sent(comm) - before < 1000
            waits.set()
            end = time.monotonic() + 60
            while sent(comm) - before < LARGE_BYTES and time.monotonic() < end:
                time.sleep(0.01)
            assert sent(comm) - before >= LARGE_BYTES
            is_sent.set()
        work.wait()
        if comm.rank == 0:
            np.testing.assert_array_equal(whole, np.repeat(np.arange(size, dtype="uint8"), LARGE_BYTES))

    run_communicators(size, body, transport=transport)


@pytest.mark.parametrize("sizes", [(1, 2), (2 << 18, 3), (1 << 20, 1 << 10)])
def test_parts_of_a_gather_with_and_without_turns(sizes: tuple[int, int]) -> None:
    """Parts of different lengths, every root, and again and again: who waits for a turn, root and part know alike."""
    size = 4

    def body(comm):
        counts = [sizes[rank % 2] + rank for rank in range(size)]
        for root in (0, 3, 1, 1, 2):
            part = np.full(counts[comm.rank], comm.rank + 1, "uint8")
            outputs = [np.zeros(count, "uint8") for count in counts] if comm.rank == root else None
            comm.gather(part, outputs, root)
            for rank, output in enumerate(outputs or []):
                assert (output == rank + 1).all()

    run_communicators(size, body)
    run_communicators(size, body, transport="auto")


@pytest.mark.parametrize("operation", ["broadcast", "reduce"])
@pytest.mark.parametrize("count", [1, 50021, LARGE_BYTES])
@pytest.mark.parametrize("other", [{"root": 1}, {"count": 3}, {"count": 2 * LARGE_BYTES}, {"dtype": "int8"}])
def test_ranks_that_disagree_are_told(operation: str, count: int, other: dict) -> None:
    def body(comm):
        comm.barrier()  # a rank that is slow to be made would raise there
        asked = {"root": 0, "count": count, "dtype": "uint8"} | (other if comm.rank == 2 else {})
        data = np.ones(asked["count"], asked["dtype"])
        comm.broadcast(data, asked["root"]) if operation == "broadcast" else comm.reduce(data, asked["root"])
        comm.barrier()  # those that had to do with no wrong rank hear of it here

    for outcome in outcomes(4, body, timeout_s=20.0):
        assert isinstance(outcome, MismatchError), outcome
        assert "all ranks must call the same" in str(outcome)


@pytest.mark.parametrize("operation", ["broadcast", "reduce"])
@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_does_not_enter_is_named_at_the_deadline(operation: str, missing: int) -> None:
    def body(comm):
        if comm.rank == missing:
            time.sleep(5)
        else:
            data = np.ones(LARGE_BYTES, "uint8")
            comm.broadcast(data, 0) if operation == "broadcast" else comm.reduce(data, 0)

    found = outcomes(4, body, timeout_s=1.0)
    for rank, outcome in enumerate(found):
        if rank != missing:
            assert isinstance(outcome, TimeoutError), outcome
            assert f"rank {missing} " in str(outcome)
