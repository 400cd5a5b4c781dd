"""Planted hangs in real processes: what `holmes debug` says names the culprit rank and the operation."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import needs_namespaces
from paths import WORKERS

import holmes_comm
from holmes.lab.testbed import Testbed
from holmes.tools.debug import Cause, ask_processes, diagnose

pytestmark = pytest.mark.alone  # asks all testbeds of this user

WORKER = WORKERS / "hang_worker.py"
SIZE = 4
VICTIM = 1
OTHERS = (0, 2, 3)
PATIENCE_S = 30.0


class Ranks:
    """The processes, kept for all scenarios: a rank plays one after the other."""

    def __init__(self) -> None:
        self.server = holmes_comm.TcpStore("127.0.0.1", 0, is_server=True)
        self.processes = [self._start(rank) for rank in range(SIZE)]

    def _start(self, rank: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(WORKER), str(self.server.port), str(rank), str(SIZE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "RANK": str(rank), "HOLMES_HOSTNAME": f"node{rank}"},
        )

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def say(self, line: str) -> None:
        for process in self.processes:
            if process.poll() is None:
                assert process.stdin is not None
                process.stdin.write(line + "\n")
                process.stdin.flush()

    def findings(self, is_there) -> list[Cause]:
        """What the merged records say, as soon as `is_there` agrees."""
        end = time.monotonic() + PATIENCE_S
        while True:
            answers = ask_processes(self.pids)
            found = diagnose(answers.records, answers.silent)
            if is_there(found) or time.monotonic() > end:
                return found
            time.sleep(0.05)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    try:
        yield ranks
    finally:
        ranks.kill()


def cause(ranks: Ranks, scenario: str, kind: str, operation: str, waiting: int) -> Cause:
    """The one cause of the planted hang, once `waiting` ranks are in it; the scenario is ended."""

    def is_there(found: list[Cause]) -> bool:
        causes = [finding for finding in found if finding.is_cause]
        # Processes are asked one after the other: one may have told of what it did before the others came to hang.
        return len(causes) == 1 and any(
            f.kind == kind
            and f.operation == operation
            and scenario in f.group
            and len(f.waiting) >= waiting
            and all(scenario in group for group in re.findall(r"of group (\S+)", f.sentence))  # none of the one before
            for f in causes
        )

    ranks.say(scenario)
    try:
        found = ranks.findings(is_there)
    finally:
        if scenario == "stopped_process":
            ranks.processes[VICTIM].send_signal(signal.SIGCONT)
        ranks.say("end")
    causes = [finding for finding in found if finding.is_cause]
    assert [(f.kind, f.operation) for f in causes] == [(kind, operation)], found
    return causes[0]


def test_slow_rank_is_named_with_the_place_in_its_program(ranks: Ranks) -> None:
    finding = cause(ranks, "slow_rank", "absent", "all_reduce #2", 3)
    assert (finding.culprits, finding.waiting, finding.nics) == ((VICTIM,), OTHERS, ("lo",))
    assert "rank 1 (host node1, NIC lo) has not entered all_reduce #2 of group dp-slow_rank" in finding.sentence
    assert "ranks 0, 2, 3 wait in it for" in finding.sentence
    assert "hang_worker.py" in finding.sentence
    assert "in load_batch" in finding.sentence
    assert "its last one was all_reduce #1" in finding.sentence


def test_stopped_process(ranks: Ranks) -> None:
    finding = cause(ranks, "stopped_process", "absent", "reduce_scatter #2", 3)
    assert finding.culprits == (VICTIM,)
    assert f"its process {ranks.processes[VICTIM].pid} is stopped" in finding.sentence


def test_recv_without_send_is_the_cause_of_the_collectives_wait(ranks: Ranks) -> None:
    # Rank 2 is missing in both; rank 1 only follows. (At first ranks 0 and 3 may be missing too: on their way.)
    expected = {((2,), "recv #0"), ((2,), "all_reduce #1")}

    def causes_of(found: list[Cause]) -> set[tuple[tuple[int, ...], str]]:
        return {(finding.culprits, finding.operation) for finding in found if finding.is_cause}

    ranks.say("recv_without_send")
    found = ranks.findings(lambda found: len(found) >= 3 and causes_of(found) == expected)
    ranks.say("end")
    causes = [finding for finding in found if finding.is_cause]
    assert causes_of(found) == expected
    assert "rank 2 (host node2, NIC lo) has not called the send for recv #0 from rank 2 with tag 5" in str(causes)
    follows = [finding for finding in found if not finding.is_cause]
    assert [(f.culprits, f.operation) for f in follows] == [((1,), "all_reduce #1")]
    assert "rank 1 is in recv #0 from rank 2 with tag 5 of group pp" in follows[0].sentence


def test_send_without_recv(ranks: Ranks) -> None:
    finding = cause(ranks, "send_without_recv", "absent", "send #0", 1)
    assert (finding.culprits, finding.waiting) == ((VICTIM,), (0,))
    assert "has not called the recv for send #0 to rank 1" in finding.sentence


def test_mutual_receives_are_a_deadlock(ranks: Ranks) -> None:
    finding = cause(ranks, "mutual_receives", "deadlock", "recv #0", 2)
    assert finding.culprits == (0, 1)
    assert "waits in recv #0 from rank 1 of group pp-mutual_receives for rank 1, which waits in" in finding.sentence


def test_different_order_of_groups_is_a_deadlock(ranks: Ranks) -> None:
    finding = cause(ranks, "group_order", "deadlock", "all_reduce #1", 2)
    assert VICTIM in finding.culprits
    assert "group a-group_order" in finding.sentence
    assert "group b-group_order" in finding.sentence


@pytest.mark.parametrize(
    ("scenario", "operation", "told"),
    [
        ("wrong_order", "broadcast #1", "broadcast #1 (float32, 100 elements, root 0)"),
        ("wrong_count", "all_reduce #1", "all_reduce #1 (float32, 1001 elements, sum)"),
        ("wrong_dtype", "all_reduce #1", "all_reduce #1 (int32, 1000 elements, sum)"),
        ("wrong_root", "broadcast #1", "broadcast #1 (float64, 1000 elements, root 2)"),
        ("wrong_root_locally", "broadcast #1", "broadcast #1 (float64, 1000 elements, root 2)"),
    ],
)
def test_mismatch(ranks: Ranks, scenario: str, operation: str, told: str) -> None:
    finding = cause(ranks, scenario, "mismatch", operation, 3)
    assert (finding.culprits, finding.waiting) == ((VICTIM,), OTHERS)
    assert f"rank 1 (host node1, NIC lo) called {told} of group dp-{scenario}" in finding.sentence


def test_one_process_of_a_job_does_not_call_the_others_ended(ranks: Ranks) -> None:
    ranks.say("slow_rank")
    ranks.findings(lambda found: bool(found) and len(found[0].waiting) == 3)
    answers = ask_processes([ranks.pids[0]])
    sentences = [finding.sentence for finding in diagnose(answers.records, answers.silent)]
    ranks.say("end")
    assert len(answers.records) == 1
    assert sentences
    assert not any("ended" in sentence for sentence in sentences), sentences


def test_command_line_names_the_crashed_rank(ranks: Ranks) -> None:
    """Last: rank 1 does not come back."""

    def causes_of(found: list[Cause]) -> list[tuple[str, tuple[int, ...], int]]:
        return [(finding.kind, finding.culprits, len(finding.waiting)) for finding in found if finding.is_cause]

    ranks.say("crashed_rank")
    expected = [("lost", (VICTIM,), 3)]
    assert causes_of(ranks.findings(lambda found: causes_of(found) == expected)) == expected
    pids = [str(pid) for rank, pid in enumerate(ranks.pids) if rank != VICTIM]
    command = subprocess.run(
        [sys.executable, "-m", "holmes", "debug", "--json", "-", *pids], capture_output=True, text=True, timeout=60
    )
    ranks.say("end")
    assert command.returncode == 1, command.stderr
    finding = json.loads(command.stdout)["jobs"][0]["findings"][0]
    assert finding["operation"] == "all_reduce #2"
    assert f"rank 1 (host node1, NIC lo) is gone: its process {ranks.pids[VICTIM]} has ended" in finding["sentence"]


def test_ranks_that_wait_for_one_that_never_comes() -> None:
    """Before there is a communicator: the set-up through the store."""
    server = holmes_comm.TcpStore("127.0.0.1", 0, is_server=True)
    program = (
        "import holmes_comm, sys; store = holmes_comm.TcpStore('127.0.0.1', int(sys.argv[1]), False); "
        "holmes_comm.init(store=store, rank=int(sys.argv[2]), size=3, name='late')"
    )
    waiting = [subprocess.Popen([sys.executable, "-c", program, str(server.port), str(rank)]) for rank in (0, 1)]
    try:
        end = time.monotonic() + PATIENCE_S
        while not (found := diagnose(ask_processes([one.pid for one in waiting]).records)) or len(found[0].waiting) < 2:
            assert time.monotonic() < end, found
            time.sleep(0.1)
    finally:
        for one in waiting:
            one.kill()
            one.wait()
    assert found[0].culprits == (2,)
    assert "of 3 ranks of group late, [2] did not come to its set-up, where [0, 1] wait" in found[0].sentence


@needs_namespaces
def test_cut_pair_is_named_on_the_testbed(tmp_path: Path) -> None:
    worker = [sys.executable, str(WORKERS / "cut_worker.py"), str(tmp_path / "go")]
    with Testbed("four-nodes").session() as session:
        job = session.launch(worker, nproc_per_node=1)
        for rank in range(SIZE):
            job.processes[rank].wait_for_line("connected", 30)
        # Between a1 and a2 nothing passes any more, and nobody is told.
        for port in ("p1-0", "p2-0"):
            session.exec(None, ["ip", "link", "set", "dev", port, "type", "bridge_slave", "isolated", "on"])
        (tmp_path / "go").touch()
        end = time.monotonic() + PATIENCE_S
        found: list[Cause] = []
        while not any(finding.kind == "link" for finding in found) and time.monotonic() < end:
            answers = ask_processes(testbed_only=True)
            own = [record for record in answers.records if any(view.name == "cut" for view in record.views)]
            found = diagnose(own)
            time.sleep(0.1)
    causes = [finding for finding in found if finding.is_cause]
    assert [(f.kind, f.culprits, f.operation, f.nics) for f in causes] == [
        ("link", (1, 2), "all_reduce #1", ("eth0",))
    ], found
    assert "nothing comes through between rank" in causes[0].sentence
    assert "of group cut" in causes[0].sentence
