"""Typed fields of a file that a person wrote: every error names the place, the value, the rule and the nearest fix."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holmes_comm.errors import UsageError


class Entry:
    """One mapping of a file; `where` is its place in it ("hosts[3].ports[0]")."""

    def __init__(self, data: Any, where: str, allowed: Iterable[str]) -> None:
        """Raises ValueError where `data` is no mapping or has a key that is not allowed."""
        self.where = where
        allowed = tuple(allowed)
        if not isinstance(data, Mapping):
            raise UsageError(f"{where} is {data!r}; it must be a mapping with keys of {', '.join(allowed)}")
        self._data = data
        for key in data:
            if key not in allowed:
                close = difflib.get_close_matches(str(key), allowed, n=1)
                meant = f"; did you mean {close[0]!r}?" if close else ""
                raise UsageError(f"{where or 'the file'} has an unknown key {key!r}{meant} ({', '.join(allowed)})")

    def __contains__(self, key: str) -> bool:
        return self._data.get(key) is not None

    def text(self, key: str, default: str | None = None) -> str:
        """A text; without a default it must be there."""
        value = self._data.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or (not value and default is None):
            raise self.wrong(key, "a text" + (" (in quotes)" if isinstance(value, (int, float)) else ""))
        return value

    def optional_text(self, key: str) -> str | None:
        """A text, or None where it is left out."""
        return self.text(key) if key in self else None

    def choice(self, key: str, choices: Sequence[str]) -> str:
        """One of `choices`."""
        value = self._data.get(key)
        if value not in choices:
            close = difflib.get_close_matches(str(value).lower(), choices, n=1, cutoff=0.4)
            raise self.wrong(key, f"one of {', '.join(choices)}" + (f"; the nearest is {close[0]!r}" if close else ""))
        return str(value)

    def positive(self, key: str) -> float | None:
        """A number above 0, or None where it is left out."""
        if self._data.get(key) is None:
            return None
        value = self._number(key)
        if value is None or value <= 0:
            raise self.wrong(key, "a number above 0, or left out where unknown")
        return value

    def required(self, key: str) -> float:
        """A number above 0 that must be there."""
        value = self._number(key)
        if value is None or value <= 0:
            raise self.wrong(key, "a number above 0")
        return value

    def not_negative(self, key: str, default: float | None = None) -> float:
        """A number of 0 or more; without a default it must be there."""
        value = default if self._data.get(key) is None else self._number(key)
        if value is None or value < 0:
            raise self.wrong(key, "a number of 0 or more")
        return value

    def _number(self, key: str) -> float | None:
        """A finite number, None for anything else."""
        value = self._data.get(key)
        if isinstance(value, str):  # YAML 1.1 reads 3e-6 as a text
            try:
                value = float(value)
            except ValueError:
                return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return float(value) if abs(value) <= sys.float_info.max else None

    def whole(self, key: str, default: int, *, least: int = 1, most: int | None = None) -> int:
        """A whole number of at least `least` and at most `most`."""
        value = self._data.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, f"a whole number of {least} or more")
        if most is not None and value > most:
            raise self.wrong(key, f"a whole number of at most {most}")
        return value

    def flag(self, key: str) -> bool:
        """True or false; false where it is left out."""
        value = self._data.get(key, False)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def items(self, key: str, *, required: bool = False) -> list[tuple[str, Any]]:
        """The places and values of a list; empty where it is left out and not required."""
        value = self._data.get(key)
        if value is None and not required:
            return []
        if not isinstance(value, list) or (required and not value):
            raise self.wrong(key, "a list" + (" with at least one entry" if required else ""))
        place = f"{self.where}.{key}" if self.where else key
        return [(f"{place}[{index}]", item) for index, item in enumerate(value)]

    def mapping(self, key: str) -> list[tuple[str, Any, Any]]:
        """The places, keys and values of a mapping; empty where it is left out."""
        value = self._data.get(key)
        if value is None:
            return []
        if not isinstance(value, Mapping):
            raise self.wrong(key, "a mapping")
        place = f"{self.where}.{key}" if self.where else key
        return [(f"{place}.{name}", name, item) for name, item in value.items()]

    def get(self, key: str) -> Any:
        """The value as it is, None where it is left out."""
        return self._data.get(key)

    def wrong(self, key: str, rule: str) -> ValueError:
        """The error for a field that breaks a rule."""
        place = f"{self.where}.{key}" if self.where else key
        if key not in self._data:
            return ValueError(f"{place} is missing; it must be {rule}")
        return ValueError(f"{place} is {self._data[key]!r}; it must be {rule}")


def numbered(template: str, index: int, count: int, where: str) -> str:
    """`template` with `index` in place of "{}" ("{:03}" pads). Raises ValueError where `count` names would be equal."""
    try:
        name = template.format(index)
    except (IndexError, KeyError, ValueError, AttributeError) as error:
        raise UsageError(f"{where} is {template!r}: {error}; '{{}}' stands for the number, '{{:03}}' pads it") from None
    if count > 1 and name == template:
        raise UsageError(
            f"{where} is {template!r} with count: {count}; it needs '{{}}' in it, for example {template}{{}}"
        )
    return name
