"""The agreement on who is left, of many processes in virtual time: what each looks up in the store, by their number."""

from __future__ import annotations

import math
import random
import threading
from collections import Counter
from collections.abc import Callable

import pytest

from holmes.training.recovery import agreement, rendezvous, watch
from holmes.training.recovery.agreement import Decision, Rules, agree
from holmes.training.recovery.errors import TooFewRanksError
from holmes.training.recovery.member import Member
from holmes.training.recovery.rendezvous import Rendezvous

HEARTBEAT_S = 0.5


class World:
    """Threads in virtual time: one runs, until it sleeps; the seed says how long a sleep really takes."""

    def __init__(self, seed: int) -> None:
        self.now_s = 1000.0
        self._random = random.Random(seed)
        self._turns: dict[threading.Thread, threading.Semaphore] = {}
        self._wake_s: dict[threading.Thread, float] = {}
        self._back = threading.Semaphore(0)

    def run(self, bodies: list[Callable[[], None]], limit_s: float) -> None:
        for body in bodies:
            thread = threading.Thread(target=self._live, args=(body,), daemon=True)
            self._turns[thread], self._wake_s[thread] = threading.Semaphore(0), self.now_s + self._random.random() / 10
            thread.start()
        end_s = self.now_s + limit_s
        while self._wake_s:
            thread = min(self._wake_s, key=self._wake_s.__getitem__)
            self.now_s = max(self.now_s, self._wake_s[thread])
            assert self.now_s < end_s, "the processes do not agree"
            self._turns[thread].release()
            self._back.acquire()

    def _live(self, body: Callable[[], None]) -> None:
        own = threading.current_thread()
        self._turns[own].acquire()
        try:
            body()
        finally:
            del self._wake_s[own]
            self._back.release()

    # What the code asks of the module `time`.
    def sleep(self, seconds: float) -> None:
        own = threading.current_thread()
        self._wake_s[own] = self.now_s + seconds * (1 + self._random.random() / 10)
        self._back.release()
        self._turns[own].acquire()

    def monotonic(self) -> float:
        return self.now_s

    def monotonic_ns(self) -> int:
        return int(self.now_s * 1e9)


class CountingStore:
    """As torch's, for one process; counts its requests, and the values that they bring."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self._values = values
        self.counts: Counter[str] = Counter()

    def _count(self, values: int) -> None:
        self.counts.update(requests=1, values=values)

    def set(self, key: str, value: str) -> None:
        self._count(0)
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._count(1)
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        self._count(0)
        self.counts["looks"] += keys[0].endswith("/finished")
        return all(key in self._values for key in keys)

    def add(self, key: str, number: int) -> int:
        self._count(1)
        total = int(self._values.get(key, b"0")) + number
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        self._count(1)
        found = self._values.get(key)
        if (found is None and expected == "") or found == expected.encode():
            self._values[key] = wanted.encode()
        return self._values.get(key, expected.encode())

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._count(len(keys))
        return [self._values[key] for key in keys]


class DeathError(Exception):
    """This process is no more."""


def lose_some(
    ranks: int, seed: int, monkeypatch: pytest.MonkeyPatch, dying: int = 0
) -> tuple[list[Decision], list[CountingStore]]:
    """One in a hundred dies, and the first that join the next generation so far, `dying` of them; what the others
    decide, and what each has asked of the store meanwhile."""
    world = World(seed)
    values: dict[str, bytes] = {}
    for module in (agreement, watch, rendezvous):
        monkeypatch.setattr(module, "time", world)
    monkeypatch.setattr(rendezvous, "connect_store", lambda *_: (CountingStore(values), "here"))
    members = [Member(identity=rank + 1, place=rank, node=f"n{rank}") for rank in range(ranks)]
    lost = set(random.Random(seed).sample(range(ranks), max(1, ranks // 100)))
    clients = [Rendezvous("here", 1.0) for _ in members]
    for client, member in zip(clients, members, strict=True):
        client.enter_run(0)
        client.beat(member)
    clients[0].decide(1, members)
    clients[0].end(1, "a rank was lost")
    decisions: list[Decision] = []
    begin_s = world.now_s

    def survive(client: Rendezvous, me: Member) -> None:
        beat_s = -math.inf

        def beat() -> None:  # as the watch's thread does
            nonlocal beat_s
            if dying and world.now_s > begin_s + 1 and me in client.joined(2)[:dying]:
                raise DeathError
            if world.now_s - beat_s >= HEARTBEAT_S:
                client.beat(me)
                beat_s = world.now_s

        try:
            decision = agree(client, me, 2, Rules(first_ranks=ranks), beat)
        except DeathError:
            lost.add(me.place)
        else:
            assert decision is not None
            decisions.append(decision)

    for client in clients:
        client.store.counts.clear()
    alive = [rank for rank in range(ranks) if rank not in lost]
    world.run([lambda rank=rank: survive(clients[rank], members[rank]) for rank in alive], limit_s=60)
    alive = [rank for rank in alive if rank not in lost]
    assert decisions == [Decision(2, tuple(members[rank] for rank in alive))] * len(alive)
    return decisions, [clients[rank].store for rank in alive]


def most(stores: list[CountingStore], what: str) -> int:
    return max(store.counts[what] for store in stores)


def test_more_ranks_need_no_more_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end when no lost rank can hold its lease any more; eight ranks look at all, sixteen at last."""
    looks = {}
    for ranks in (8, 64):
        _, stores = lose_some(ranks, 1, monkeypatch)
        looks[ranks] = most(stores, "looks")
        assert most(stores, "values") <= looks[ranks] * (2 * ranks + 5)
        assert sum(store.counts["values"] for store in stores) <= 16 * looks[ranks] * (2 * ranks + 5)
    assert abs(looks[8] - looks[64]) <= 2


def test_others_decide_where_those_who_came_first_die(monkeypatch: pytest.MonkeyPatch) -> None:
    decisions, stores = lose_some(24, 1, monkeypatch, dying=8)
    assert len(decisions) == len(stores) == 15
    assert 100 < most(stores, "looks") < 500


def test_the_seed_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again, other = (lose_some(12, seed, monkeypatch) for seed in (1, 1, 2))
    assert first[0] == again[0]
    assert [store.counts for store in first[1]] == [store.counts for store in again[1]]
    assert [store.counts for store in first[1]] != [store.counts for store in other[1]]


def wait_in_vain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, previous: list[Member], here: list[Member]
) -> list[str]:
    """What those say who are `here`, of four ranks, while they wait for the others of a generation, in vain."""
    world = World(1)
    values: dict[str, bytes] = {}
    for module in (agreement, watch, rendezvous):
        monkeypatch.setattr(module, "time", world)
    monkeypatch.setattr(rendezvous, "connect_store", lambda *_: (CountingStore(values), "here"))
    clients = [Rendezvous("here", 1.0) for _ in here]
    for client, member in zip(clients, here, strict=True):
        client.enter_run(0)
        client.beat(member)
    if previous:
        clients[0].decide(1, previous)
        clients[0].end(1, "a rank was lost")
    rules = Rules(first_ranks=4, join_timeout_s=100.0, agree_timeout_s=60.0, wait_timeout_s=100.0)

    def survive(client: Rendezvous, me: Member) -> None:
        with pytest.raises(TooFewRanksError):
            agree(client, me, 2 if previous else 1, rules, lambda: client.beat(me))

    pairs = zip(clients, here, strict=True)
    world.run([lambda client=client, me=me: survive(client, me) for client, me in pairs], limit_s=300)
    words = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert 3 * len(here) <= len(words) <= 5 * len(here)  # after 10, 20, 40, 80 and 160 s
    return words


def test_who_waits_says_for_whom(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    members = [Member(identity=rank + 1, place=rank, node=f"n{rank}") for rank in range(4)]
    first = wait_in_vain(monkeypatch, caplog, previous=members, here=members[:2])[0]
    assert first.startswith("generation 2 waits for 10 s: 2 of 3 ranks are there (rank 0 on n0, rank 1 on n1); ")
    assert "not started again: rank 2 on n2, rank 3 on n3; it gives up after 160 s" in first


def test_who_waits_for_the_first_time_says_for_whom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    members = [Member(identity=place + 1, place=place, node=f"n{place}") for place in (0, 3)]
    first, *_, last = wait_in_vain(monkeypatch, caplog, previous=[], here=members)
    assert "generation 1 waits for 10 s: 2 of 4 ranks are there (rank 0 on n0, rank 3 on n3); " in first
    assert "not there: RANK 1, 2 (not started, or another store or checkpoint folder); it gives up after 200 s" in first
    assert "2 of 3 ranks are there" in last


def test_a_host_that_is_not_whole_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    members = [Member(identity=rank + 1, place=rank, node="n0", node_ranks=4) for rank in range(4)]
    first = wait_in_vain(monkeypatch, caplog, previous=members, here=members[:3])[0]
    assert "0 of 3 ranks are there; " in first
    assert (
        "host n0 does not count, as 3 of its 4 processes are there (Rules(whole_nodes=False): each by itself)" in first
    )


def test_rules_that_differ_are_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    world = World(1)
    values: dict[str, bytes] = {}
    for module in (agreement, watch, rendezvous):
        monkeypatch.setattr(module, "time", world)
    monkeypatch.setattr(rendezvous, "connect_store", lambda *_: (CountingStore(values), "here"))

    def join(rank: int, world_size: int) -> None:
        client, me = Rendezvous("here", 1.0), Member(identity=rank + 1, place=rank, node=f"n{rank}")
        client.enter_run(0)
        client.beat(me)
        assert agree(client, me, 1, Rules(first_ranks=world_size), lambda: client.beat(me)) is not None

    world.run([lambda rank=rank: join(rank, 4 if rank == 2 else 3) for rank in range(3)], limit_s=60)
    words = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert words
    assert all("first_ranks=4, min_ranks=3" in word and "first_ranks=3, min_ranks=2" in word for word in words)
    assert all("equal on all ranks" in word for word in words)
