"""Background: steps the shards of one backward pass as their gradients arrive, beside the thread that computes."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

from holmes.training.overlap.gatherer import Gatherer
from holmes.training.overlap.transfers import Transfer

_EXIT_S = 2.0  # that a process which ends waits for threads whose collective has failed

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _join_threads() -> None:
    """Before the interpreter ends: a thread that comes back from a collective after that would end the process by
    SIGABRT (torch gives the interpreter's lock back in a destructor)."""
    end_s = time.monotonic() + _EXIT_S
    for thread in list(_threads):
        thread.join(max(0.0, end_s - time.monotonic()))


class BackgroundSteps:
    """One backward pass's two threads; they end with `finish`, `stop` or the first error.

    One waits for the reduce-scatters in their order and steps their shards. While none is under way the other starts
    the all-gathers whose turn it is, one at a time: a reduce-scatter is needed sooner and would share the link with
    them. The computing thread alone calls the methods, and none of the gatherer's that start something until `finish`.
    """

    def __init__(self, step: Callable[[int], None], gatherer: Gatherer) -> None:
        self._step = step
        self._gatherer = gatherer
        self._changed = threading.Condition()
        self._transfers: list[Transfer] = []  # the reduce-scatters, in order
        self._stepped = 0
        self._may_gather = True
        self._is_over = False  # nothing more is handed over
        self._error: BaseException | None = None
        for name, work in (("holmes-steps", self._step_all), ("holmes-gathers", self._gather_early)):
            thread = threading.Thread(target=self._run, args=[work], name=name, daemon=True)
            _threads.add(thread)
            thread.start()

    @property
    def handed_over(self) -> int:
        """How many reduce-scatters it was given."""
        return len(self._transfers)

    def hand_over(self, transfer: Transfer) -> None:
        """The next bucket's reduce-scatter. Raises what an earlier one or its step raised."""
        with self._changed:
            if self._error is not None:
                raise self._error
            self._transfers.append(transfer)
            self._changed.notify_all()

    def hold_gathers(self) -> None:
        """Starts no further all-gather from now on."""
        with self._changed:
            self._may_gather = False
            self._changed.notify_all()

    def finish(self) -> None:
        """Blocks until all that was handed over has stepped. Raises what a thread raised."""
        self.stop()
        with self._changed:
            while self._stepped < len(self._transfers) and self._error is None:
                awaited, start_s = self._stepped, time.monotonic()
                self._changed.wait()
                self._transfers[awaited].waits.append((start_s, time.monotonic()))
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Nothing more will be handed over; never blocks."""
        with self._changed:
            self._may_gather = False
            self._is_over = True
            self._changed.notify_all()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
            self.stop()

    def _step_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stepped < len(self._transfers) or self._is_over)
                if self._stepped == len(self._transfers):
                    return
            self._transfers[self._stepped].finish()
            self._step(self._stepped)
            with self._changed:
                self._stepped += 1
                self._changed.notify_all()

    def _gather_early(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_link_free() or not self._may_gather)
                if not self._may_gather:
                    return
                transfer = self._gatherer.start_next()
            transfer.finish()

    def _is_link_free(self) -> bool:
        return self._stepped == len(self._transfers) and self._gatherer.has_ready
