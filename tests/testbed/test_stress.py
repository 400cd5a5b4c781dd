"""`holmes stress`: the data and its check, loops over real communicators, and whole runs on the testbed."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from namespaces import needs_namespaces

from holmes.lab.stress import GroupResult, RankResult, Settings, StressResult, WrongResultError
from holmes.lab.stress.loops import Loop
from holmes.lab.stress.patterns import DTYPES, Patterns
from holmes.lab.stress.summary import rates, summary
from holmes.lab.testbed import Testbed
from holmes_comm import HolmesError, LocalStore, init

STRESS = [sys.executable, "-m", "holmes", "stress", "--max-bytes", "256K", "--timeout-s", "20"]


def test_totals_are_the_sums_of_all_ranks_data() -> None:
    patterns = Patterns(seed=3, group=1, max_count=5000)
    for dtype in DTYPES:
        parts = [patterns.data(7, rank, 100, 4000, dtype) for rank in range(5)]
        assert parts[0].dtype == dtype
        np.testing.assert_array_equal(np.sum(parts, axis=0), patterns.total(7, range(5), 100, 4000, dtype))


def test_data_differ_by_seed_group_operation_rank_and_place() -> None:
    usual = Patterns(3, 1, 2000).data(7, 0, 0, 1000, "int64")
    np.testing.assert_array_equal(usual, Patterns(3, 1, 2000).data(7, 0, 0, 1000, "int64"))
    others = [
        Patterns(4, 1, 2000).data(7, 0, 0, 1000, "int64"),
        Patterns(3, 2, 2000).data(7, 0, 0, 1000, "int64"),
        Patterns(3, 1, 2000).data(8, 0, 0, 1000, "int64"),
        Patterns(3, 1, 2000).data(7, 1, 0, 1000, "int64"),
        Patterns(3, 1, 2000).data(7, 0, 256, 1000, "int64"),
    ]
    assert all(np.mean(usual == other) < 0.1 for other in others)


@pytest.mark.parametrize("kind", ["dp", "tp", "pp"])
@pytest.mark.parametrize("corrupt", [False, True])
def test_loops_over_real_communicators(kind: str, corrupt: bool) -> None:
    settings = Settings(seed=5, max_bytes=1 << 16, timeout_s=20, corrupt=f"{kind}:2:1" if corrupt else "")
    store, size = LocalStore(), 3
    failures: dict[int, Exception] = {}
    loops: dict[int, Loop] = {}
    choices: dict[int, list[Any]] = {rank: [] for rank in range(size)}

    def run(rank: int) -> None:
        comm = init(store, rank, size, name=kind, timeout_s=20)
        loop = loops[rank] = Loop(kind, 0, rank, comm, settings)
        choose = loop._choose
        loop._choose = lambda *given, **named: _noted(choices[rank], choose(*given, **named))  # type: ignore[method-assign]
        try:
            loop.run(time.monotonic() + 0.5)
        except (HolmesError, WrongResultError) as error:
            failures[rank] = error
            comm.abort("a test")

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if not corrupt:
        assert failures == {}
        assert loops[0].round == loops[1].round == loops[2].round > 0
        assert choices[0] == choices[1] == choices[2] != []
        assert len({count for count, _ in choices[0]}) > 3
        assert all(loop.operations > 0 and loop.checked_bytes > 0 for loop in loops.values())
    else:
        assert isinstance(failures[1], WrongResultError)
        assert "number 0 of round 2: 1 of" in str(failures[1])
        assert loops[1].round == 2


def _noted(places: list[Any], value: Any) -> Any:
    places.append(value)
    return value


def test_summary_names_the_wrong_result_first_and_the_command() -> None:
    settings = Settings(seconds=9, seed=77, tensor=2)
    lost = GroupResult("pp", (0, 2), 3, 10, 1000, {"eth0": 500}, 2.0, "PeerLostError: rank 1", 3)
    wrong = GroupResult("dp", (2, 3), 4, 20, 2000, {"roce0": 800}, 2.0, "all_gather number 5 ...", 4, is_wrong=True)
    ranks = (RankResult(0, "a0", (lost,)), RankResult(2, "b0", (wrong,)))
    result = StressResult(ranks, missing=(3,), nic_classes={("a0", "eth0"): "ethernet", ("b0", "roce0"): "roce_v2"})
    lines = summary(result, settings)
    assert result.exit_code == 1
    assert lines[1].startswith(
        "WRONG RESULT: rank 2 on b0, dp group of ranks 2, 3, seed 77, round 4: all_gather number 5"
    )
    assert lines[2].startswith("failed: rank 0 on a0, pp group")
    assert "no report from ranks 3" in lines[3]
    assert lines[4].endswith("holmes stress --seed 77 --first-round 4 --max-bytes 4194304 --seconds 9 --tensor 2")
    assert [(row["kind"], row["class"], row["sent_bytes"]) for row in rates(result)] == [
        ("dp", "roce_v2", 800),
        ("pp", "ethernet", 500),
    ]
    good = StressResult((RankResult.from_dict(json.loads(json.dumps(RankResult(0, "a0").to_dict()))),))
    assert good.exit_code == 0
    assert summary(good, settings)[-1] == "all correct"


def test_who_loses_a_rank_that_was_interrupted_did_not_fail() -> None:
    """The signal reaches ranks one after the other, and a busy machine is slow to tell why a peer left."""
    lost = GroupResult("dp", (2, 3), 3, 10, 1000, {}, 2.0, "PeerLostError: rank 1", 3, lost_rank=3)
    ended = GroupResult("pp", (0, 2), 3, 10, 1000, {}, 2.0, "AbortedError: the dp group failed", 3)
    two = RankResult(2, "b0", (lost, ended), is_interrupted=True)
    assert StressResult((two, RankResult(3, "b1", is_interrupted=True))).exit_code == 0
    killed = StressResult((two, RankResult(3, "b1")))
    assert [group.kind for _, group in killed.failures] == ["dp", "pp"]


@pytest.mark.parametrize(
    "wrong", [{"seconds": 0}, {"max_bytes": 10}, {"seed": -1}, {"corrupt": "dp:1"}, {"corrupt": "xx:1:1"}]
)
def test_settings_that_are_not_possible(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Settings(**wrong)


@needs_namespaces
def test_all_groups_at_once_on_their_own_nics() -> None:
    result = Testbed("two-clusters").run([*STRESS, "--seconds", "5", "--json", "-"], nproc_per_node=2, timeout_s=120)
    assert result.returncode == 0, result.outputs
    lines = result.outputs[0]
    found = json.loads("\n".join(lines[lines.index("{") :]))
    assert any("all correct so far" in line for line in lines)
    assert found["summary"][-1] == "all correct"
    by_kind: dict[str, set[str]] = {}
    for row in found["rates"]:
        if row["sent_bytes"] > 0:
            by_kind.setdefault(row["kind"], set()).update(row["nics"])
    assert by_kind == {"tp": {"shm"}, "dp": {"ib0", "roce0"}, "pp": {"eth0"}}
    assert len(found["ranks"]) == 8
    for rank in found["ranks"]:
        assert {group["kind"] for group in rank["groups"]} == {"tp", "dp", "pp"}
        assert all(group["rounds"] > 0 and not group["failure"] for group in rank["groups"])


@needs_namespaces
def test_a_corrupted_result_is_reported_and_comes_again_from_its_seed() -> None:
    command = [*STRESS, "--seconds", "60", "--seed", "42", "--corrupt", "dp:3:1"]
    with Testbed("two-clusters").session() as session:
        result = session.launch(command).wait(100)
        printed = "\n".join(result.outputs[0])
        assert result.returncode == 1
        assert result.duration_s < 55  # not to the end
        assert "WRONG RESULT: rank 1 on a1, dp group of ranks 0, 1, seed 42, round 3: reduce_scatter" in printed
        assert "--seed 42 --first-round 3" in printed
        again = session.launch([*command, "--first-round", "3"]).wait(100)
    wrong = [line for line in result.outputs[0] if "WRONG RESULT" in line]
    assert wrong
    assert wrong == [line for line in again.outputs[0] if "WRONG RESULT" in line]  # the same sizes, place and values


@needs_namespaces
def test_a_killed_rank_ends_the_run_on_all_others_by_name() -> None:
    with Testbed("two-clusters").session() as session:
        job = session.launch([*STRESS, "--seconds", "90"])
        job.processes[0].wait_for_line("all correct so far", 60)
        job.processes[3].kill(signal.SIGKILL)
        result = job.wait(80, grace_s=40)
    assert not result.timed_out
    printed = "\n".join(result.outputs[0])
    assert "no report from ranks 3" in printed
    failures = [line for line in result.outputs[0] if line.startswith("failed: rank")]
    assert "AbortedError" not in failures[0]  # causes first
    assert "PeerLostError" in "\n".join(line for lines in result.outputs.values() for line in lines)
    assert [process.returncode for process in job.processes] == [1, 1, 1, -signal.SIGKILL]


@needs_namespaces
@pytest.mark.parametrize(("most", "at_least"), [("256K", 1), ("64M", 0)], ids=["short rounds", "in a long round"])
def test_sigterm_ends_a_run_with_what_was_done_till_then(most: str, at_least: int) -> None:
    with Testbed("two-clusters").session() as session:
        job = session.launch([*STRESS, "--max-bytes", most, "--seconds", "90", "--json", "-"])
        job.processes[0].wait_for_line("all correct so far", 60)
        for process in job.processes:
            process.kill(signal.SIGTERM)
        result = job.wait(60, grace_s=20)
    assert [process.returncode for process in job.processes] == [128 + signal.SIGTERM] * 4, result.outputs
    lines = result.outputs[0]
    found = json.loads("\n".join(lines[lines.index("{") :]))
    assert found["interrupted"]
    assert found["summary"][1:] == ["interrupted before its time was over", "all correct"]
    assert all(group["operations"] >= at_least for rank in found["ranks"] for group in rank["groups"])
    assert not any("Traceback" in line for lines in result.outputs.values() for line in lines)
