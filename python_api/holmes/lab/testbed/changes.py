"""Changes of links while they are used: which are allowed, and a file of them.

changes:
  - {at_s: 5, link: a0.eth0, rate_gbps: 0.5}                 # a NIC's; keys as in a spec
  - {at_s: 10, link: eth/a, delay_ms: 80, loss_percent: 1}   # what cluster a has on network eth
  - {at_s: 20, link: eth/a, up: false}
  - {at_s: 21, link: eth/a, up: true}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holmes import files
from holmes.lab.testbed import fabric
from holmes.lab.testbed.spec import Link, Spec, SpecError, changed_link

#: What the kernel limits; all else is of `holmes-line`.
LIMITS = frozenset({"rate_gbps", "receive_gbps", "queue_ms", "queue_bytes"})
#: As of any time that a command takes; a wait that is much longer the system refuses.
_MAX_AT_S = 2**31 - 1
_EXAMPLE = "{at_s: 5, link: a0.eth0, rate_gbps: 0.5}"


@dataclass(frozen=True)
class Change:
    """What becomes of a link, so long after the ranks' start."""

    at_s: float
    link: str
    values: Mapping[str, Any]

    def __str__(self) -> str:
        """One line for people."""
        return f"{self.link}: {', '.join(f'{key} {value}' for key, value in self.values.items())}"


def changed(spec: Spec, links: Mapping[str, Link], name: str, values: Mapping[str, Any]) -> Link:
    """Returns what a link will be, given what all are now.

    Raises SpecError where there is no such link, where a value breaks a rule of specs, and where a link that delays and
    loses nothing in the spec is to do so.
    """
    if name not in links:
        raise SpecError(f"testbed {spec.name} has no link {name!r}; it has {', '.join(links)}")
    if not isinstance(values.get("up", True), bool):
        raise SpecError(f"{name}.up is {values['up']!r}; it must be true or false")
    after = changed_link(links[name], {key: value for key, value in values.items() if key != "up"}, name)
    if fabric.links(spec)[name].is_plain and not after.is_plain:
        raise SpecError(
            f"{name} has no delay and no loss in testbed {spec.name}, so it cannot get one while it is used; "
            "give it a little there, such as delay_ms: 0.01"
        )
    return after


def load_changes(path: Path, spec: Spec) -> list[Change]:
    """Reads a file of changes, in the order of their times. Raises SpecError where one of them is wrong."""
    listed = files.load(path).get("changes")
    if not isinstance(listed, list):
        raise SpecError(f"{path}: changes is {listed!r}; it must be a list of such as {_EXAMPLE}")
    changes = [_change(entry, f"{path}: changes[{index}]") for index, entry in enumerate(listed)]
    changes.sort(key=lambda change: change.at_s)
    links = fabric.links(spec)
    for change in changes:
        links[change.link] = changed(spec, links, change.link, change.values)
    return changes


def _change(entry: Any, where: str) -> Change:
    if not isinstance(entry, dict) or not {"at_s", "link"} < entry.keys():
        raise SpecError(f"{where} is {entry!r}; it must be such as {_EXAMPLE}")
    values = {str(key): value for key, value in entry.items() if key not in ("at_s", "link")}
    at_s = entry["at_s"]
    if isinstance(at_s, bool) or not isinstance(at_s, (int, float)) or not 0 <= at_s <= _MAX_AT_S:
        raise SpecError(f"{where}.at_s is {at_s!r}; it must be a number from 0 to {_MAX_AT_S}")
    return Change(float(at_s), str(entry["link"]), values)
