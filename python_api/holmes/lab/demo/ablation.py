"""The ablation: the demo's training with each of Holmes' parts taken away, the runs taking turns.

A row is what a run lacks, as a change of the plan that Holmes makes, or of a setting.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from holmes.lab.demo.model import Batches
from holmes.lab.demo.runs import WARM_UP_STEPS, Launch, Run, launch_here
from holmes.lab.demo.settings import Settings
from holmes.planning.model.gpt import Transformer
from holmes.planning.partition import PartitionProblem, Stage, evaluate, replan, split_evenly, transformer_layers
from holmes.planning.plan import Plan
from holmes.tools.bench.quiet import Others, Quiet
from holmes_comm.errors import UsageError

TWO_CLUSTERS, ONE_CLUSTER = "two-clusters", "one-cluster"  # the same nodes and rates in both
# Four nodes share few cores here: at half a core's speed each has what it would have alone on two.
EVEN = dict.fromkeys(("a0", "a1", "a2", "a3", "b0", "b1"), 2.0)
UNEVEN = {**EVEN, "b0": 3.5, "b1": 3.5}
#: More micro-batches than the demo's default: how layers are split matters where stages are busy at once.
SETTINGS = Settings(global_batch=16, micro_batches=4, steps=12)
MOST_OTHERS = 0.2  # cores that other processes may keep busy beside a run; with more it is repeated
ATTEMPTS = 3
RANKS = 4
#: Makes a testbed of that name, up for the duration of the context.
Testbeds = Callable[[str], AbstractContextManager[Launch]]


def keep(plan: Plan) -> Plan:
    """The plan as it is."""
    return plan


def without_nic_choice(plan: Plan) -> Plan:
    """Every group on what joins all hosts, as where one NIC is configured for the whole job."""
    everywhere = tuple(network for network in plan.networks if len(network.nics) == len(plan.hosts))
    if not everywhere:
        raise UsageError(f"none of the networks {[network.name for network in plan.networks]} joins all hosts")
    return dataclasses.replace(plan, networks=everywhere)


def without_adapting(plan: Plan) -> Plan:
    """Equally many layers on each stage."""
    layers = split_evenly(sum(plan.layers_per_stage), plan.pipeline)
    return dataclasses.replace(plan, layers_per_chunk=tuple((count,) for count in layers))


def megatron_like(plan: Plan) -> Plan:
    """Ranks in the order in which they were started, one network for all, equally many layers."""
    return dataclasses.replace(without_adapting(without_nic_choice(plan)), order=tuple(range(plan.world_size)))


@dataclass(frozen=True)
class Row:
    """One line of the table: the testbed, its nodes' slowdown, what is done to the plan, whether traffic overlaps.

    `reference`: name of the row that its step time is compared with.
    """

    name: str
    title: str
    reference: str
    change: Callable[[Plan], Plan] = keep
    overlap: bool = True
    is_even: bool = True
    spec: str = TWO_CLUSTERS

    @property
    def slowdown(self) -> dict[str, float]:
        """Node name -> how many times as long its compute takes."""
        return EVEN if self.is_even else UNEVEN


ROWS = (
    Row("holmes", "Holmes", "holmes"),
    Row("no_nic_choice", "without NIC choice: all groups on Ethernet", "holmes", without_nic_choice),
    Row("no_overlap", "without overlap", "holmes", overlap=False),
    Row("megatron", "Megatron-LM-like: none of these, ranks as started", "holmes", megatron_like, overlap=False),
    Row("one_cluster", "Holmes, the same four nodes in one fast cluster", "holmes", spec=ONE_CLUSTER),
    Row("holmes_slow", "Holmes, second cluster 1.75x slower", "holmes_slow", is_even=False),
    Row("no_adapting", "the same without self-adapting partition", "holmes_slow", without_adapting, is_even=False),
)


def adapted(plan: Plan, settings: Settings, vocabulary: int, profile: Run) -> Plan:
    """The plan with layers for the speeds that a run of it without overlap showed; as it is where that gains little.

    Raises ValueError where the run does not tell.
    """
    model = Transformer(settings.layers, settings.width, settings.heads, settings.sequence, vocabulary, tied=False)
    samples = settings.share(plan.data * settings.micro_batches, "data-parallel ranks * micro-batches")
    problem = PartitionProblem(
        transformer_layers(model, micro_batch=samples, flops_per_s=1e9, recomputation="none"),
        (Stage(),) * plan.pipeline,
        micro_batches=settings.micro_batches,
        schedule="gpipe",
    )
    times = busy_s_per_stage(plan, profile.steps, settings.micro_batches)
    proposal = replan(problem, evaluate(problem, plan.layers_per_stage), times)
    if proposal is None:
        return plan
    layers = tuple((count,) for count in proposal.partition.layers_per_stage)
    return dataclasses.replace(plan, layers_per_chunk=layers, reasons=(*plan.reasons, proposal.describe()))


def busy_s_per_stage(plan: Plan, steps: list[dict[str, Any]], micro_batches: int) -> list[float]:
    """Seconds of forward and backward per micro-batch: of each stage's slowest rank, the median over steps."""
    found = []
    for stage in range(plan.pipeline):
        slowest: dict[int, float] = {}
        for report in steps:
            if plan.stage_of(report["rank"]) == stage and report["step"] >= WARM_UP_STEPS:
                slowest[report["step"]] = max(report["busy_s"], slowest.get(report["step"], 0.0))
        if not slowest:
            raise UsageError(f"the run reported no step after {WARM_UP_STEPS} of warm-up; give it more steps")
        found.append(statistics.median(slowest.values()) / micro_batches)
    return found


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
