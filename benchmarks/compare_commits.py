"""Compares this tree with another commit: `python benchmarks/compare_commits.py COMMIT`, or `make bench-compare`.

Builds COMMIT in a temporary git worktree, runs this tree's bench_collectives.py on both in turns (pytest-benchmark),
and prints how many times faster this tree is. Exits with 1 where one benchmark has become slower than the threshold
allows. This tree must be built.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks" / "bench_collectives.py"
#: Seconds by benchmark: the median of one run.
Medians = dict[str, float]


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


def run_benchmarks(tree: Path, pytest_options: list[str]) -> Medians:
    """Returns the medians of one run with the packages of `tree`. Exits where one failed."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        # The path wins over an editable installation; the folder keeps pytest from finding this tree's packages.
        # Within a worker of pytest-xdist pytest-benchmark would not measure; this is a run of its own.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
        environment["PYTHONPATH"] = os.pathsep.join([str(tree), str(tree / "python_api")])
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--benchmark-disable-gc"]
        command += [f"--benchmark-json={result}", *pytest_options, str(BENCHMARKS)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"benchmarks of {tree} failed:\n{done.stdout}{done.stderr}")
        benchmarks = json.loads(result.read_text())["benchmarks"]
    return {each["name"]: each["stats"]["median"] for each in benchmarks}


def compare(base: list[Medians], own: list[Medians]) -> dict[str, float]:
    """Returns by benchmark how many times faster `own` is: the median over rounds, each of two runs side by side."""
    names = [name for name in own[0] if name in base[0]]
    return {name: statistics.median(b[name] / o[name] for b, o in zip(base, own, strict=True)) for name in names}


def slower(ratios: dict[str, float], threshold: float) -> list[str]:
    """Returns the benchmarks that take more than (1 + threshold) times as long as before."""
    return [name for name, ratio in ratios.items() if 1 / ratio > 1 + threshold]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("commit", help="to compare with")
    parser.add_argument("-k", dest="expression", help="only benchmarks that match, as pytest reads it")
    parser.add_argument("--rounds", type=int, default=5, help="how often the two take turns")
    parser.add_argument("--threshold", type=float, default=0.25, help="slower by this share is a regression")
    arguments = parser.parse_args()
    options = ["-k", arguments.expression] if arguments.expression else []
    base: list[Medians] = []
    own: list[Medians] = []
    with built_commit(arguments.commit) as tree:
        for index in range(arguments.rounds):
            print(f"round {index + 1} of {arguments.rounds}", flush=True)
            base.append(run_benchmarks(tree, options))
            own.append(run_benchmarks(ROOT, options))
    ratios = compare(base, own)
    regressed = slower(ratios, arguments.threshold)
    print(f"{'benchmark':<48} {'before (us)':>12} {'now (us)':>12} {'faster':>8}")
    for name, ratio in ratios.items():
        before, now = (1e6 * statistics.median(run[name] for run in runs) for runs in (base, own))
        print(f"{name:<48} {before:>12.1f} {now:>12.1f} {ratio:>7.2f}x{'  SLOWER' if name in regressed else ''}")
    print(
        f"{len(ratios)} benchmarks, {len(regressed)} more than {arguments.threshold:.0%} slower than {arguments.commit}"
    )
    return 1 if regressed else 0


if __name__ == "__main__":
    sys.exit(main())
