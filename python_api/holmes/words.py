"""Words of what people read."""

from __future__ import annotations


def count(number: int, thing: str) -> str:
    """As in "1 host", "3 hosts", "2 processes"."""
    if number == 1:
        return f"1 {thing}"
    return f"{number} {thing}{'es' if thing.endswith('s') else 's'}"
