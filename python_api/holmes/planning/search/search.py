"""The search itself: estimates all choices, partitions and simulates the most promising, ranks them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from holmes import files
from holmes.cluster.topology import Topology
from holmes.planning.model.gpt import Transformer
from holmes.planning.partition import best_partition
from holmes.planning.plan.plan import Plan, plan_for
from holmes.planning.search.candidate import Candidate, evaluate
from holmes.planning.search.estimate import Estimate, estimate
from holmes.planning.search.layout import Layout
from holmes.planning.search.machines import Assumptions, Machines, machines_of
from holmes.planning.search.reasons import DECISIONS, reasons_of
from holmes.planning.search.space import Choice, Wanted, choices, orders
from holmes.words import to_text
from holmes_comm.errors import UsageError

_MOST_SAMPLES = 10**9
_SAME_SIZES = 3  # simulated candidates of one tensor and pipeline size, so that others get a turn
_TRIES = 3  # choices with a value, of which the first that fits into memory counts
_HOPELESS = 1.5  # times the best: estimates do not err by more
_CLOSE = 1.3  # times the best estimate: values of a decision that are looked at on their own
_MOST = 10  # times as many choices as are wanted are simulated at most
_OPERATIONS = 4_096  # forwards and backwards of micro-batches: some tenths of a second
_NEIGHBOURS = 3  # choices with another value of one decision that are simulated at a time
_EXPANDED = 40  # choices that are tried with every order of the clusters


@dataclass(frozen=True)
class SearchResult:
    """What a search found. `candidates` are simulated, best first; `estimates` of all choices that fit, best first;
    `tried`: how many choices there were."""

    topology: Topology
    machines: Machines
    model: Transformer
    global_batch: int
    assumptions: Assumptions
    candidates: tuple[Candidate, ...]
    estimates: tuple[tuple[Choice, float], ...]
    tried: int

    @property
    def best(self) -> Candidate:
        """The fastest."""
        return self.candidates[0]

    def reasons(self) -> tuple[str, ...]:
        """Why, in lines: the best, what the runners-up lose, what each other decision would lose, what was assumed."""
        return reasons_of(self.machines, self.assumptions, self.candidates, self.estimates, self.tried)

    def plan(self, candidate: Candidate | None = None) -> Plan:
        """The plan of a candidate (None: of the best), with the reasons. Raises ValueError as `plan_for` does."""
        chosen = candidate or self.best
        choice = chosen.choice
        sizes = {name: value for name, value in files.plain(self.model).items() if value is not None}
        plan = plan_for(
            self.topology,
            model_layers=self.model.layers,
            pipeline=choice.pipeline,
            tensor=choice.tensor,
            layers_per_chunk=chosen.layers_per_chunk,
            schedule=choice.schedule,
            micro_batch=choice.micro_batch,
            global_batch=self.global_batch,
            model=sizes,
            cluster_order=[self.machines.clusters[i].name for i in choice.order],
            reasons=self.reasons(),
        )
        return replace(plan, recomputation=choice.recomputation, warmup=chosen.warmup)


def search(
    topology: Topology,
    model: Transformer,
    global_batch: int,
    *,
    assumptions: Assumptions | None = None,
    wanted: Wanted | None = None,
    simulated: int = 12,
    on_progress: Callable[[str], None] = lambda text: None,
) -> SearchResult:
    """The fastest ways to train this model with `global_batch` samples a step on these machines.

    Every stage lies in one cluster, every tensor group in one host; the optimizer is sharded over data-parallel ranks,
    its traffic overlapped. `wanted` fixes what is decided already; `simulated`: so many choices are partitioned exactly
    and simulated for their estimate, then those that differ from the best in one decision and those with another value
    of each, until nothing is faster, then the others while some tenths of a second for each that is asked for last:
    small jobs are searched through. Local and deterministic. Raises one ValueError, with all numbers and the
    nearest fix, where nothing fits.
    """
    if simulated < 1:
        raise UsageError(f"simulated={simulated} must be at least 1")
    if not 1 <= global_batch <= _MOST_SAMPLES:
        raise UsageError(f"global_batch={global_batch} must be 1 to {_MOST_SAMPLES} samples")
    assumptions, wanted = assumptions or Assumptions(), wanted or Wanted()
    machines = machines_of(topology, assumptions)
    every_order = orders(machines)
    found: list[tuple[float, Choice]] = []
    over: list[tuple[float, Choice]] = []
    tried = 0

    def look(choice: Choice) -> None:
        guess: Estimate = estimate(Layout.of(machines, model, choice, global_batch))
        if guess.over_bytes == 0:
            found.append((guess.step_s, choice))
        else:
            over.append((guess.over_bytes, choice))

    for choice in choices(topology, machines, model, global_batch, wanted, every_order[:2]):
        tried += 1
        look(choice)
    on_progress(f"{tried} choices estimated, {len(found)} fit into memory")
    promising = {replace(choice, order=every_order[0]) for _, choice in _sorted(found)[:_EXPANDED]}
    for choice in sorted(promising, key=Choice.text):
        for order in every_order[2:]:
            tried += 1
            look(replace(choice, order=order))
    ranked = _sorted(found)

    def simulate(choice: Choice) -> Candidate:
        candidate = evaluate(Layout.of(machines, model, choice, global_batch))
        on_progress(f"simulated {choice.text()}: {candidate.step_s:.4g} s")
        return candidate

    simulations = _Simulations(simulate, ranked, simulated, global_batch)
    if ranked:
        simulations.promising()
        simulations.descend()
        simulations.alternatives()
        simulations.descend()
        simulations.rest()
    nearest = sorted(over, key=lambda pair: pair[0])[:_TRIES]
    if not simulations.candidates:  # estimates count a little more memory than the exact partition takes
        ranked += [(one.step_s, choice) for _, choice in nearest if (one := simulations.get(choice))]
    candidates = simulations.candidates
    if not candidates:
        raise _memory_error(Layout.of(machines, model, (nearest or ranked)[0][1], global_batch), tried)
    return SearchResult(
        topology=topology,
        machines=machines,
        model=model,
        global_batch=global_batch,
        assumptions=assumptions,
        candidates=tuple(candidates),
        estimates=tuple((choice, step_s) for step_s, choice in ranked),
        tried=tried,
    )


def _sorted(found: Sequence[tuple[float, Choice]]) -> list[tuple[float, Choice]]:
    """Best first; of equals the simplest."""
    return sorted(found, key=lambda pair: (pair[0], pair[1].chunks, pair[1].pipeline, pair[1].tensor, pair[1].text()))


class _Simulations:
    """Choices that were simulated, each once, and how the next ones are picked from the estimates (best first)."""

    def __init__(
        self,
        simulate: Callable[[Choice], Candidate],
        ranked: Sequence[tuple[float, Choice]],
        wanted: int,
        global_batch: int,
    ) -> None:
        self._simulate = simulate
        self._global_batch = global_batch
        self._ranked = ranked
        self._wanted = wanted
        self._done: dict[Choice, Candidate | None] = {}
        self._operations = 0

    @property
    def candidates(self) -> list[Candidate]:
        """All, best first."""
        return sorted(filter(None, self._done.values()), key=lambda candidate: candidate.step_s)

    def get(self, choice: Choice) -> Candidate | None:
        """None where memory has room for parts of layers only, which the estimate counts with, and after very many."""
        if choice not in self._done:
            if len(self._done) >= _MOST * self._wanted and not self._is_affordable(choice):
                return None
            self._operations += self._cost(choice)
            try:
                self._done[choice] = self._simulate(choice)
            except ValueError:
                self._done[choice] = None
        return self._done[choice]

    def promising(self) -> None:
        """The best by estimate, not too many of one size, each in its best order."""
        sizes: dict[tuple[int, int], int] = {}
        seen: set[Choice] = set()
        for _, choice in self._ranked:
            if sum(sizes.values()) >= self._wanted:
                break
            size, anyhow = (choice.tensor, choice.pipeline), replace(choice, order=())
            if sizes.get(size, 0) < _SAME_SIZES and anyhow not in seen and self.get(choice):
                seen.add(anyhow)
                sizes[size] = sizes.get(size, 0) + 1

    def alternatives(self) -> None:
        """The best with each value of each decision, where that may be close to the best of all.

        What the estimates rank first, and from there whatever single change makes it faster: estimates err by more than
        neighbours differ.
        """
        close_s = _CLOSE * self._ranked[0][0]
        for name in DECISIONS:
            for value in dict.fromkeys(getattr(one, name) for s, one in self._ranked if s <= close_s):
                pool = [(s, one) for s, one in self._ranked if getattr(one, name) == value]
                any(self.get(one) for _, one in pool[:_TRIES])
                own = [one for one in self.candidates if getattr(one.choice, name) == value]
                if own:
                    self._descend(own[0], pool)

    def rest(self) -> None:
        """The others, best first, as long as they cost little."""
        for _, choice in self._ranked:
            if self._is_affordable(choice):
                self.get(choice)

    def _is_affordable(self, choice: Choice) -> bool:
        return self._operations + self._cost(choice) <= _OPERATIONS * self._wanted

    def _cost(self, choice: Choice) -> int:
        return 2 * choice.micro_batches(self._global_batch) * choice.pipeline * choice.chunks

    def descend(self) -> None:
        """From the best, by single changes, until none is faster."""
        if self.candidates:
            self._descend(self.candidates[0], self._ranked)

    def _descend(self, best: Candidate, pool: Sequence[tuple[float, Choice]]) -> None:
        while True:
            near: dict[str, list[Choice]] = {}
            for estimate_s, one in pool:
                if estimate_s <= _HOPELESS * best.step_s and (change := _single_change(one, best.choice)):
                    near.setdefault(change, []).append(one)
            tried = [one for alike in near.values() for one in alike[:_NEIGHBOURS]]
            found = [candidate for one in tried if (candidate := self.get(one))]
            better = min(found, key=lambda one: one.step_s, default=best)
            if better.step_s >= best.step_s:
                return
            best = better


def _single_change(one: Choice, other: Choice) -> str | None:
    """The one decision in which they differ, if it is one; chunks are the schedule's, the data size follows."""
    names = ("tensor", "pipeline", "micro_batch", "recomputation", "order")
    differ = [name for name in names if getattr(one, name) != getattr(other, name)]
    if (one.schedule, one.chunks) != (other.schedule, other.chunks):
        differ.append("schedule")
    return differ[0] if len(differ) == 1 else None


def _memory_error(layout: Layout, tried: int) -> ValueError:
    """The numbers of the choice that comes nearest."""
    try:
        best_partition(layout.problem())
    except ValueError as error:
        return ValueError(
            f"none of {tried} choices fits into memory; on {layout.machines.ranks} GPUs the nearest is "
            f"{layout.choice.text()}: {error}, with {layout.choice.tensor * layout.choice.data} GPUs for each stage "
            f"({_places(layout)})"
        )
    raise AssertionError(f"{layout.choice} fits after all")


def _places(layout: Layout) -> str:
    """Where the stages are: "stages 0-3 in cluster 0, 4 in cluster 1"."""
    runs = []
    first = 0
    for cluster, stages in groupby(layout.clusters):
        end = first + len(list(stages))
        runs.append(f"{to_text(range(first, end))} in {cluster.name}")
        first = end
    return f"stage{'' if first == 1 else 's'} {', '.join(runs)}"
