"""Wide groups, small ones: data of several pieces, threads, messages, thresholds that differ, ranks that are lost."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import buffers_fuzz
import numpy as np
import pytest
from paths import WORKERS
from ranks import run_threads

import holmes_comm
from holmes_comm import CommunicatorOptions, HolmesError, MismatchError, UsageError

HOST = socket.gethostname()
_names = itertools.count()


def run_wide(size: int, body: Callable[[Any], Any], *, transport: str = "tcp", timeout_s: float = 60.0) -> list[Any]:
    """``body(communicator)`` on every rank, or the HolmesError it ended with."""
    store, name = holmes_comm.LocalStore(), f"wide{next(_names)}"

    def rank_body(rank: int) -> Any:
        options = CommunicatorOptions(wide_min_ranks=4)
        comm = holmes_comm.init(store, rank, size, name=name, transport=transport, timeout_s=timeout_s, options=options)
        try:
            return body(comm)
        except HolmesError as error:
            return error

    return run_threads(size, rank_body)


def checked(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def test_random_operations() -> None:
    cases, failure = buffers_fuzz.run(1, seconds=6.0, cases=40, is_wide=True)
    assert failure is None, str(failure)
    assert cases > 3


MIB = 1 << 20


def pattern(rank: int, count: int, part: int = 0) -> np.ndarray:
    return np.resize(np.arange(251, dtype=np.uint8) + np.uint8(7 * rank + 13 * part), count)


@pytest.mark.parametrize("root", [0, 3, 4])  # in a long row, at its place for another, in a short one
def test_data_of_several_pieces_to_and_from_a_root(root: int) -> None:
    size, count = 5, 9 * MIB + 3
    total = np.add.reduce([pattern(rank, count) for rank in range(size)], dtype=np.uint8)

    def body(comm: Any) -> None:
        data = pattern(comm.rank, count)
        comm.reduce(data, root)
        assert np.array_equal(data, total if comm.rank == root else pattern(comm.rank, count))
        data = pattern(comm.rank, count)
        comm.broadcast(data, root)
        assert np.array_equal(data, pattern(root, count))

    checked(run_wide(size, body))


def test_data_of_several_pieces_of_every_rank() -> None:
    size, count = 5, 7 * MIB + 1  # in more pieces than two, of every operation

    def body(comm: Any) -> None:
        inputs = [pattern(comm.rank, count, part) for part in range(size)]
        output = np.empty(count, np.uint8)
        comm.reduce_scatter(output, inputs)
        assert np.array_equal(
            output, np.add.reduce([pattern(rank, count, comm.rank) for rank in range(size)], dtype=np.uint8)
        )
        outputs = [np.empty(count + rank, np.uint8) for rank in range(size)]
        comm.all_gather(outputs, pattern(comm.rank, count + comm.rank))
        assert all(np.array_equal(outputs[rank], pattern(rank, count + rank)) for rank in range(size))
        received = [np.empty(count, np.uint8) for _ in range(size)]
        comm.all_to_all(received, inputs)
        assert all(np.array_equal(received[rank], pattern(rank, count, comm.rank)) for rank in range(size))

    checked(run_wide(size, body))


@pytest.mark.parametrize("count", [5, 8192, 100_003])  # in two steps, at its limit, in three
def test_sums_are_alike_bit_for_bit_on_all_ranks(count: int) -> None:
    def body(comm: Any) -> bytes:
        data = np.random.default_rng(comm.rank).standard_normal(count).astype("float32")
        comm.all_reduce(data, "avg")
        return data.tobytes()

    assert len(set(checked(run_wide(7, body, transport="auto")))) == 1


def test_operations_in_flight_end_in_order_and_threads_call_at_once() -> None:
    def body(comm: Any) -> None:
        data = [np.full(50_000, comm.rank + i, "int64") for i in range(8)]
        works = [comm.all_reduce(one, async_op=True) for one in data]
        works[-1].wait()
        assert all(work.is_completed() for work in works)
        assert [int(one[-1]) for one in data] == [21 + 7 * i for i in range(8)]
        in_step = threading.Barrier(3)

        def calls(thread: int) -> None:
            for _ in range(10):  # alike in all threads: in whatever order they come
                total = np.full(1000, 1 + comm.rank, "int32")
                comm.all_reduce(total)
                assert (total == 28).all()
                # Else one thread may be an all_reduce ahead of another, elsewhere the other way, and messages wait for
                # all_reduces that wait for messages.
                in_step.wait(60)
                peer = (comm.rank + 1 + thread) % comm.size
                before = (comm.rank - 1 - thread) % comm.size
                received = np.empty(3000, "int32")
                work = comm.recv(received, before, tag=thread, async_op=True)
                comm.send(np.full(3000, comm.rank, "int32"), peer, tag=thread)
                work.wait()
                assert (received == before).all()

        run_threads(3, calls)
        comm.barrier()

    checked(run_wide(7, body))


def test_a_message_to_a_rank_that_never_calls_ends_at_its_deadline_and_names_it() -> None:
    def body(comm: Any) -> float:
        comm.barrier()
        start = time.monotonic()
        if comm.rank == 0:  # 0 and 5 share neither row nor column
            comm.send(np.ones(3), 5, timeout_s=1.0)
        elif comm.rank == 5:
            time.sleep(1.5)
        return time.monotonic() - start

    error = run_wide(7, body)[0]
    assert isinstance(error, holmes_comm.TimeoutError)
    assert (error.rank, error.peer) == (0, 5)
    assert "send of 24 bytes to rank 5, tag 0: rank 5 has called no send or recv with rank 0 yet" in str(error)


def test_a_group_that_is_left_with_a_message_waiting_leaves_no_thread() -> None:
    def body(comm: Any) -> None:
        if comm.rank == 0:
            comm.send(np.ones(3), 5, async_op=True)

    before = threading.active_count(), len(os.listdir("/proc/self/task"))
    run_wide(7, body)
    end = time.monotonic() + 5
    while len(os.listdir("/proc/self/task")) > before[1] + 2 and time.monotonic() < end:
        time.sleep(0.05)
    assert len(os.listdir("/proc/self/task")) <= before[1] + 2  # an I/O thread, and the one that looks after groups


def test_a_forked_child_is_refused_and_leaves_the_group_as_it_is() -> None:
    def body(comm: Any) -> Any:
        comm.barrier()
        status = None
        if comm.rank == 3:
            child = os.fork()
            if child == 0:
                try:
                    comm.all_reduce(np.ones(3))
                except UsageError as error:
                    del comm
                    os._exit(7 if "belongs to the process that made it" in str(error) else 1)
                os._exit(2)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        comm.barrier()
        return status

    assert checked(run_wide(5, body))[3] == 7


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda comm: comm.barrier(), "barrier"),
        (lambda comm: comm.all_reduce(np.ones(20_001, "float32")), "80004 bytes"),
        (lambda comm: comm.all_reduce(np.ones(20_000, "int32")), "int32"),
        (lambda comm: comm.all_reduce(np.ones(20_000, "float32"), "max"), "max"),
        (lambda comm: comm.broadcast(np.ones(20_000, "float32"), 2), "root 2"),
    ],
)
def test_a_rank_that_does_another_operation_is_told_to_all(mistake: Callable[[Any], Any], words: str) -> None:
    def body(comm: Any) -> None:
        comm.barrier()
        if comm.rank == 6:
            mistake(comm)
        for _ in range(3):
            comm.all_reduce(np.ones(20_000, "float32"))

    for error in run_wide(7, body):
        assert isinstance(error, MismatchError), error
        assert words in str(error), error
        assert f"(host {HOST})" in str(error)


def test_counts_of_a_pair_that_differ_are_named() -> None:
    def body(comm: Any) -> None:
        rows = [1] * comm.size
        if comm.rank == 0:
            rows[5] = 2
        comm.all_to_all(np.empty(comm.size), np.ones(sum(rows)), [1] * comm.size, rows)
        comm.barrier()

    for error in run_wide(7, body):
        assert isinstance(error, MismatchError), error
        assert "rank 0 sends 16 bytes to rank 5, which expects 8 from it" in str(error)


@pytest.mark.parametrize("odd", [0, 4])
@pytest.mark.parametrize("is_wide", [True, False])
def test_thresholds_that_differ_are_named(odd: int, is_wide: bool) -> None:
    """One rank is told otherwise than all others."""
    store, name = holmes_comm.LocalStore(), f"differ{next(_names)}"

    def body(rank: int) -> str:
        ranks = 4 if (rank == odd) == is_wide else 100
        options = CommunicatorOptions(wide_min_ranks=ranks)
        with pytest.raises(UsageError) as caught:
            holmes_comm.init(store, rank, 5, name=name, transport="tcp", connect_timeout_s=10.0, options=options)
        return str(caught.value)

    start = time.monotonic()
    for message in run_threads(5, body):
        assert "give every rank the same wide_min_ranks (HOLMES_WIDE_MIN_RANKS)" in message
        assert f"(host {HOST})" in message
    assert time.monotonic() - start < 9


@pytest.mark.parametrize("missing", [0, 5])
def test_a_rank_that_never_comes_is_named(missing: int) -> None:
    store, name = holmes_comm.LocalStore(), f"missing{next(_names)}"

    def body(rank: int) -> str:
        if rank == missing:
            return ""
        options = CommunicatorOptions(wide_min_ranks=4, nics=[("lo", "127.0.0.1")], transport="tcp")
        options.rank, options.size, options.name, options.connect_timeout_s = rank, 7, name, 2.0
        with pytest.raises(holmes_comm.TimeoutError) as caught:
            holmes_comm._C.make_communicator(store, options)
        return str(caught.value)

    start = time.monotonic()
    for rank, message in enumerate(run_threads(7, body)):
        assert rank == missing or f"rank {missing} " in message, message
    assert time.monotonic() - start < 5


class LateStore:
    """A store whose reader of what `records` begins with looks up late: by then others have heard and gone."""

    def __init__(self, store: Any, records: str) -> None:
        self.store, self.records, self.set, self.get = store, records, store.set, store.get

    def wait(self, keys: list[str], *timeout: Any) -> None:
        if any(key.startswith(self.records) and key.endswith("records") for key in keys):
            time.sleep(0.4)
        self.store.wait(keys, *timeout)


def test_who_hears_late_of_a_rank_that_never_comes_names_that_one() -> None:
    store, missing, late = holmes_comm.LocalStore(), 0, 6

    def body(rank: int) -> str:
        if rank == missing:
            return ""
        options = CommunicatorOptions(wide_min_ranks=4, nics=[("lo", "127.0.0.1")], transport="tcp")
        options.rank, options.size, options.name, options.connect_timeout_s = rank, 7, "late", 2.0
        with pytest.raises(holmes_comm.TimeoutError) as caught:
            holmes_comm._C.make_communicator(LateStore(store, "late/column") if rank == late else store, options)
        return str(caught.value)

    messages = run_threads(7, body)
    assert all(f"rank {missing} " in message for rank, message in enumerate(messages) if rank != missing), messages


def test_a_rank_that_does_not_enter_is_named_on_all() -> None:
    def body(comm: Any) -> None:
        comm.barrier()
        if comm.rank == 5:
            time.sleep(4)
        comm.all_reduce(np.ones(100_000), timeout_s=1.0)

    for rank, error in enumerate(run_wide(7, body)):
        if rank == 5:
            continue
        assert isinstance(error, holmes_comm.TimeoutError), error
        assert error.peer == 5, error
        assert f"rank 5 (host {HOST})" in str(error)
        assert "all_reduce #" in str(error)


def test_a_split_of_a_wide_group_is_one_where_it_is_large_enough() -> None:
    def body(comm: Any) -> tuple[int, float, int]:
        part = comm.split(0 if comm.rank < 6 else 1, -comm.rank)
        data = np.full(10_000, comm.rank, "float64")
        part.all_reduce(data)
        peers = {one["peer"] for one in part.connections()}
        return part.rank, float(data[0]), len(peers)

    results = checked(run_wide(9, body))
    assert [result[:2] for result in results] == [(5 - r, 15.0) for r in range(6)] + [
        (8 - r, 21.0) for r in range(6, 9)
    ]
    assert [result[2] for result in results] == [3] * 6 + [2] * 3  # two rows of three, and a mesh


# --- processes ---
TIMEOUT_S = 5.0  # of every operation in the worker


def run_scenario(scenario: str, transport: str, size: int, victim: int, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    monkeypatch.setenv("HOLMES_WIDE_MIN_RANKS", "4")
    server = holmes_comm.TcpStore("127.0.0.1", 0, is_server=True)
    command = [sys.executable, str(WORKERS / "failure_worker.py"), scenario, str(server.port)]
    processes = [
        subprocess.Popen([*command, str(rank), str(size), transport, str(victim)], stdout=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    try:
        found = []
        for rank, process in enumerate(processes):
            if rank != victim:
                found += [json.loads(line) for line in process.communicate(timeout=60)[0].splitlines()]
        assert len(found) == size - 1
        return found
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.communicate()


@pytest.mark.parametrize(("scenario", "transport", "victim"), [("killed", "tcp", 1), ("killed_in_reduce", "auto", 4)])
def test_a_killed_process_is_named_on_every_survivor(
    scenario: str, transport: str, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for outcome in run_scenario(scenario, transport, 7, victim, monkeypatch):
        assert outcome["error"] == "PeerLostError", outcome
        assert outcome["peer"] == victim, outcome
        assert f"rank {victim} (host {HOST})" in outcome["message"], outcome
        assert outcome["host"] == HOST
        assert outcome["nic"] == ("shm" if transport == "auto" else "lo")
        assert outcome["seconds"] < TIMEOUT_S
        assert outcome["dead"]
        assert scenario != "killed" or outcome["rebuilt_sum"] == 6


def test_a_process_that_is_killed_while_a_far_rank_waits_for_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    for outcome in run_scenario("killed_in_p2p", "tcp", 7, 5, monkeypatch):  # rank 0 shares nothing with it
        assert outcome["error"] == "PeerLostError", outcome
        assert outcome["peer"] == 5, outcome
        assert outcome["seconds"] < TIMEOUT_S


def test_a_stopped_process_times_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for outcome in run_scenario("stopped", "tcp", 7, 5, monkeypatch):
        assert outcome["error"] == "TimeoutError", outcome
        assert outcome["peer"] == 5, outcome
        assert f"rank 5 (host {HOST})" in outcome["message"]
        assert TIMEOUT_S - 0.5 < outcome["seconds"] < TIMEOUT_S + 3
