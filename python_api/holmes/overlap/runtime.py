"""Runtime: the buckets of one layout at work: storage, reducer, shard optimizers, gatherer, gate before forward."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from holmes.overlap.background import BackgroundSteps
from holmes.overlap.buckets import Bucket, ParameterSize, lay_out
from holmes.overlap.gatherer import ForwardGate, Gatherer
from holmes.overlap.parameters import Trained
from holmes.overlap.reducer import Reducer
from holmes.overlap.shards import ShardOptimizer
from holmes.overlap.storage import BucketStorage
from holmes.overlap.timeline import Timeline
from holmes.overlap.transfers import Lane
from holmes.overlap.usage import Needs


@dataclass(frozen=True)
class Layout:
    """Buckets in the order in which backward completes them.

    `forward_order`: the buckets as forward needs them. `expected`: gradients of each parameter between two steps.
    """

    buckets: tuple[Bucket, ...]
    forward_order: tuple[int, ...]
    expected: tuple[int, ...]
    needs: Needs


def make_layout(
    trained: Sequence[Trained],
    gradient_places: Sequence[int],
    first_uses: Sequence[int],
    expected: Sequence[int],
    needs: Needs,
    bucket_bytes: int,
    shards: int,
) -> Layout:
    """Local and deterministic. `gradient_places`: each parameter's place in backward, 0 where it had no gradient.

    Parameters without gradient have the last buckets, so that no other one waits for them.
    """
    sizes = [
        ParameterSize(t.tensor.numel(), t.tensor.element_size(), (t.tensor.dtype, t.tensor.device)) for t in trained
    ]
    used = sorted((i for i, place in enumerate(gradient_places) if place), key=gradient_places.__getitem__)
    rest = [i for i, place in enumerate(gradient_places) if not place]
    buckets = [bucket for order in (used, rest) for bucket in lay_out(order, sizes, bucket_bytes, shards)]
    first = [min(first_uses[slot.parameter] for slot in bucket.slots) for bucket in buckets]
    forward_order = sorted(range(len(buckets)), key=lambda b: (first[b], -b))
    return Layout(tuple(buckets), tuple(forward_order), tuple(expected), needs)


class Runtime:
    """One layout at work. Not thread-safe; the methods that send are collective."""

    def __init__(
        self,
        layout: Layout,
        trained: Sequence[Trained],
        lanes: tuple[Lane, Lane],
        reduce_dtype: torch.dtype | None,
        optimizer: tuple[type[torch.optim.Optimizer], Mapping[str, Any], Sequence[Mapping[str, Any]]],
        timeline: Timeline,
    ) -> None:
        tensors: list[nn.Parameter] = [t.tensor for t in trained]
        reduce_lane, gather_lane = lanes
        self.layout = layout
        self.storages = [BucketStorage(b, tensors, reduce_lane.rank, reduce_dtype) for b in layout.buckets]
        self.shards = [ShardOptimizer(s, reduce_lane.rank, trained, *optimizer) for s in self.storages]
        self.reducer = Reducer(self.storages, trained, layout.expected, reduce_lane)
        self.gatherer = Gatherer(self.storages, layout.forward_order, gather_lane)
        bucket_of = {slot.parameter: b for b, bucket in enumerate(layout.buckets) for slot in bucket.slots}
        self.gate = ForwardGate(
            self.gatherer, {m: [bucket_of[i] for i in own] for m, own in layout.needs.of_module.items()}
        )
        self._homeless = sorted({bucket_of[index] for index in layout.needs.homeless})
        self._timeline = timeline
        self._stepped = 0  # buckets that stepped in this step, the background's not counted before its end
        # One lane would have to carry both kinds in one order; a GPU's streams wait by themselves.
        self._has_background = reduce_lane is not gather_lane and tensors[0].device.type == "cpu"
        self._background: BackgroundSteps | None = None

    @property
    def has_stepped(self) -> bool:
        """Whether shards of the current step have already been updated, or may be at any time."""
        return self._stepped > 0 or self._background is not None

    def step_arrived(self) -> None:
        """Sees to it that the shards step whose reduce-scatters have started; never blocks."""
        transfers = self.reducer.transfers
        if self._has_background and transfers:
            background = self._background = self._background or BackgroundSteps(self._step_reduced, self.gatherer)
            for transfer in transfers[background.handed_over :]:
                background.hand_over(transfer)
            return
        while self._stepped < len(transfers) and transfers[self._stepped].is_done():
            self._step_reduced(self._stepped)
            self._stepped += 1
            self.gatherer.start_ready()

    def finish_backward(self) -> None:
        """Collective. Backward is over: starts all reduce-scatters that have not started."""
        if self._background is not None:
            self._background.hold_gathers()
        self.reducer.finish(self.gatherer.started)

    def step_rest(self) -> None:
        """After `finish_backward`: steps all other shards as their reduce-scatters end.

        All-gathers that no rank has started are no longer early: they start as forward needs them.
        """
        if self._background is not None:
            background, self._background = self._background, None
            self._stepped = background.handed_over
            background.finish()
        while self._stepped < len(self.storages):
            self.reducer.transfers[self._stepped].wait()
            self._step_reduced(self._stepped, self.reducer.unused(self._stepped))
            self._stepped += 1
            if not self._has_background:
                self.gatherer.start_ready()
        if self._has_background:  # the ranks' word on what has started comes after the last reduce-scatter
            self.gatherer.reorder(self.reducer.most_gathered(), self.layout.forward_order)
            self.gatherer.start_ready()

    def stop(self) -> None:
        """Local. A step that has begun will not be ended; never blocks."""
        if self._background is not None:
            self._background.stop()

    def close(self) -> None:
        """Local. Lets go of the model."""
        self.stop()
        self.gate.remove()

    def step_all(self, gradients: Sequence[Sequence[torch.Tensor]]) -> None:
        """After all reduce-scatters: steps every shard with the gradients given, in the order that forward needs."""
        for bucket in self.gatherer.order:
            self._step(bucket, gradients[bucket], self.reducer.unused(bucket))
            self.gatherer.start_ready()

    def end_step(self) -> None:
        """Collective. Forgets the gradients; waits for parameters that no module's forward would wait for."""
        self.reducer.reset()
        self.gatherer.end_step()
        self._stepped = 0
        self.gatherer.wait(self._homeless)

    def _step_reduced(self, bucket: int, unused: Collection[int] = ()) -> None:
        """Before backward ends nothing is unused: what was sent has the gradients of all its parameters."""
        self._step(bucket, self.shards[bucket].gradients(self.reducer.lane.divisor), unused)

    def _step(self, bucket: int, gradients: Sequence[torch.Tensor], unused: Collection[int]) -> None:
        with torch.no_grad(), self._timeline.span("optimizer", f"optimizer {bucket}"):
            self.shards[bucket].step(gradients, unused)
        self.gatherer.stepped(bucket)
