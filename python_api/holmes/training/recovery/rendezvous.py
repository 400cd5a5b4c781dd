"""Rendezvous: what the processes of a job tell each other about generations, as keys of the job's store.

Generation g is an agreed list of members, which train together until it has ended, once, with a reason. Then all that
are alive join g + 1, and the first to see that nobody is missing decides it, with one compare-and-set: whatever was
decided first counts for everybody.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from holmes.training.recovery.connect import connect_store
from holmes.training.recovery.errors import StoreContentError, StoreLostError
from holmes.training.recovery.member import Member

_PREFIX = "holmes/recovery"
LEFT = "left at a boundary"  # why a generation ended that did not fail
GONE = b"gone"  # the last beat of a process that has ended in order
_OPEN = "?"  # value of a key that nobody has decided yet
T = TypeVar("T")


class Rendezvous:
    """One connection to the store; one thread at a time. Every method raises StoreLostError where it does not answer,
    and StoreContentError where what it holds is nothing that a process of the job wrote.

    Each takes at most `timeout_s`. `address`: of the store, see `connect_store`. `job`: jobs of different names do not
    see each other.
    """

    def __init__(self, address: str, connect_timeout_s: float, timeout_s: float = 30.0, job: str = "") -> None:
        self.store, self.address = connect_store(address, job, connect_timeout_s, timeout_s)
        self.job = job
        self.run, self.token, self.floor = 1, "", 0
        self.is_lost = False
        self._known: set[str] = set()  # keys that exist

    def enter_run(self, floor: int) -> None:
        """Takes part in the run of this job that is not done yet: after one that is, the next.

        From then on `job` names the run, `token` is its random identity and `floor` the number that its generations
        come after: whoever enters first says so, from `floor`.
        """
        run = self._number("run", self.settle("run", "1"))
        if self._get(f"{run}/finished") is not None:
            run = self._number("run", self._call("compare_set", "run", str(run), str(run + 1)))
        self.run, self.job = run, f"{self.job}/{run}"
        self.token = self.settle("token", secrets.token_hex(8))
        self.floor = self._number("floor", self.settle("floor", str(floor)))

    def settle(self, name: str, value: str) -> str:
        """The value that whoever came first gave to this name."""
        return self._text(name, self._call("compare_set", name, "", value))

    def settle_seconds(self, name: str, value: float) -> float:
        """As `settle`, of a duration."""
        return self._parsed(name, self.settle(name, repr(float(value))), "a number of seconds", float)

    # --- who is there ---

    def new_identity(self) -> int:
        """A number that no other process of the job has."""
        return int(self._call("add", "identities", 1))

    def beat(self, member: Member) -> None:
        """Says that this process lives."""
        self._call("set", f"beat/{member.identity}", str(time.monotonic_ns()))

    def beats(self, identities: Sequence[int]) -> dict[int, bytes]:
        """The last beat of each of these that has ever beaten: changes while it lives; GONE: it trains no more."""
        keys = [f"beat/{identity}" for identity in identities]
        return dict(zip(identities, self._multi_get(keys), strict=True)) if keys else {}

    def leave(self, member: Member) -> None:
        """Says that this process trains no more and writes nothing: nobody need wait until its lease is over."""
        self._call("set", f"beat/{member.identity}", GONE.decode())

    def wait_for_entry(self, member: Member) -> None:
        """Says that this process would like to be in the next generation."""
        self._append("waiting", member.to_json())

    def waiting(self) -> list[Member]:
        """All that ever said so."""
        return self._members("waiting")

    # --- generations ---

    def latest(self) -> int:
        """The number of the latest generation that was decided; `floor`: none yet."""
        return self._number("latest", self.settle("latest", str(self.floor)))

    def join(self, generation: int, member: Member) -> int:
        """Says that this process is there for a generation that is yet to be decided; returns as which one, from 1."""
        return self._append(f"{generation}/joined", member.to_json())

    def joined(self, generation: int) -> list[Member]:
        """Who is there for it."""
        return self._members(f"{generation}/joined")

    def decide(self, generation: int, members: Iterable[Member]) -> tuple[Member, ...]:
        """Decides who is in a generation, unless that was decided before; returns what counts."""
        text = json.dumps([member.to_json() for member in members])
        decided = self.settle(f"{generation}/decided", text)
        self._call("compare_set", "latest", str(generation - 1), str(generation))
        return self._decided(generation, decided)

    def decision(self, generation: int) -> tuple[Member, ...] | None:
        """Who is in a generation, in the order of ranks; None while that is open."""
        text = self._get(f"{generation}/decided")
        if text is None:
            return None
        # Whoever decided may have been stopped before it said so.
        self._call("compare_set", "latest", str(generation - 1), str(generation))
        return self._decided(generation, text)

    def end(self, generation: int, reason: str) -> str:
        """Ends a generation; the first reason counts, and is returned."""
        return self.settle(f"{generation}/ended", reason)

    def ended(self, generation: int) -> str | None:
        """Why a generation ended; None while it runs."""
        return self._get(f"{generation}/ended")

    def finish(self) -> None:
        """Says that the job is done."""
        self._call("set", "finished", "yes")

    def finished(self) -> bool:
        """Whether the job is done."""
        return self._get("finished") is not None

    # --- who is to blame ---

    def blame(self, generation: int, by: str, node: str) -> None:
        """Says that a process of host `by` lost one of host `node` in this generation; before it joins the next."""
        self._append(f"{generation}/blamed", json.dumps([by, node]))

    def culprits(self, generation: int) -> set[str]:
        """The hosts that processes of the most other hosts lost in this generation: several where all had as many."""
        accusations = set(self._entries(f"{generation}/blamed", "a pair of hosts in JSON", _pair_of))
        counts = Counter(node for by, node in accusations if by != node)
        return {node for node, count in counts.items() if count == max(counts.values())}

    def leave_out(self, node: str, reason: str) -> None:
        """For the rest of this run of the job no generation has a process of this host."""
        self._append("left_out", json.dumps([node, reason]))

    def left_out(self) -> dict[str, str]:
        """These hosts, and why."""
        return dict(self._entries("left_out", "a host and a reason in JSON", _pair_of))

    # --- keys ---

    @property
    def prefix(self) -> str:
        """Of all keys of this run of the job."""
        return f"{_PREFIX}/{self.job}" if self.job else _PREFIX

    def _append(self, name: str, text: str) -> int:
        place = int(self._call("add", f"{name}/count", 1))
        self._call("set", f"{name}/{place}", text)
        return place

    def _members(self, name: str) -> list[Member]:
        return self._entries(name, "a member in JSON", Member.from_json)

    def _decided(self, generation: int, text: str) -> tuple[Member, ...]:
        return self._parsed(f"{generation}/decided", text, "a list of members in JSON", _members_of)

    def _entries(self, name: str, rule: str, parse: Callable[[str], T]) -> list[T]:
        """What was appended, but for what is not there yet."""
        count = self._call("add", f"{name}/count", 0)
        keys = [f"{name}/{place}" for place in range(1, count + 1)]
        values = self._multi_get(keys) if keys else []
        return [
            self._parsed(key, self._text(key, value), rule, parse)
            for key, value in zip(keys, values, strict=True)
            if value != _OPEN.encode()
        ]

    def _multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Never waits: what is not set yet, because its writer was stopped or killed just before, is "?"."""
        for key in keys:
            if key not in self._known:
                self._call("compare_set", key, "", _OPEN)
                self._known.add(key)
        return list(self._call("multi_get", list(keys)))

    def _get(self, key: str) -> str | None:
        if not self._call("check", [key]):
            return None
        return self._text(key, self._call("get", key))

    def _number(self, key: str, value: str | bytes) -> int:
        return self._parsed(key, self._text(key, value), "a whole number", _whole)

    def _text(self, key: str, value: str | bytes) -> str:
        return value if isinstance(value, str) else self._parsed(key, value, "text in UTF-8", bytes.decode)

    def _parsed(self, key: str, value: Any, rule: str, parse: Callable[[Any], T]) -> T:
        """What `parse` makes of a value; it may raise ValueError."""
        try:
            return parse(value)
        except (ValueError, RecursionError) as error:
            raise StoreContentError.of(self.address, f"{self.prefix}/{key}", value, rule, error) from None

    def _call(self, operation: str, key: Any, *values: Any) -> Any:
        keys = [f"{self.prefix}/{name}" for name in key] if isinstance(key, list) else f"{self.prefix}/{key}"
        try:
            return getattr(self.store, operation)(keys, *values)
        except StoreContentError:
            raise
        except (RuntimeError, OSError) as error:  # torch's DistError is a RuntimeError
            self.is_lost = True
            raise StoreLostError(f"the job's store at {self.address} does not answer ({operation}): {error}") from error


def _members_of(text: str) -> tuple[Member, ...]:
    entries = json.loads(text)
    if not isinstance(entries, list) or not entries:
        raise ValueError("no list, or nobody in it")
    return tuple(Member.from_json(entry) for entry in entries)


def _pair_of(text: str) -> tuple[str, str]:
    pair = json.loads(text)
    if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
        raise ValueError("no list of two texts")
    return pair[0], pair[1]


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError("other characters than digits")
    return int(text)
