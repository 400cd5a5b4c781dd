"""The search itself: estimates all choices, partitions and simulates the most promising, ranks them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from holmes import files
from holmes.cluster.topology import Topology
from holmes.planning.model.gpt import Transformer
from holmes.planning.partition import best_partition
from holmes.planning.plan.plan import Plan, plan_for
from holmes.planning.search.candidate import Candidate, evaluate
from holmes.planning.search.estimate import Estimate, estimate
from holmes.planning.search.layout import Layout
from holmes.planning.search.machines import Assumptions, Machines, machines_of
from holmes.planning.search.reasons import reasons_of
from holmes.planning.search.space import Choice, Wanted, choices, orders
from holmes_comm.errors import UsageError

_SAME_SIZES = 3  # simulated candidates of one tensor and pipeline size, so that others get a turn
_OTHER_ORDERS = 3  # of the clusters, in which the winner is simulated too
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
        return replace(plan, recomputation=choice.recomputation)


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
    and simulated, the rest only estimated. Local and deterministic. Raises one ValueError, with all numbers and the
    nearest fix, where nothing fits.
    """
    if simulated < 1:
        raise UsageError(f"simulated={simulated} must be at least 1")
    assumptions, wanted = assumptions or Assumptions(), wanted or Wanted()
    machines = machines_of(topology, assumptions)
    every_order = orders(machines)
    found: list[tuple[float, Choice]] = []
    nearest: tuple[float, Choice] | None = None
    tried = 0

    def look(choice: Choice) -> None:
        nonlocal nearest
        guess: Estimate = estimate(Layout.of(machines, model, choice, global_batch))
        if guess.over_bytes == 0:
            found.append((guess.step_s, choice))
        elif nearest is None or guess.over_bytes < nearest[0]:
            nearest = (guess.over_bytes, choice)

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
    candidates = _evaluate(machines, model, global_batch, ranked, simulated, on_progress)
    if not candidates:
        raise _memory_error(Layout.of(machines, model, (nearest or ranked[0])[1], global_batch), tried)
    return SearchResult(
        topology=topology,
        machines=machines,
        model=model,
        global_batch=global_batch,
        assumptions=assumptions,
        candidates=tuple(sorted(candidates, key=lambda candidate: candidate.step_s)),
        estimates=tuple((choice, step_s) for step_s, choice in ranked),
        tried=tried,
    )


def _sorted(found: Sequence[tuple[float, Choice]]) -> list[tuple[float, Choice]]:
    """Best first; of equals the simplest."""
    return sorted(found, key=lambda pair: (pair[0], pair[1].chunks, pair[1].pipeline, pair[1].tensor, pair[1].text()))


def _evaluate(
    machines: Machines,
    model: Transformer,
    global_batch: int,
    ranked: Sequence[tuple[float, Choice]],
    wanted: int,
    on_progress: Callable[[str], None],
) -> list[Candidate]:
    """The best by estimate, not too many of one size, each in its best order; then the winner in other orders."""
    candidates: list[Candidate] = []
    sizes: dict[tuple[int, int], int] = {}
    done: set[Choice] = set()

    def simulate(choice: Choice) -> bool:
        try:
            candidates.append(evaluate(Layout.of(machines, model, choice, global_batch)))
        except ValueError:  # memory: the estimate had room for parts of layers
            return False
        on_progress(f"{len(candidates)} simulated: {choice.text()}: {candidates[-1].step_s:.4g} s")
        return True

    for _, choice in ranked:
        if len(candidates) >= wanted:
            break
        size, anyhow = (choice.tensor, choice.pipeline), replace(choice, order=())
        if sizes.get(size, 0) < _SAME_SIZES and anyhow not in done and simulate(choice):
            done.add(anyhow)
            sizes[size] = sizes.get(size, 0) + 1
    if candidates:
        best = min(candidates, key=lambda candidate: candidate.step_s).choice
        others = [choice for _, choice in ranked if replace(choice, order=best.order) == best != choice]
        for choice in others[:_OTHER_ORDERS]:
            simulate(choice)
    return candidates


def _memory_error(layout: Layout, tried: int) -> ValueError:
    """The numbers of the choice that comes nearest."""
    try:
        best_partition(layout.problem())
    except ValueError as error:
        return ValueError(
            f"none of {tried} choices fits into memory; on {layout.machines.ranks} GPUs the nearest is "
            f"{layout.choice.text()}: {error}, with {layout.choice.tensor * layout.choice.data} GPUs for each stage"
        )
    raise AssertionError(f"{layout.choice} fits after all")
