"""The ablation: the demo's training with each of Holmes' parts taken away, the runs taking turns."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from holmes.lab.demo.ablation_rows import ROWS, Row, adapted
from holmes.lab.demo.data import Batches
from holmes.lab.demo.runs import Launch, Run, launch_here
from holmes.lab.demo.settings import Settings
from holmes.planning.plan import Plan
from holmes.tools.bench.quiet import Others, Quiet

#: More micro-batches than the demo's default: how layers are split matters where stages are busy at once.
SETTINGS = Settings(global_batch=16, micro_batches=4, steps=12)
MOST_OTHERS = 0.2  # cores that other processes may keep busy beside a run; with more it is repeated
ATTEMPTS = 3
RANKS = 4

#: Makes a testbed of that name, up for the duration of the context.
Testbeds = Callable[[str], AbstractContextManager[Launch]]


@dataclass
class Measured:
    """A row's runs, one for each round, the plan they followed, and the cores of others beside each."""

    row: Row
    plan: Plan
    runs: list[Run] = field(default_factory=list)
    others_cores: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Ablation:
    """The settings that all rows share, the single process, whose losses they must reach, and the rows."""

    settings: Settings
    single: Run
    rows: tuple[Measured, ...]


def run_ablation(
    settings: Settings, rounds: int, testbeds: Testbeds, console: Console, rows: Sequence[Row] = ROWS
) -> Ablation:
    """Trains each row once in every round; a run that other processes disturbed is repeated.

    Raises RunFailed where a run ends with an error, ValueError for settings that do not fit.
    """
    single = Run("single", "one process", "holmes.lab.demo.train_single", "none", ranks=1)
    single.execute(settings, launch_here, lambda done: None)
    cases = dict.fromkeys((row.spec, row.is_even) for row in rows)
    plans = {case: _plan(settings, testbeds, console, *case) for case in cases}
    measured = tuple(Measured(row, row.change(plans[row.spec, row.is_even])) for row in rows)
    for number in range(rounds):
        for each in measured:
            quiet = Quiet(MOST_OTHERS, ATTEMPTS)
            run = quiet.measure(each.row.title, lambda each=each: _train(settings, testbeds, each.row, each.plan))  # type: ignore[misc]
            each.runs.append(run)
            each.others_cores.append(quiet.worst)
            took = f"{1e3 * run.step_s():.0f} ms a step, {quiet.worst:.2f} foreign cores"
            console.print(f"round {number + 1} of {rounds}, {each.row.title}: {took}", highlight=False)
    return Ablation(settings, single, measured)


def _plan(settings: Settings, testbeds: Testbeds, console: Console, spec: str, is_even: bool) -> Plan:
    """What Holmes finds and plans on this testbed, with layers by the speeds of a first run."""
    row = Row("profile", "a first run, for the stages' speeds", "profile", overlap=False, is_even=is_even, spec=spec)
    profile = Quiet(MOST_OTHERS, ATTEMPTS).measure(row.title, lambda: _train(settings, testbeds, row, None))
    plan = Plan.from_dict(profile.plan() or {})
    plan = adapted(plan, settings, Batches(settings).vocabulary, profile)
    where = spec if is_even else f"{spec}, second cluster slower"
    console.print(f"{where}: layers per stage {list(plan.layers_per_stage)}", *plan.reasons[-1:], highlight=False)
    return plan


def _train(settings: Settings, testbeds: Testbeds, row: Row, plan: Plan | None) -> tuple[Run, float]:
    """One run of a row, and the cores that other processes kept busy beside it. Without a plan it makes one itself."""
    run = Run(row.name, row.title, "holmes.lab.demo.train_holmes", "holmes", RANKS)
    with tempfile.TemporaryDirectory() as folder:
        path = ""
        if plan is not None:
            path = str(Path(folder) / "plan.yaml")
            plan.save(path)
        its = dataclasses.replace(settings, plan=path, overlap=row.overlap, slowdown=row.slowdown)
        with Others() as others, testbeds(row.spec) as launch:
            run.execute(its, launch, lambda done: None)
    return run, others.cores
