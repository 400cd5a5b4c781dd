"""Every collective against numpy: sizes from 0 to 64 MiB, odd counts, every dtype and operation, 1 to 8 ranks."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from ranks import outcomes, run_communicators

from holmes_comm import errors

TRANSPORTS = ["tcp", "auto"]
TRANSPORTS_AND_TLS = [*TRANSPORTS, "tls"]
FLOATS = ["float64", "float32", "float16"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8"]
DTYPES = [*FLOATS, *INTEGERS, "bool"]
ARITHMETIC = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}
BITWISE = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
# Around the thresholds: empty, one, odd, one-step limit, slice, several slices.
COUNTS = [0, 1, 13, 1021, 16385, 100003, 1000001]


def contribution(rank: int, count: int, dtype: str) -> np.ndarray:
    generator = np.random.default_rng(1000 * rank + count)
    if dtype == "bool":
        return generator.integers(0, 2, count).astype(bool)
    if dtype in FLOATS:
        return generator.uniform(0.5, 1.5, count).astype(dtype)
    return generator.integers(0, 11, count).astype(dtype)


def expected(op: str, parts: list[np.ndarray]) -> np.ndarray:
    dtype = parts[0].dtype
    if dtype == np.bool_:
        logical = {"sum": "or", "max": "or", "bor": "or", "product": "and", "min": "and", "band": "and", "bxor": "xor"}
        return functools.reduce(getattr(np, f"logical_{logical[op]}"), parts)
    wide = [part.astype(np.float64) if dtype.kind == "f" else part for part in parts]
    if op == "avg":
        return functools.reduce(np.add, wide) / len(parts)
    with np.errstate(over="ignore"):
        return functools.reduce((ARITHMETIC | BITWISE)[op], wide)


def assert_reduced(actual: np.ndarray, op: str, parts: list[np.ndarray]) -> None:
    wanted = expected(op, parts)
    if actual.dtype.kind != "f":
        np.testing.assert_array_equal(actual, wanted.astype(actual.dtype))
        return
    # One rounding of a 16-bit result; a few of float32 and float64 sums.
    np.testing.assert_allclose(actual.astype(np.float64), wanted, rtol=4 * np.finfo(actual.dtype).eps)


def operations(dtype: str) -> list[str]:
    if dtype in FLOATS:
        return [*ARITHMETIC, "avg"]
    return [*ARITHMETIC, *BITWISE]


def sizes_and_transports(sizes: list[int], tls_sizes: list[int]) -> list[tuple[int, str]]:
    """Every size on every transport; with TLS, which only wraps one of them, fewer."""
    return [(size, transport) for size in sizes for transport in TRANSPORTS] + [(size, "tls") for size in tls_sizes]


@pytest.mark.parametrize(("size", "transport"), sizes_and_transports([1, 2, 3, 4, 8], [3]))
def test_all_reduce_and_reduce_scatter_every_dtype_and_operation(size: int, transport: str) -> None:
    def body(comm):
        for dtype in DTYPES:
            for op in operations(dtype):
                for count in (0, 5, 1021, 16385):
                    parts = [contribution(r, count * size, dtype) for r in range(size)]
                    data = parts[comm.rank].copy()
                    comm.all_reduce(data, op)
                    assert_reduced(data, op, parts)
                    output = np.empty(count, dtype)
                    comm.reduce_scatter(output, parts[comm.rank], op)
                    mine = slice(comm.rank * count, (comm.rank + 1) * count)
                    assert_reduced(output, op, [part[mine] for part in parts])

    run_communicators(size, body, transport=transport)


@pytest.mark.parametrize(("size", "transport"), sizes_and_transports([1, 2, 3, 5, 8], [2, 5]))
def test_collectives_without_arithmetic(size: int, transport: str) -> None:
    counts = [*COUNTS[:-1], COUNTS[-1] // size]
    contributions = {count: [contribution(r, count * size, "float32") for r in range(size)] for count in counts}

    def body(comm):
        for count, parts in contributions.items():
            gathered = np.empty(count * size * size, "float32")
            comm.all_gather(gathered, parts[comm.rank])
            np.testing.assert_array_equal(gathered, np.concatenate(parts))

            exchanged = np.empty(count * size, "float32")
            comm.all_to_all(exchanged, parts[comm.rank])
            mine = slice(comm.rank * count, (comm.rank + 1) * count)
            np.testing.assert_array_equal(exchanged, np.concatenate([part[mine] for part in parts]))

            root = size - 1
            data = parts[comm.rank].copy()
            comm.broadcast(data, root)
            np.testing.assert_array_equal(data, parts[root])

            data = parts[comm.rank].copy()
            comm.reduce(data, root)
            if comm.rank == root:
                assert_reduced(data, "sum", parts)
            else:
                np.testing.assert_array_equal(data, parts[comm.rank])

            collected = [np.empty(count * size, "float32") for _ in range(size)] if comm.rank == root else None
            comm.gather(parts[comm.rank], collected, root)
            if collected is not None:
                np.testing.assert_array_equal(np.stack(collected), np.stack(parts))

            received = np.empty(count, "float32")
            comm.scatter(received, parts[root] if comm.rank == root else None, root)
            np.testing.assert_array_equal(received, parts[root][mine])
            comm.barrier()

    run_communicators(size, body, transport=transport)


@pytest.mark.parametrize("transport", TRANSPORTS_AND_TLS)
def test_uneven_forms(transport: str) -> None:
    size = 4
    counts = [3, 0, 70001, 12]

    def body(comm):
        rank = comm.rank
        outputs = [np.empty(count, "int64") for count in counts]
        comm.all_gather(outputs, np.full(counts[rank], rank, "int64"))
        for r, output in enumerate(outputs):
            assert (output == r).all()

        inputs = [np.full(count, rank + 1, "int32") for count in counts]
        output = np.empty(counts[rank], "int32")
        comm.reduce_scatter(output, inputs)
        assert (output == 10).all()

        # Rank r sends r + q elements to rank q, in one buffer with split sizes.
        send_sizes = [rank + q for q in range(size)]
        recv_sizes = [q + rank for q in range(size)]
        sent = np.concatenate([np.full(n, 10 * rank + q, "int16") for q, n in enumerate(send_sizes)])
        received = np.empty(sum(recv_sizes), "int16")
        comm.all_to_all(received, sent, recv_sizes, send_sizes)
        wanted = np.concatenate([np.full(n, 10 * q + rank, "int16") for q, n in enumerate(recv_sizes)])
        np.testing.assert_array_equal(received, wanted)

    run_communicators(size, body, transport=transport)


@pytest.mark.parametrize(("size", "transport"), sizes_and_transports([2, 4], [4]))
def test_64_mib(size: int, transport: str) -> None:
    count = 64 * 2**20 // 4 + 3
    count -= count % size

    def body(comm):
        data = np.full(count, comm.rank + 1, "float32")
        data[::1001] = comm.rank
        comm.all_reduce(data)
        wanted = np.full(count, size * (size + 1) / 2, "float32")
        wanted[::1001] = size * (size - 1) / 2
        np.testing.assert_array_equal(data, wanted)
        output = np.empty(count // size, "float32")
        comm.reduce_scatter(output, data, "max")
        np.testing.assert_array_equal(output, wanted[comm.rank * count // size : (comm.rank + 1) * count // size])
        comm.all_gather(data, output)
        np.testing.assert_array_equal(data, wanted)

    run_communicators(size, body, transport=transport)


@pytest.mark.parametrize("transport", TRANSPORTS_AND_TLS)
def test_results_are_bit_identical_on_all_ranks_and_from_run_to_run(transport: str) -> None:
    size = 4

    def body(comm):
        results = []
        for count in (1000, 300001):
            for dtype in ("float32", "float16"):
                generator = np.random.default_rng(comm.rank)
                data = generator.standard_normal(count).astype(dtype)
                comm.all_reduce(data)
                results.append(data.tobytes())
        return results

    first = run_communicators(size, body, transport=transport)
    assert all(results == first[0] for results in first)
    assert run_communicators(size, body, transport=transport) == first


def test_16_bit_sums_accumulate_in_32_bit() -> None:
    # 4096 + 1 is 4096 in float16: adding ones one by one would stay there.
    def body(comm):
        data = np.array([4096.0 if comm.rank == 0 else 1.0], "float16")
        comm.all_reduce(data)
        assert float(data[0]) == 4104.0  # 4103 rounded to nearest even, once

    run_communicators(8, body)


def test_torch_tensors_and_bfloat16() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")

    def body(comm):
        data = torch.full((3, 5), float(comm.rank + 1), dtype=torch.bfloat16)
        comm.all_reduce(data, "avg")
        assert torch.equal(data, torch.full((3, 5), 2.0, dtype=torch.bfloat16))
        gathered = torch.empty(3 * 3 * 5, dtype=torch.bfloat16)
        comm.all_gather(gathered, data)
        assert torch.equal(gathered, torch.full((45,), 2.0, dtype=torch.bfloat16))

    run_communicators(3, body)


def test_asynchronous_operations_finish_in_order_and_hold_their_buffers() -> None:
    def body(comm):
        works = [comm.all_reduce(np.full(50000, comm.rank, "int64"), async_op=True) for _ in range(5)]
        data = np.full(100, comm.rank, "int64")
        works.append(comm.all_reduce(data, async_op=True))
        works[-1].wait()
        assert (data == 3).all()
        assert [work.state for work in works] == ["completed"] * 6
        assert all(work.elapsed_s > 0 for work in works)

    run_communicators(3, body)


def test_a_wait_that_is_too_short_names_what_it_was_given() -> None:
    def body(comm):
        data = np.zeros(4, np.float32)
        if comm.rank == 0:
            work = comm.recv(data, src=1, async_op=True)
            with pytest.raises(errors.TimeoutError, match=r"not finished after the 0\.2 s given to wait"):
                work.wait(0.2)
            comm.send(data, dst=1)
            work.wait()
        else:
            comm.recv(data, src=0)
            comm.send(data, dst=0)

    run_communicators(2, body)


def test_point_to_point() -> None:
    def body(comm):
        rank, size = comm.rank, comm.size
        right, left = (rank + 1) % size, (rank - 1) % size
        for count in COUNTS:
            got = np.empty(count, "float32")
            works = comm.batch([("send", np.full(count, rank, "float32"), right, 3), ("recv", got, left, 3)])
            for work in works:
                work.wait()
            assert (got == left).all()
            got[:] = -1
            assert comm.sendrecv(np.full(count, rank, "float32"), right, got, left, tag=3) is None
            assert (got == left).all()
        # sendrecv meets what the others call.
        ending, answer = np.empty(7), np.empty(2)
        if rank == 0:
            comm.sendrecv(np.full(7, 9.0), 1, answer, size - 1)
            assert (answer == size - 1).all()
        if rank == 1:
            comm.recv(ending, 0)
            assert (ending == 9).all()
        if rank == size - 1:
            comm.send(np.full(2, float(rank)), 0)
        if rank == 0:
            one = np.empty(4, "int32")
            sources = {comm.recv(one, tag=5) for _ in range(size - 1)}
            assert sources == set(range(1, size))
        else:
            comm.send(np.full(4, rank, "int32"), 0, tag=5)
        # Tags out of order.
        if rank == 0:
            comm.send(np.full(10, 1, "uint8"), 1, tag=1)
            comm.send(np.full(20, 2, "uint8"), 1, tag=2)
        if rank == 1:
            second, first = np.empty(20, "uint8"), np.empty(10, "uint8")
            comm.recv(second, 0, tag=2)
            comm.recv(first, 0, tag=1)
            assert (first == 1).all()
            assert (second == 2).all()

    for transport in TRANSPORTS_AND_TLS:
        run_communicators(4, body, transport=transport)


def test_a_sendrecv_whose_peer_sends_another_count_names_both() -> None:
    def body(comm):
        comm.sendrecv(np.zeros(3 + comm.rank), 1 - comm.rank, np.zeros(3), 1 - comm.rank)
        comm.barrier()  # rank 1's own messages may be done before rank 0 sees

    for outcome in outcomes(2, body):
        assert isinstance(outcome, errors.MismatchError), outcome
        assert "rank 1 (host " in str(outcome), outcome
        assert "sent 32 bytes of float64" in str(outcome), outcome


def test_split() -> None:
    def body(comm):
        part = comm.split(comm.rank % 2 if comm.rank < 4 else -1, key=-comm.rank)
        if comm.rank == 4:
            assert part is None
            return
        assert part.size == 2
        assert part.rank == (0 if comm.rank >= 2 else 1)  # highest first
        data = np.array([comm.rank], "int64")
        part.all_reduce(data)
        assert data[0] == (2 if comm.rank % 2 == 0 else 4)

    run_communicators(5, body)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_split_that_meets_another_operation_is_named(transport: str) -> None:
    """Its colors and keys are as many bytes as what the others gather here."""

    def body(comm):
        if comm.rank == 0:
            comm.split(0)
        else:
            comm.all_gather([np.zeros(2, "int64") for _ in range(2)], np.ones(2, "int64"))

    for outcome in outcomes(2, body, transport=transport):
        assert isinstance(outcome, errors.MismatchError), outcome
        assert "called split #" in str(outcome)
        assert "called all_gather #" in str(outcome)


def test_connections_report_both_ends_and_count_bytes() -> None:
    def body(comm):
        comm.all_reduce(np.zeros(2**20, "uint8"))
        return comm.connections()

    for rank, connections in enumerate(run_communicators(2, body, transport="tcp")):
        by_purpose = {connection["purpose"]: connection for connection in connections}
        assert set(by_purpose) == {"control", "collective", "p2p"}
        for connection in connections:
            assert connection["peer"] == 1 - rank
            assert connection["transport"] == "tcp"
            assert connection["interface"] == "lo"
            assert connection["local_address"].startswith("127.0.0.1:")
            assert connection["remote_address"].startswith("127.0.0.1:")
        assert by_purpose["collective"]["sent_bytes"] > 2**20
        assert by_purpose["collective"]["received_bytes"] > 2**20
        assert by_purpose["p2p"]["sent_bytes"] == 0
    for connections in run_communicators(2, body, transport="auto"):
        assert {connection["transport"] for connection in connections} == {"shm"}


@pytest.mark.parametrize("transport", TRANSPORTS_AND_TLS)
def test_receive_posted_while_its_message_arrives_for_another_one(transport: str) -> None:
    """Rank 1 reads on behalf of a receive with another tag when the message comes."""
    rounds, count = 40, 300_000

    def body(comm):
        if comm.rank == 0:
            for number in range(rounds):
                comm.send(np.full(count, number, "float32"), 1)
            comm.send(np.full(1, 7.0), 1, tag=9)
            return
        last = np.zeros(1)
        pending = comm.recv(last, 0, tag=9, async_op=True)
        data = np.zeros(count, "float32")
        for number in range(rounds):
            comm.recv(data, 0)
            assert (data == number).all()
        pending.wait()
        assert last[0] == 7.0

    run_communicators(2, body, transport=transport, timeout_s=20.0)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_messages_of_no_size_have_a_limit_too(transport, count, monkeypatch):
    """Each takes memory that is not its payload's."""
    monkeypatch.setenv("HOLMES_UNEXPECTED_BYTES", str(1 << 20))

    def body(comm):
        if comm.rank == 0:

            def flood():
                for _ in range(50_000):
                    comm.send(np.zeros(count, "uint8"), 1, tag=1)
                comm.barrier()

            with pytest.raises(errors.HolmesError):
                flood()
            return
        with pytest.raises(errors.MismatchError, match=r"sent [01] bytes.*HOLMES_UNEXPECTED_BYTES"):
            comm.recv(np.zeros(1), 0, tag=9)

    run_communicators(2, body, transport=transport)


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_messages_nobody_asked_for_have_a_limit(transport, monkeypatch):
    """Rank 1 waits for another tag while messages of 1 MiB come that it has posted no receive for."""
    monkeypatch.setenv("HOLMES_UNEXPECTED_BYTES", str(8 << 20))
    count = 1 << 20

    def body(comm):
        if comm.rank == 0:
            works = [comm.send(np.full(count, number, "uint8"), 1, tag=1, async_op=True) for number in range(8)]
            comm.send(np.full(1, 7.0), 1, tag=9)
            for work in works:
                work.wait()
            comm.barrier()  # rank 1 has taken them: there is room again

            def flood():
                for _ in range(300):
                    comm.send(np.zeros(count, "uint8"), 1, tag=1)
                comm.barrier()

            with pytest.raises(errors.HolmesError):
                flood()
            return
        last = np.zeros(1)
        comm.recv(last, 0, tag=9)
        assert last[0] == 7.0
        for number in range(8):
            message = np.zeros(count, "uint8")
            comm.recv(message, 0, tag=1)
            assert (message == number).all()
        comm.barrier()
        with pytest.raises(errors.MismatchError, match="HOLMES_UNEXPECTED_BYTES"):
            comm.recv(last, 0, tag=9)

    run_communicators(2, body, transport=transport)
