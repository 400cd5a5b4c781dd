"""Compares this tree with another commit: `python benchmarks/compare_commits.py COMMIT`, or `make bench-compare`.

Builds COMMIT in a temporary git worktree and times the calls of bench_collectives.py on both in short turns, so that
what else the machine does falls on both alike. The commit takes part twice: how much its two copies differ is the
noise, and what differs by no more than that is no regression. Exits with 1 where a call has become slower than the
threshold allows. This tree must be built.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench_collectives import CASES, RANKS, prepare
from rank_jobs import parse_or_work

import holmes_comm

ROOT = Path(__file__).resolve().parents[1]
TURN_S = 0.02
WARM_UP_S = 0.5


@contextlib.contextmanager
def built_commit(commit: str) -> Iterator[Path]:
    """A worktree of this commit, built in place; removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="holmes-base-") as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
            subprocess.run(build, cwd=tree, check=True, stdout=subprocess.DEVNULL)
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


class Job:
    """The ranks of one case, as processes that use the packages of `tree`; they call as often as they are told to."""

    def __init__(self, tree: Path, case: tuple[str, str, int]) -> None:
        self.tree = tree
        # The path wins over an editable installation.
        path = os.pathsep.join([str(tree), str(tree / "python_api")])
        self.store = holmes_comm.TcpStore("127.0.0.1", 0, is_server=True)
        self.ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "-", "--rank", json.dumps([self.store.port, rank, *case])],
                env=os.environ | {"PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]

    def call(self, calls: int) -> float:
        """Every rank calls; returns seconds a call on rank 0."""
        for rank in self.ranks:
            assert rank.stdin
            with contextlib.suppress(BrokenPipeError):  # a rank that failed is told of below
                rank.stdin.write(f"{calls}\n")
                rank.stdin.flush()
        answers = [rank.stdout.readline() for rank in self.ranks if rank.stdout]
        if not all(answers):
            raise SystemExit(f"a rank with the packages of {self.tree} failed")
        return float(answers[0])

    def calls_in_a_turn(self) -> int:
        """Warms up, and returns how many calls take TURN_S."""
        calls = 1
        end = time.monotonic() + WARM_UP_S
        while True:
            each = self.call(calls)
            calls = max(1, math.ceil(TURN_S / each))
            if time.monotonic() > end:
                return calls

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate()


def work(job: list) -> None:
    """One rank: makes as many calls as each line of its input says, and answers with the seconds of one."""
    port, rank, *case = job
    call = prepare(holmes_comm.TcpStore("127.0.0.1", port, is_server=False), rank, *case)
    for line in sys.stdin:
        calls = int(line)
        call()  # all ranks are there
        start = time.perf_counter()
        for _ in range(calls):
            call()
        print((time.perf_counter() - start) / calls, flush=True)


@dataclass(frozen=True)
class Comparison:
    """Seconds a call before and now (medians of turns), how many times faster now, and the same of two equal trees."""

    before_s: float
    now_s: float
    faster: float
    control: float

    @classmethod
    def of(cls, turns: list[tuple[float, float, float]]) -> "Comparison":
        """From the turns' seconds a call, each of the base, the base's second copy and this tree."""
        before, _, now = (statistics.median(each) for each in zip(*turns, strict=True))
        faster = statistics.median(math.sqrt(base * twin) / own for base, twin, own in turns)
        control = statistics.median(base / twin for base, twin, _ in turns)
        return cls(before, now, faster, control)

    def slower(self, threshold: float) -> bool:
        """Whether it takes more than (1 + threshold) times as long as before, and more than noise explains."""
        noise = max(self.control, 1 / self.control) - 1
        return 1 / self.faster > 1 + max(threshold, noise)


def compare(base: Path, own: Path, case: tuple[str, str, int], turns: int) -> Comparison:
    jobs: list[Job] = []
    try:
        jobs.extend(Job(tree, case) for tree in (base, base, own))
        calls = max(job.calls_in_a_turn() for job in jobs)
        taken = []
        for turn in range(turns):
            # Who comes after whom changes: a job is slower right after another one's.
            order = sorted(range(len(jobs)), key=lambda index: (index + turn) % len(jobs), reverse=turn % 2 == 1)
            times = {index: jobs[index].call(calls) for index in order}
            taken.append((times[0], times[1], times[2]))
        return Comparison.of(taken)
    finally:
        for job in jobs:
            job.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("commit", help="to compare with")
    parser.add_argument("-k", dest="word", default="", help="only cases with this in their name, as all_reduce-tcp-")
    parser.add_argument("--turns", type=int, default=60, help="of each tree, in each case")
    parser.add_argument("--threshold", type=float, default=0.25, help="slower by this share is a regression")
    arguments = parse_or_work(parser, work)
    cases = {"-".join(map(str, case)): case for case in CASES}
    regressed = 0
    with built_commit(arguments.commit) as tree:
        print(f"{'case':<28} {'before (us)':>12} {'now (us)':>12} {'faster':>8} {'control':>8}")
        for name in [name for name in cases if arguments.word in name]:
            result = compare(tree, ROOT, cases[name], arguments.turns)
            slower = result.slower(arguments.threshold)
            regressed += slower
            times = f"{1e6 * result.before_s:>12.1f} {1e6 * result.now_s:>12.1f}"
            print(
                f"{name:<28} {times} {result.faster:>7.2f}x {result.control:>7.2f}x{'  SLOWER' if slower else ''}",
                flush=True,
            )
    print(f"{regressed} more than {arguments.threshold:.0%} slower than {arguments.commit}")
    return 1 if regressed else 0


if __name__ == "__main__":
    sys.exit(main())
