"""Estimate: a step's time in closed form, and whether memory may suffice; so cheap that all choices can be tried.

step ~ micro-batches * turn + (stages - 1) * t / chunks + exposed gradients and parameters, with t the time per
micro-batch of the slowest stage at the best split of equal layers within memory. The bubble is Narayanan et al.'s
(arXiv 2104.04473), for ZB-H1 Qi et al.'s (arXiv 2401.10241).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holmes.planning.schedule import WARMED
from holmes.planning.search.layout import Layout

Floats = npt.NDArray[np.float64]
_HALVINGS = 40


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step; `over_bytes`: by how much the layers exceed all stages' memory, above 0 where none fits."""

    step_s: float
    over_bytes: float


def estimate(layout: Layout) -> Estimate:
    """Of one choice."""
    choice, layers = layout.choice, layout.layers
    embedding, layer, head = layers[0], layers[1], layers[-1]
    stages, count = choice.pipeline, layout.model.layers
    flying = _in_flight(layout) / choice.chunks
    fixed = np.full(stages, layer.working_bytes)
    fixed[0] += embedding.state_bytes + flying[0] * embedding.activation_bytes
    fixed[-1] += head.state_bytes + flying[-1] * head.activation_bytes
    each = layer.state_bytes + flying * layer.activation_bytes
    free = np.array([cluster.memory_bytes for cluster in layout.clusters]) - fixed
    room = np.maximum(free // each, 0)  # layers of each stage that memory allows
    short = np.maximum(each * choice.chunks - free, 0.0).sum()  # every stage holds one layer for each chunk
    missing = count - room.sum()
    if missing > 0 or short > 0:
        return Estimate(math.inf, float(max(missing, 0) * each.mean() + short))
    layer_s, head_s = layer.forward_s + layer.backward_s, head.forward_s + head.backward_s
    slot_s = _bottleneck_s(layer_s, head_s, count, np.array(layout.speeds), room, choice.chunks)
    hops_s = _hops_s(layout, layer.output_bytes)
    held = stages - np.arange(stages, dtype=np.float64)
    if choice.warms and choice.schedule in WARMED:
        held = _most_held(layout, free, flying)
    turns_s = _turns_s(layout, slot_s, hops_s, _wire_s(layout, hops_s), held)
    fill_s = slot_s / choice.chunks
    if choice.schedule == "zb-h1":  # idles forward + input gradients - weight gradients, of which these are a forward
        fill_s *= max(1 - 2 * layer.forward_s / layer_s, 0.0)
    fill_s = (stages - 1) * fill_s + 2 * float(hops_s.sum())
    # However few micro-batches there are, each goes to the last chunk and back, one behind the other.
    # ZB-H1's weight gradients are on nobody's way: the next micro-batch needs a forward's time only.
    weights = layer.forward_s / layer_s if choice.schedule == "zb-h1" else 0.0
    trip_s = stages * slot_s * (1 - weights) + 2 * choice.chunks * float(hops_s.sum())
    least_s = trip_s + (layout.micro_batches - 1) * slot_s * (weights or 1.0) / choice.chunks
    return Estimate(max(turns_s + fill_s, least_s) + _exposed_s(layout, slot_s), 0.0)


def _most_held(layout: Layout, free: Floats, flying: Floats) -> Floats:
    """Micro-batches that each stage has room for, with layers by its speed."""
    layer, speeds = layout.layers[1], np.array(layout.speeds)
    own = layout.model.layers * speeds / speeds.sum()
    held = np.clip((free / own - layer.state_bytes) // layer.activation_bytes, flying, layout.micro_batches)
    return np.full(len(held), held.min()) if layout.choice.schedule == "zb-h1" else held


def _turns_s(layout: Layout, slot_s: float, hops_s: Floats, wire_s: float, warmest: Floats) -> float:
    """Time of all micro-batches, without filling and draining.

    Each takes at least the slowest stage's time, and what its NICs send; and since a stage holds only so many, each one
    more than these waits for a round trip of one to the last stage and back over that number: `warmest`, of stages that
    run so many forwards first.
    """
    choice, stages, count = layout.choice, layout.choice.pipeline, layout.micro_batches
    if stages == 1:
        return count * slot_s
    least_s = max(slot_s, wire_s)
    waits_s = 0.0
    if choice.schedule in ("1f1b", "zb-h1"):
        trips_s = np.cumsum(hops_s[: stages - 1][::-1])[::-1]  # from stage i to the last one
        held = warmest[: stages - 1]
        turns_s = slot_s + 2 * trips_s / held
        waits_s = float((np.maximum(turns_s - least_s, 0) * np.maximum(count - held, 0)).max())
    elif choice.schedule == "interleaved":
        parts = float(_in_flight(layout)[0])
        held_whole = parts / choice.chunks
        # Were each part held for the whole trip, `chunks / parts`; were each for its own way to the end, two thirds of
        # that or less: simulated steps lie between.
        turn_s = (stages * slot_s + 2 * choice.chunks * float(hops_s.sum())) * (3 * choice.chunks + 1) / 4 / parts
        waits_s = max(turn_s - least_s, 0.0) * max(count - held_whole, 0.0)
    return count * least_s + waits_s


def _in_flight(layout: Layout) -> Floats:
    """Micro-batches that each stage holds at most, those of all chunks added up."""
    choice, stages = layout.choice, layout.choice.pipeline
    later = stages - 1 - np.arange(stages, dtype=np.float64)
    if choice.schedule == "1f1b":
        most = later + 1
    elif choice.schedule == "interleaved":  # as many chunk-forwards as the warm-up has, and one
        most = later * 2 + (choice.chunks - 1) * stages + 1
    else:
        most = np.full(stages, float(stages) if choice.schedule == "zb-h1" else np.inf)
    return np.minimum(most, layout.micro_batches * choice.chunks)


def _bottleneck_s(layer_s: float, head_s: float, count: int, speeds: Floats, room: Floats, chunks: int) -> float:
    """The least time per micro-batch in which the stages together run all layers, each within its room."""
    extra_s = np.zeros(len(speeds))
    extra_s[-1] = head_s
    # Stages are of few kinds, which plain numbers get through faster than arrays; room for more than all is no other.
    kinds = Counter(zip(speeds.tolist(), extra_s.tolist(), np.minimum(room, count).tolist(), strict=True))
    low, high = 0.0, (count * layer_s + head_s) / float(speeds.min())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        least, total = count, 0.0
        for (speed, extra, most), stages in kinds.items():
            layers = math.floor((middle * speed - extra) / layer_s * (1 + 1e-9))
            if layers < least:
                least = layers
            total += stages * (layers if layers < most else most)
        low, high = (low, middle) if least >= chunks and total >= count else (middle, high)
    return high


def _hops_s(layout: Layout, size_bytes: float) -> Floats:
    """Of activations from each stage to the next, and from the last to the first (0 without interleaving)."""
    choice, places, rates = layout.choice, layout.places, layout.rates
    hops_s = np.zeros(choice.pipeline)
    for stage in range(choice.pipeline - (choice.chunks == 1)):
        source, target = places[stage], places[(stage + 1) % choice.pipeline]
        if source.host != target.host:
            ranks = max(source.ranks_per_host, target.ranks_per_host)
            rate = rates.link(source.nic_to(target))
            hops_s[stage] = rate.message_s + size_bytes * ranks / rate.bytes_per_s
    return hops_s


def _wire_s(layout: Layout, hops_s: Floats) -> float:
    """What the busiest NIC sends of a micro-batch: activations to the stages after its host's, gradients to those
    before, once for each chunk."""
    choice, places = layout.choice, layout.places
    sent_s: dict[tuple[str, str], float] = {}
    for stage, hop_s in enumerate(hops_s):
        last = stage == choice.pipeline - 1  # from the last chunk nothing goes on
        both = places[stage], places[(stage + 1) % choice.pipeline]
        for source, target in (both, both[::-1]):
            nic = source.host, source.nic_to(target)
            sent_s[nic] = sent_s.get(nic, 0.0) + float(hop_s) * (choice.chunks - last)
    return max(sent_s.values())


def _exposed_s(layout: Layout, slot_s: float) -> float:
    """Reduce-scatter and all-gather of the slowest stage, less what a micro-batch of compute hides of each."""
    choice = layout.choice
    worst = 0.0
    for stage, cluster in enumerate(layout.clusters):
        width = choice.tensor * choice.data
        if width <= cluster.ranks_per_host or cluster.network is None:
            continue
        split = [layout.model.layers // choice.pipeline] * choice.pipeline
        wire_bytes = 2 * layout.model.stage_parameters(tuple(split), stage) * (choice.data - 1) / choice.data
        pass_s = wire_bytes / cluster.network.rate.bytes_per_s  # `tensor` rings, each of one part of the parameters
        worst = max(worst, max(pass_s - slot_s * 2 / 3, 0.0) + max(pass_s - slot_s / 3, 0.0))
    return worst
