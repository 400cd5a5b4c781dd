"""Unsent: gradients that are this rank's own until `step`. What is done to them there is done to a part of the mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holmes.training.overlap.parameters import Trained
from holmes.training.overlap.sent import SentGradient


class UnsentGradients:
    """Tells which gradients were changed outside of backward passes, before they were sent. Not thread-safe.

    Clipping by a rank's own norm, say: the mean of what is left is nobody's gradient. Whether a change would have been
    right (a factor, the same on all ranks) cannot be seen. Hooks that run in a backward pass may change what they like.
    """

    def __init__(self, trained: Sequence[Trained]) -> None:
        self._trained = trained
        self._as_left: dict[int, tuple[int, int]] = {}  # by parameter: which tensor its .grad was, in which version
        self._changed: set[int] = set()
        self._is_looked_at = True

    def note(self, indices: Iterable[int]) -> None:
        """A backward pass has ended: what it left in .grad of the parameters `indices`."""
        for index in indices:
            gradient = self._trained[index].tensor.grad
            if gradient is not None and not isinstance(gradient, SentGradient):
                self._as_left[index] = (id(gradient), gradient._version)
        self._is_looked_at = not self._as_left

    def look_once(self) -> None:
        """Something else begins. Keeps in mind what was changed; only the first call after `note` looks."""
        if not self._is_looked_at:
            self._is_looked_at = True
            self.changed()

    def begin_pass(self) -> None:
        """Another backward pass has begun, which may add to every gradient."""
        self._as_left.clear()
        self._is_looked_at = True

    def changed(self) -> set[int]:
        """Parameters whose gradient was changed or replaced since a backward pass left it. (Dropping it is allowed.)"""
        for index, as_left in self._as_left.items():
            gradient = self._trained[index].tensor.grad
            if gradient is not None and (id(gradient), gradient._version) != as_left:
                self._changed.add(index)
        return self._changed

    def forget(self) -> None:
        """The step has ended, or its gradients were dropped."""
        self.begin_pass()
        self._changed.clear()
