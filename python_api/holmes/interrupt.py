"""Ctrl-C and SIGTERM end a command alike: what was measured is written first."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


def end_while_importing() -> None:
    """From here to `raise_as_ever`, Ctrl-C ends the process without a word: there is nothing yet to undo or to write.

    KeyboardInterrupt, in the middle of an import, would be a traceback, or the module's own ImportError.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_as_ever() -> None:
    """Ctrl-C is a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: Any) -> None:
    os._exit(128 + signal.SIGINT)


class Interrupt:
    """Of the first SIGINT or SIGTERM, which raises KeyboardInterrupt in the main thread; later ones are not heard.

    A launcher that got Ctrl-C, as all processes of the terminal did, sends SIGTERM too: that must not end the writing.
    """

    number = 0

    @property
    def has_come(self) -> bool:
        """Whether one came: what fails from then on fails of it."""
        return self.number != 0

    @property
    def exit_code(self) -> int:
        """As a shell tells it: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + (self.number or signal.SIGINT)

    def __call__(self, number: int, *_: Any) -> None:
        """The handler."""
        if self.has_come:
            return
        self.number = number
        raise KeyboardInterrupt


@contextmanager
def ending_early() -> Iterator[Interrupt]:
    """For the part of a command that has results: both signals go to the Interrupt that it gives, and end it.

    Who catches the KeyboardInterrupt goes on, and exits with `exit_code`; else this does. What was ignored (nohup)
    stays so. Not around long waits in C++, where handlers do not run: SIGTERM as it is ends those at once.
    """
    interrupt = Interrupt()
    with _handled_by(interrupt):
        try:
            yield interrupt
        except BaseException as error:
            is_of_it = interrupt.has_come or isinstance(error, KeyboardInterrupt)
            if is_of_it and not isinstance(error, SystemExit):
                sys.exit(interrupt.exit_code)
            raise


@contextmanager
def _handled_by(interrupt: Interrupt) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # where Python has no handlers
        yield
        return
    before = {number: signal.getsignal(number) for number in _NUMBERS}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
