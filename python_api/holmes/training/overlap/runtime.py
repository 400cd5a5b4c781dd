"""Runtime: the buckets of one layout at work: storage, reducer, shard optimizers, gatherer."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from holmes.training.overlap.agreement import compared_settings, settings_difference, settings_word
from holmes.training.overlap.background import BackgroundSteps
from holmes.training.overlap.buckets import Bucket, ParameterSize, lay_out
from holmes.training.overlap.gatherer import Gatherer
from holmes.training.overlap.parameters import Trained
from holmes.training.overlap.reducer import Reducer
from holmes.training.overlap.shards import Settings, ShardOptimizer, are_equal_settings, settings_of
from holmes.training.overlap.storage import BucketStorage, Fingerprint, gradient_memory
from holmes.training.overlap.timeline import Timeline
from holmes.training.overlap.transfers import Lane
from holmes.training.overlap.usage import Needs

_log = logging.getLogger(__name__)

_ALL_BITS = (1 << 31) - 1
#: Steps whose early shards had to be stepped again, after which shards step in `step` only.
_MOST_REDONE = 3


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


class _Words(NamedTuple):
    """What ranks tell each other when a backward pass is over; each is the greatest of all ranks'. 0: none."""

    gathered: int  # all-gathers that this rank has started early
    redoes: int  # 1: what was stepped early must be stepped again
    drops: int  # 1 + a rank that drops the step's gradients
    settings: int  # what this rank steps with
    no_settings: int  # _ALL_BITS less that: the two are _ALL_BITS together where all ranks step with the same


class Runtime:
    """One layout at work. Not thread-safe; the methods that send are collective.

    `is_early`: shards step during backward, as their gradients arrive. Nobody sees that before `step`: what was stepped
    early is hidden (see BucketStorage) and can be undone, as when hyperparameters change between backward and step.
    `gradient_weight`: as of DistributedOptimizer. `names`: the settings of param_groups that the optimizer knows, which
    have to be equal on all ranks.
    """

    def __init__(
        self,
        layout: Layout,
        trained: Sequence[Trained],
        lanes: tuple[Lane, Lane],
        reduce_dtype: torch.dtype | None,
        optimizer: tuple[type[torch.optim.Optimizer], Mapping[str, Any], Sequence[Mapping[str, Any]]],
        timeline: Timeline,
        *,
        is_early: bool,
        gradient_weight: float = 1.0,
        names: Collection[str] = (),
    ) -> None:
        reduce_lane, gather_lane = lanes
        self.layout = layout
        self.is_early = is_early
        self.storages = [
            BucketStorage(bucket, trained, reduce_lane.rank, gradients, is_early=is_early)
            for bucket, gradients in zip(
                layout.buckets, gradient_memory(layout.buckets, trained, reduce_dtype), strict=True
            )
        ]
        self.shards = [ShardOptimizer(s, reduce_lane.rank, trained, *optimizer) for s in self.storages]
        self.gatherer = Gatherer(self.storages, layout.forward_order, gather_lane)
        self.reducer = Reducer(
            self.storages,
            trained,
            layout.expected,
            reduce_lane,
            lambda bucket: self.gatherer.wait([bucket]),
            gradient_weight,
        )
        bucket_of = {slot.parameter: b for b, bucket in enumerate(layout.buckets) for slot in bucket.slots}
        place = {bucket: position for position, bucket in enumerate(layout.forward_order)}
        self._needs = {
            module: sorted({bucket_of[i] for i in own}, key=place.__getitem__)
            for module, own in layout.needs.of_module.items()
        }
        self._homeless = {bucket_of[index] for index in layout.needs.homeless}
        self._homes: dict[int, set[nn.Module]] = {}  # the modules of which each parameter is needed by
        for module, own in layout.needs.of_module.items():
            for index in own:
                self._homes.setdefault(index, set()).add(module)
        self._called: set[nn.Module] = set()  # modules whose forward began in this step
        self._usually_called: set[nn.Module] = set()
        self._parameters = [t.tensor for t in trained]
        self._timeline = timeline
        self._groups = optimizer[2]
        self._names = names
        self._settings: Settings = ()  # with which this step's shards step
        #: Of the parameters that early steps began with, by bucket.
        self._fingerprints: dict[int, Fingerprint] = {}
        self._must_redo = False
        self._redone = 0
        self._background: BackgroundSteps | None = None

    def before_forward(self, module: nn.Module) -> None:
        """Waits for the parameters that the module needs, in the order of their arrival."""
        needed = self._needs.get(module)
        if needed is not None:
            self._called.add(module)
            self.gatherer.wait(needed)

    # --- during backward ---

    def step_arrived(self) -> None:
        """Sees to it that the shards step whose reduce-scatters have started; never blocks."""
        transfers = self.reducer.transfers
        if not self.is_early or self._must_redo or not transfers:
            return
        if self._background is None:
            self._settings = settings_of(self._groups)
            self._background = BackgroundSteps(self._step_early, self.gatherer)
        for bucket in range(self._background.handed_over, len(transfers)):
            if not self.reducer.is_certain(bucket):
                break
            self._background.hand_over(transfers[bucket])

    def undo_early(self) -> None:
        """Local. Takes back what was stepped in this backward pass: `step` will do it again."""
        self._end_background()
        for bucket in self._fingerprints:
            self.shards[bucket].undo()
        self._fingerprints.clear()
        self._must_redo = self.is_early and not self.reducer.is_idle

    # --- after backward ---

    def finish_backward(self, steps: int, *, drops: bool = False) -> bool:
        """Collective. Ends the backward pass: sends what is left, and agrees with the others on what follows.

        Then either all gradients are reduced and what was stepped early stands (True), or a rank `drops` them: nothing
        of them is left (False). Raises RuntimeError on a rank that has gradients and drops none where another one does,
        on all ranks where they step with other settings than each other, or after other `steps` so far, and what failed
        in an early step.
        """
        has_gradients = self.reducer.has_gradients
        if self._background is not None:
            self._background.hold_gathers()
        self.gatherer.wait_all()
        self.reducer.start_rest(checks=not drops)
        is_changed = not drops and self._is_changed()
        me = self.reducer.lane.rank + 1
        settings = compared_settings(self._groups, self._names)
        word = settings_word(settings, steps)
        words = _Words(self.gatherer.started, int(is_changed), me if drops else 0, word, _ALL_BITS - word)
        agreed = _Words(*self.reducer.agree(words, self.reducer.lane if self.is_early else self.gatherer.lane))
        self._end_background()
        difference = ""
        if agreed.settings + agreed.no_settings != _ALL_BITS and not agreed.drops:
            difference = settings_difference(self.reducer.lane, settings, steps)
        if agreed.drops or agreed.redoes or difference:
            self.undo_early()
            self.gatherer.give_up_early(agreed.gathered)
        if agreed.drops:
            self.forget()
            if has_gradients and not drops:
                raise RuntimeError(
                    f"rank {agreed.drops - 1} of this group dropped the gradients of this step (zero_grad after a "
                    "backward pass, or an error in its step, which it names), so this rank's step has nothing to step "
                    "with: no parameter was changed anywhere. Drop them on all ranks or on none"
                )
            return False
        if difference:
            self.forget()
            raise RuntimeError(difference)
        if agreed.redoes:
            self._count_redone()
        self._settings = settings_of(self._groups)
        self.gatherer.reorder(agreed.gathered if not agreed.redoes else 0, self.layout.forward_order)
        self._must_redo = False
        return True

    def step_rest(self) -> None:
        """After `finish_backward`: steps all shards that have not stepped; their all-gathers start as forward needs
        them."""
        self._publish()
        self.gatherer.start_ready()
        for bucket in range(len(self.storages)):
            if bucket not in self._fingerprints:
                self.reducer.transfers[bucket].wait()
                gradients = self.shards[bucket].gradients(self.reducer.lane.divisor)
                self._step(bucket, gradients, self.reducer.unused(bucket))
                self.gatherer.start_ready()

    def step_all(self, gradients: Sequence[Sequence[torch.Tensor]]) -> None:
        """As `step_rest`, but with the gradients given, in the order that forward needs."""
        self._publish()
        for bucket in self.gatherer.order:
            self._step(bucket, gradients[bucket], self.reducer.unused(bucket))
            self.gatherer.start_ready()

    def end_step(self) -> None:
        """Collective. Forgets the gradients; waits for parameters that no module's forward would wait for."""
        self._find_homeless()
        self.reducer.reset(is_stepped=True)
        self.gatherer.end_step()
        self._fingerprints.clear()
        self.gatherer.wait(self._homeless)

    def forget(self) -> None:
        """Local. The step's gradients are dropped; nothing of it is left."""
        self.reducer.reset()
        self.gatherer.end_step()
        self._fingerprints.clear()
        self._must_redo = False

    def stop(self) -> None:
        """Local. A step that has begun will not be ended; never blocks."""
        if self._background is not None:
            self._background.stop()

    def close(self) -> None:
        """Local. Lets go of the model."""
        self.stop()
        for storage in self.storages:
            storage.release()

    # --- inside ---

    def _find_homeless(self) -> None:
        """A parameter with a gradient, of modules whose forward was not heard: torch.compile has them now."""
        if self._called != self._usually_called:
            self._usually_called = set(self._called)
            for bucket, storage in enumerate(self.storages):
                if any(self._homes.get(index, self._called).isdisjoint(self._called) for index in storage.written):
                    self._homeless.add(bucket)
        self._called.clear()

    def _end_background(self) -> None:
        background, self._background = self._background, None
        if background is not None:
            background.finish()

    def _is_changed(self) -> bool:
        """Whether what early steps began with has changed since: hyperparameters, parameters, or this rank undid
        them."""
        replaced = {bucket for bucket, storage in enumerate(self.storages) if storage.adopt()}
        if self._background is None:
            return self._must_redo
        self._background.finish()  # all that was handed over has stepped
        return (
            self._must_redo
            or not replaced.isdisjoint(self._fingerprints)
            or not are_equal_settings(self._settings, settings_of(self._groups))
            or any(self.storages[b].fingerprint() != before for b, before in self._fingerprints.items())
        )

    def _count_redone(self) -> None:
        """The same on all ranks."""
        self._redone += 1
        if self._redone == _MOST_REDONE:
            self.is_early = False
            _log.warning(
                "parameters or hyperparameters were changed between backward and step in %d steps, each of which had "
                "shards step twice: from now on they step in step() only, as with step_in_backward=False",
                self._redone,
            )

    def _publish(self) -> None:
        """The model is about to have new values; backward through a graph of the old ones is an error from now on."""
        torch.autograd.graph.increment_version([self._parameters[index] for index in self.reducer.with_gradient])
        self.gatherer.publish()

    def _step_early(self, bucket: int) -> None:
        """In the background, of a bucket that is certain: nothing is unused."""
        self._fingerprints[bucket] = self.storages[bucket].fingerprint()
        self._step(bucket, self.shards[bucket].gradients(self.reducer.lane.divisor, are_kept=True), (), can_undo=True)

    def _step(
        self, bucket: int, gradients: Sequence[torch.Tensor], unused: Collection[int], *, can_undo: bool = False
    ) -> None:
        with torch.no_grad(), self._timeline.span("optimizer", f"optimizer {bucket}"):
            self.shards[bucket].step(gradients, unused, self._settings, can_undo=can_undo)
        self.gatherer.stepped(bucket)
