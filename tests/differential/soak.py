"""Random training programs against plain torch: `python tests/differential/soak.py --minutes 60 --seed 1`."""

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from generator import SIZES, plan_of
from harness import Job, run_jobs
from programs import TABLE

BATCH = 60  # seeds between two starts of rank processes


def run_seeds(seeds, *, seconds=600.0, on_outcome=None):
    """The outcomes of the programs of `seeds`, those of one number of ranks after another."""
    outcomes, until = [], time.monotonic() + seconds
    plans = [plan_of(seed) for seed in seeds]
    for size in sorted(set(SIZES)):
        jobs = [Job("generator", str(p.seed), p.variant) for p in plans if p.size == size]
        outcomes += run_jobs(jobs, size, seconds=until - time.monotonic(), on_outcome=on_outcome)
    return outcomes


def tell(outcome):
    if outcome.error:
        seed = outcome.job.program
        print(f"seed {seed} ({plan_of(int(seed)).size} ranks): {outcome.error}")
        print(f"replay: python tests/differential/soak.py --only {seed}\n", flush=True)


def summary(outcomes, began):
    optimizers = Counter(plan_of(int(o.job.program)).optimizer for o in outcomes)
    steps = sum(o.steps for o in outcomes)
    failed = [o.job.program for o in outcomes if o.error]
    covered = ", ".join(f"{name} {count}" for name, count in sorted(optimizers.items()))
    print(f"{len(outcomes)} programs, {steps} steps in {time.monotonic() - began:.0f} s; {covered}")
    print(f"{len(failed)} failed{': ' if failed else ''}{' '.join(failed)}", flush=True)


def soak(first, minutes):
    began, outcomes, seed = time.monotonic(), [], first
    while (left := began + 60 * minutes - time.monotonic()) > 0:
        outcomes += run_seeds(range(seed, seed + BATCH), seconds=left, on_outcome=tell)
        seed += BATCH
    summary(outcomes, began)
    return outcomes


def whole_table():
    """Every program in every variant, on every number of ranks."""
    outcomes = []
    for size in sorted(set(SIZES)):
        chosen = [(p, v) for p in TABLE.values() if size in p.ranks for v in p.variants]
        outcomes += run_jobs([Job("programs", p.name, v) for p, v in chosen], size, seconds=1800.0)
    for outcome in outcomes:
        if outcome.error:
            print(f"{outcome.job}: {outcome.error}\n", flush=True)
    print(f"{len(outcomes)} programs, {sum(bool(o.error) for o in outcomes)} failed")
    return outcomes


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--only", type=int, help="run this seed alone and show its plan")
    parser.add_argument("--table", action="store_true", help="the table of programs instead, all of it")
    arguments = parser.parse_args()
    if arguments.table:
        outcomes = whole_table()
    elif arguments.only is not None:
        print(plan_of(arguments.only))
        outcomes = run_seeds([arguments.only], on_outcome=tell)
    else:
        outcomes = soak(arguments.seed, arguments.minutes)
    good = outcomes and not any(outcome.error for outcome in outcomes)
    print("ok" if good else "failed")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
