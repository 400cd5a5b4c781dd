"""Words of what people read: counts, and many numbers (ranks, hosts) as short text, in which "0-7,16-30:2,5" is 0 to 7,
every second one from 16 to 30, then 5."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from holmes_comm.errors import UsageError

_RUN = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")
_MOST = 10_000_000  # of one text: more is a slip of the pen, and would fill the memory


def count(number: int, thing: str) -> str:
    """As in "1 host", "3 hosts", "2 processes"."""
    if number == 1:
        return f"1 {thing}"
    return f"{number} {thing}{'es' if thing.endswith('s') else 's'}"


def to_text(numbers: Sequence[int]) -> str:
    """The numbers in their order; runs of equal ascending distance as first-last or first-last:distance."""
    runs: list[str] = []
    start = 0
    while start < len(numbers):
        end, step = start, 0
        if start + 1 < len(numbers) and (step := numbers[start + 1] - numbers[start]) > 0:
            end = start + 1
            while end + 1 < len(numbers) and numbers[end + 1] - numbers[end] == step:
                end += 1
        if end - start < 2 and step != 1:  # two numbers make a run only where they follow each other
            end = start
        first, last = numbers[start], numbers[end]
        runs.append(f"{first}" if end == start else f"{first}-{last}" + (f":{step}" if step > 1 else ""))
        start = end + 1
    return ",".join(runs)


def from_text(text: str | int) -> tuple[int, ...]:
    """The inverse of `to_text`. Raises ValueError naming the piece that cannot be read."""
    numbers: list[int] = []
    for piece in filter(None, str(text).replace(" ", "").split(",")):
        match = _RUN.fullmatch(piece)
        first, last, step = (int(part or 0) for part in match.groups()) if match else (1, 0, 0)
        if match is not None and match[2] is None:
            last = first
        if last < first or (match is not None and match[3] is not None and step < 1):
            raise UsageError(f"{piece!r} is no run of numbers; write 3, 0-7 or 0-14:2")
        run = range(first, last + 1, step or 1)
        if len(numbers) + len(run) > _MOST:
            raise UsageError(f"{piece!r} goes beyond {_MOST:,} numbers; write a shorter run")
        numbers += run
    return tuple(numbers)


def some(things: Iterable[object], most: int = 4) -> str:
    """The first ones, and how many more there are."""
    listed = list(things)
    shown = ", ".join(map(str, listed[:most]))
    return shown if len(listed) <= most else f"{shown} and {len(listed) - most} more"


def short(numbers: Iterable[object], most: int = 8) -> str:
    """For messages: like a list, cut after `most` numbers."""
    listed = list(numbers)
    shown = ", ".join(map(str, listed[:most]))
    return f"[{shown}]" if len(listed) <= most else f"[{shown}, ... {len(listed)} in all]"
