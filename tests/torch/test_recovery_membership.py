"""Who is in the next generation: losses, latecomers, stopped and replaced processes, incomplete hosts, a lost store.

Processes are threads with connections of their own to a real store; a process dies or is stopped when it no longer
shows that it lives.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

dist = pytest.importorskip("torch.distributed")

from holmes.training.recovery.agreement import Rules, agree, next_generation  # noqa: E402
from holmes.training.recovery.errors import ReplacedError, StoreLostError, TooFewRanksError  # noqa: E402
from holmes.training.recovery.member import Member, choose, place_from  # noqa: E402
from holmes.training.recovery.rendezvous import LEFT, Rendezvous, parse_address  # noqa: E402
from holmes.training.recovery.watch import Watch  # noqa: E402
from holmes_comm.errors import UsageError  # noqa: E402

RULES = Rules(4, join_timeout_s=20, agree_timeout_s=20, wait_timeout_s=20, silent_s=0.8)


class Peer:
    """A process of the job. `lives`: shows that it lives."""

    def __init__(self, address, place, node=None, node_ranks=1, rules=RULES, lives=True):
        self.rendezvous = Rendezvous(address, 10)
        self.me = Member(self.rendezvous.new_identity(), place, node or f"n{place}", node_ranks)
        self.rules, self.failed = rules, threading.Event()
        self.watch = Watch(Rendezvous(address, 10), self.me, 0.1, 0.8)
        if not lives:
            self.watch.close()

    def agree(self, generation=None):
        number = next_generation(self.rendezvous) if generation is None else generation
        decision = agree(self.rendezvous, self.me, number, self.rules, lambda: None)
        if decision is not None:
            self.watch.follow(decision.number, decision.members, self.failed.set)
        return decision

    def places(self, generation):
        return [member.place for member in self.rendezvous.decision(generation) or ()]


@pytest.fixture
def address():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield f"127.0.0.1:{server.port}"
    del server


@pytest.fixture
def peers(address):
    made = []

    def make(*places, **options):
        new = [Peer(address, place, **options) for place in places]
        made.extend(new)
        return new

    yield make
    for peer in made:
        peer.watch.close()


def together(*calls):
    """What the calls return, or raise, each on a thread of its own."""
    results = [None] * len(calls)

    def run(index):
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def wait_until(condition, timeout_s=20):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def places_of(decisions):
    found = [[member.place for member in decision.members] for decision in decisions]
    assert all(places == found[0] for places in found)  # everybody has read the same
    return found[0]


def test_two_are_lost_at_once_and_come_back(peers):
    first = peers(2, 0, 3, 1)
    assert places_of(together(*(peer.agree for peer in first))) == [0, 1, 2, 3]
    a2, a0, a3, a1 = first
    a0.watch.close()  # the first rank among them
    a3.watch.close()
    wait_until(lambda: a1.failed.is_set() and a2.failed.is_set())
    assert "no sign of life from rank 0 on n0" in a1.watch.failure()
    assert places_of(together(lambda: a1.agree(2), lambda: a2.agree(2))) == [1, 2]

    back = peers(3, 0)
    waiting = [threading.Thread(target=peer.agree) for peer in back]
    for thread in waiting:
        thread.start()
    wait_until(a1.watch.can_grow)  # of the first of those who train
    assert a1.watch.failure() is None  # of the new generation
    for peer in (a1, a2):
        peer.rendezvous.end(2, LEFT)
    assert places_of(together(lambda: a1.agree(3), lambda: a2.agree(3))) == [0, 1, 2, 3]
    for thread in waiting:
        thread.join(20)
    assert back[0].places(3) == [0, 1, 2, 3]
    time.sleep(0.5)
    assert not back[0].watch.can_grow()  # nobody waits any more


def test_one_that_is_stopped_during_the_agreement_is_left_out_until_the_next(peers):
    a0, a1, a2, a3 = peers(0, 1, 2, 3)
    together(*(peer.agree for peer in (a0, a1, a2, a3)))
    a3.watch.close()
    a0.rendezvous.end(1, "rank 3 was lost")
    a2.rendezvous.join(2, a2.me)
    a2.watch.close()  # stopped, after it has joined
    assert places_of(together(lambda: a0.agree(2), lambda: a1.agree(2))) == [0, 1]
    goes_on = Watch(a2.rendezvous, a2.me, 0.1, 0.8)
    again = threading.Thread(target=lambda: a2.agree(2))  # goes on where it was stopped
    with contextlib.closing(goes_on):
        again.start()
        wait_until(a0.watch.can_grow)
        a0.rendezvous.end(2, LEFT)
        assert places_of(together(lambda: a0.agree(3), lambda: a1.agree(3))) == [0, 1, 2]
        again.join(20)
        assert not again.is_alive()


def test_a_failure_is_told_to_all_with_its_first_reason(peers):
    a0, a1, a2 = peers(0, 1, 2, rules=Rules(3, silent_s=0.8))
    together(a0.agree, a1.agree, a2.agree)
    assert a1.rendezvous.end(1, "rank 1: lost rank 7") == "rank 1: lost rank 7"
    assert a2.rendezvous.end(1, "rank 2: aborted") == "rank 1: lost rank 7"
    wait_until(lambda: all(peer.failed.is_set() for peer in (a0, a1, a2)))
    assert a0.watch.failure() == "rank 1: lost rank 7"


def test_of_two_in_one_place_the_later_one_stays(peers):
    a0, a1 = peers(0, 1, rules=Rules(2, silent_s=0.8))
    together(a0.agree, a1.agree)
    a1.rendezvous.end(1, "lost")
    (new,) = peers(1, rules=Rules(2, silent_s=0.8))
    new.rendezvous.join(2, new.me)  # before the others: one that comes later takes its place at the next boundary
    results = together(lambda: a0.agree(2), lambda: a1.agree(2), lambda: new.agree(2))
    assert isinstance(results[1], ReplacedError)
    assert "rank 1 on n1" in str(results[1])
    assert results[0].members[1] == new.me


def test_too_few(peers):
    (a0,) = peers(0, rules=Rules(2, min_ranks=2, join_timeout_s=0.3, wait_timeout_s=0.3))
    with pytest.raises(TooFewRanksError, match="1 ranks are there for generation 1, at least 2"):
        a0.agree()


def test_a_job_that_is_done_needs_nobody(peers):
    a0, a1 = peers(0, 1, rules=Rules(2, silent_s=0.8))
    together(a0.agree, a1.agree)
    (late,) = peers(7)
    waits = threading.Thread(target=lambda: results.append(late.agree()))
    results = []
    waits.start()
    a0.rendezvous.finish()
    waits.join(20)
    assert results == [None]


def test_where_nobody_of_a_generation_is_left_the_next_begins_as_the_first_did(peers):
    a0, a1 = peers(0, 1, rules=Rules(2, silent_s=0.4))
    together(a0.agree, a1.agree)
    a0.watch.close()
    a1.watch.close()
    (b0,) = peers(0, rules=Rules(2, silent_s=0.4))
    waits = threading.Thread(target=b0.agree)
    waits.start()
    wait_until(lambda: b0.rendezvous.ended(1) is not None)
    time.sleep(1.0)
    assert b0.rendezvous.decision(2) is None  # it waits for the other one
    (b1,) = peers(1, rules=Rules(2, silent_s=0.4))
    assert places_of([b1.agree()]) == [0, 1]
    waits.join(20)
    assert not waits.is_alive()


def test_a_lost_store_is_named(peers):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    peer = Peer(f"127.0.0.1:{server.port}", 0, rules=Rules(1))
    peer.agree()
    del server
    wait_until(lambda: peer.watch.lost_store is not None)
    assert not peer.failed.is_set()  # training goes on
    with pytest.raises(StoreLostError, match="does not answer"):
        peer.watch.raise_if_lost()
    with pytest.raises(StoreLostError, match="does not answer"):
        peer.rendezvous.end(1, "failed")
    with pytest.raises(StoreLostError, match="holmes store --port 1"):
        Rendezvous("127.0.0.1:1", 0.3)


def test_a_stopped_store_is_named():
    command = "import holmes.training.recovery.store as s; s.serve_store(0, lambda port: print(port, flush=True))"
    server = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True)
    try:
        rendezvous = Rendezvous(f"127.0.0.1:{server.stdout.readline().strip()}", 10, timeout_s=2)
        assert rendezvous.ended(1) is None
        server.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, server.pid, os.WSTOPPED)  # all its threads stand
        with pytest.raises(StoreLostError, match="does not answer"):
            rendezvous.ended(1)
    finally:
        server.kill()
        server.communicate()


def test_choose():
    def member(identity, place, node="n", node_ranks=1):
        return Member(identity, place, node, node_ranks)

    def places(*members, **options):
        return [(m.place, m.identity) for m in choose(members, **options)]

    assert places(member(1, 5), member(2, 3)) == [(3, 2), (5, 1)]
    assert places(member(1, 3), member(2, 3)) == [(3, 2)]
    halves = [member(1, 0, "a", 2), member(2, 1, "a", 2), member(3, 2, "b", 2)]
    assert places(*halves) == [(0, 1), (1, 2)]
    assert places(*halves, whole_nodes=False) == [(0, 1), (1, 2), (2, 3)]
    assert Member.from_json(halves[0].to_json()) == halves[0]


def test_arguments():
    assert parse_address("[::1]:29400") == ("::1", 29400)
    for wrong in ("head", ":1", "head:", "head:0", "head:70000"):
        with pytest.raises(ValueError, match="must be host:port"):
            parse_address(wrong)
    environment = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "HOLMES_HOSTNAME": "a0"}
    assert place_from(environment) == (3, 8, "a0", 4)
    assert place_from(environment, 1, 2) == (1, 2, "a0", 4)
    with pytest.raises(UsageError, match="RANK"):
        place_from({})
