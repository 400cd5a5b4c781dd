"""Who is in the next generation: losses, latecomers, stopped and replaced processes, incomplete hosts, a lost store.

Processes are threads with connections of their own to a real store, torch's and etcd's; a process dies or is stopped
when it no longer shows that it lives.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

dist = pytest.importorskip("torch.distributed")

from etcd import Etcd, needs_etcd  # noqa: E402

from holmes.training.recovery.agreement import Rules, agree, next_generation  # noqa: E402
from holmes.training.recovery.errors import (  # noqa: E402
    GenerationFailed,
    LeftOutError,
    ReplacedError,
    StoreContentError,
    StoreLostError,
    TooFewRanksError,
)
from holmes.training.recovery.member import Member, choose, place_from  # noqa: E402
from holmes.training.recovery.rendezvous import LEFT, Rendezvous  # noqa: E402
from holmes.training.recovery.store import parse_host_port  # noqa: E402
from holmes.training.recovery.watch import HUNG_STATUS, Watch  # noqa: E402
from holmes_comm import TcpStore  # noqa: E402
from holmes_comm.errors import UsageError  # noqa: E402

RULES = Rules(4, 2, join_timeout_s=20, agree_timeout_s=20, wait_timeout_s=20, silent_s=0.8, lease_s=1.0)


class Peer:
    """A process of the job. `lives`: shows that it lives."""

    def __init__(self, address, place, node=None, node_ranks=1, rules=RULES, lives=True):
        self.rendezvous = Rendezvous(address, 10)
        self.me = Member(self.rendezvous.new_identity(), place, node or f"n{place}", node_ranks)
        self.rules, self.failed = rules, threading.Event()
        self.watch = Watch(Rendezvous(address, 10), self.me, 0.1, 0.8, lease_s=rules.lease_s)
        if not lives:
            self.watch.close()

    def agree(self, generation=None):
        number = next_generation(self.rendezvous) if generation is None else generation
        decision = agree(self.rendezvous, self.me, number, self.rules, lambda: None)
        self.agreed_s = time.monotonic()
        if decision is not None:
            self.watch.follow(decision.number, decision.members, self.failed.set)
        return decision

    def places(self, generation):
        return [member.place for member in self.rendezvous.decision(generation) or ()]


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    with Etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(params=["embedded", pytest.param("etcd", marks=needs_etcd)])
def address(request):
    if request.param == "etcd":
        server = request.getfixturevalue("etcd")
        server.clear()
        yield server.address
        return
    server = TcpStore("127.0.0.1", 0, is_server=True)
    yield f"127.0.0.1:{server.port}"
    del server


@pytest.fixture
def peers(address):
    made = []

    def make(*places, address=address, **options):
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


class Cable:
    """Between processes and the store: `cut` swallows all that is said, without a word to either side."""

    def __init__(self, address):
        host, port = parse_host_port(address.removeprefix("etcd://"))
        scheme = address[: -len(f"{host}:{port}")]
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"{scheme}127.0.0.1:{self.listener.getsockname()[1]}"
        self.cut = threading.Event()
        threading.Thread(target=self._accept, args=(host, port), daemon=True).start()

    def _accept(self, host, port):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection((host, port))
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one, other):
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                if self.cut.is_set():
                    return
                other.sendall(data)


@pytest.fixture
def cable(address):
    with contextlib.closing((made := Cable(address)).listener):
        yield made


def test_who_is_cut_off_from_the_store_stops_before_the_others_decide(peers, cable):
    (a2,) = peers(2, rules=replace(RULES, first_ranks=3), address=cable.address)
    a0, a1 = peers(0, 1, rules=replace(RULES, first_ranks=3))
    together(a0.agree, a1.agree, a2.agree)
    a2.watch.hold_lease()
    stopped_s = []
    with a2.watch._changed:
        a2.watch._on_failure = lambda: stopped_s.append(time.monotonic())
    cable.cut.set()
    a0.rendezvous.end(1, "rank 1: no answer")
    assert places_of(together(lambda: a0.agree(2), lambda: a1.agree(2))) == [0, 1]
    assert stopped_s, "it trains on, while the others have decided without it"
    assert stopped_s[0] < min(a0.agreed_s, a1.agreed_s)
    with pytest.raises(GenerationFailed, match=rf"rank 2 on n2 has not reached .* store at {cable.address} for"):
        a2.watch.hold_lease()
    a0.watch.hold_lease()


def test_a_look_that_took_long_renews_the_lease_from_its_begin(peers):
    (a0,) = peers(0, rules=Rules(1, lease_s=1.0))
    beat = a0.watch._rendezvous.beat
    slow = threading.Event()
    a0.watch._rendezvous.beat = lambda member: (beat(member), slow.is_set() and time.sleep(0.8))
    a0.agree()
    a0.watch.hold_lease()
    slow.set()
    wait_until(a0.failed.is_set)  # each look comes in time, and each lease is over soon after it was renewed
    assert "its lease of 1 s is over" in a0.watch.failure()


def test_nobody_holds_a_lease_for_a_generation_that_is_over(peers):
    (a0,) = peers(0, rules=Rules(1))
    a0.rendezvous.decide(1, [a0.me])
    a0.rendezvous.end(1, "it failed while this process was stopped, after it had read the decision")
    a0.watch.follow(1, [a0.me], a0.failed.set)
    with pytest.raises(GenerationFailed, match="it failed while this process was stopped"):
        a0.watch.hold_lease()


def test_who_has_ended_in_order_is_not_waited_for(peers):
    a0, a1, a2 = peers(0, 1, 2, rules=replace(RULES, first_ranks=3, lease_s=30.0))
    together(a0.agree, a1.agree, a2.agree)
    a2.watch.close()
    a2.rendezvous.leave(a2.me)
    a0.rendezvous.end(1, "rank 2 ended")
    began_s = time.monotonic()
    assert places_of(together(lambda: a0.agree(2), lambda: a1.agree(2))) == [0, 1]
    assert time.monotonic() - began_s < 10


def test_more_than_half_of_the_job_train_unless_told_otherwise(peers):
    assert [Rules(ranks).least for ranks in (1, 2, 3, 4)] == [1, 2, 2, 3]
    assert Rules(4, min_ranks=1).least == 1
    rules = Rules(4, join_timeout_s=20, agree_timeout_s=0.3, wait_timeout_s=0.3, silent_s=0.8, lease_s=0.5)
    a0, a1, a2, a3 = peers(0, 1, 2, 3, rules=rules)
    together(*(peer.agree for peer in (a0, a1, a2, a3)))
    a2.watch.close()
    a3.watch.close()
    a0.rendezvous.end(1, "lost")
    for result in together(lambda: a0.agree(2), lambda: a1.agree(2)):
        assert isinstance(result, TooFewRanksError)
        assert "at least 3 are needed" in str(result)


def test_a_watch_that_meets_something_else_ends_the_generation(peers):
    (a0,) = peers(0, rules=Rules(1, lease_s=0.6))
    a0.agree()
    a0.watch.hold_lease()
    a0.rendezvous.store.set("holmes/recovery/waiting/1", "no member")  # anybody may write there
    a0.rendezvous.store.add("holmes/recovery/waiting/count", 1)
    wait_until(a0.failed.is_set)
    assert "its lease of 0.6 s is over" in a0.watch.failure()
    with pytest.raises(StoreLostError, match="JSONDecodeError"):
        a0.watch.raise_if_lost()


def test_jobs_on_one_store_do_not_see_each_other(address):
    rendezvous = {name: Rendezvous(address, 10, job=name) for name in ("a", "b")}
    for one in rendezvous.values():
        one.enter_run(0)
    rendezvous["a"].join(1, Member(1, 0, "n0"))
    assert rendezvous["b"].joined(1) == []
    assert rendezvous["a"].token != rendezvous["b"].token
    rendezvous["a"].finish()
    again, with_it = (Rendezvous(address, 10, job="a") for _ in range(2))
    again.enter_run(7)
    with_it.enter_run(3)
    assert not again.finished()
    assert again.joined(1) == []
    assert again.token == with_it.token != rendezvous["a"].token
    assert next_generation(again) == next_generation(with_it) == 8


def test_who_comes_alone_after_a_job_is_done_is_not_kept(address):
    first = Rendezvous(address, 10, job="a")
    first.enter_run(0)
    first.finish()
    late = Rendezvous(address, 10, job="a")
    late.enter_run(0)
    me = Member(late.new_identity(), 0, "n0")
    assert agree(late, me, next_generation(late), Rules(2, join_timeout_s=0.3), lambda: None) is None


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
    a0, a1 = peers(0, 1, rules=Rules(2, silent_s=0.4, lease_s=0.5))
    together(a0.agree, a1.agree)
    a0.watch.close()
    a1.watch.close()
    (b0,) = peers(0, rules=Rules(2, silent_s=0.4, lease_s=0.5))
    waits = threading.Thread(target=b0.agree)
    waits.start()
    wait_until(lambda: b0.rendezvous.ended(1) is not None)
    time.sleep(1.0)
    assert b0.rendezvous.decision(2) is None  # it waits for the other one
    (b1,) = peers(1, rules=Rules(2, silent_s=0.4, lease_s=0.5))
    assert places_of([b1.agree()]) == [0, 1]
    waits.join(20)
    assert not waits.is_alive()


def test_a_lost_store_is_named_and_training_stops(peers):
    server = TcpStore("127.0.0.1", 0, is_server=True)
    address = f"127.0.0.1:{server.port}"
    (peer,) = peers(0, address=address, rules=Rules(1, lease_s=3.0))  # on a busy machine too, it has asked by then
    peer.agree()
    del server
    wait_until(peer.failed.is_set)
    failure = peer.watch.failure()
    assert f"rank 0 on n0 has not reached the job's store at {address} for" in failure
    assert "does not answer" in failure
    with pytest.raises(StoreLostError, match="does not answer"):
        peer.watch.raise_if_lost()
    with pytest.raises(StoreLostError, match="does not answer"):
        peer.rendezvous.end(1, "failed")
    with pytest.raises(StoreLostError, match="holmes store --port 1"):
        Rendezvous("127.0.0.1:1", 0.3)


A_MEMBER = '{"identity": %s, "place": 0, "node": "n0", "node_ranks": 1}'
GARBAGE = [
    ("run", "two", "a whole number", lambda rendezvous: rendezvous.enter_run(0)),
    ("/1/floor", "-1", "a whole number", lambda rendezvous: rendezvous.enter_run(0)),
    ("latest", b"\xff\xfe", "text in UTF-8", next_generation),
    ("lease_s", "soon", "a number of seconds", lambda rendezvous: rendezvous.settle_seconds("lease_s", 5)),
    ("1/ended", b"\xc3", "text in UTF-8", lambda rendezvous: rendezvous.ended(1)),
    ("1/decided", "[]", "a list of members in JSON", lambda rendezvous: rendezvous.decision(1)),
    ("1/decided", '["x"]', "a list of members in JSON", lambda rendezvous: rendezvous.decision(1)),
    ("1/decided", "7", "a list of members in JSON", lambda rendezvous: rendezvous.decision(1)),
    ("1/decided", "[" * 100_000, "a list of members in JSON", lambda rendezvous: rendezvous.decision(1)),
    ("1/joined/1", A_MEMBER % '"x"', "a member in JSON", lambda rendezvous: rendezvous.joined(1)),
    ("1/joined/1", '{"identity": 1}', "a member in JSON", lambda rendezvous: rendezvous.joined(1)),
    ("waiting/1", A_MEMBER % "-1", "a member in JSON", lambda rendezvous: rendezvous.waiting()),
    ("1/blamed/1", '{"n0": "n1"}', "a pair of hosts in JSON", lambda rendezvous: rendezvous.culprits(1)),
    ("left_out/1", '["n0"]', "a host and a reason in JSON", lambda rendezvous: rendezvous.left_out()),
    ("waiting/count", "many", "a whole number", lambda rendezvous: rendezvous.waiting()),
]


@pytest.mark.parametrize(("key", "value", "rule", "call"), GARBAGE)
def test_garbage_in_the_store_is_named_with_its_key_and_the_rule(address, key, value, rule, call):
    rendezvous = Rendezvous(address, 10)
    full_key = f"{rendezvous.prefix}/{key}"
    if key.endswith("/1"):
        rendezvous.store.add(f"{full_key[:-1]}count", 1)
    rendezvous.store.set(full_key, value)
    with pytest.raises(StoreContentError) as caught:
        call(rendezvous)
    said = str(caught.value)
    assert f"under the key '{full_key}', which must be {rule}" in said
    assert f"the job's store at {address} holds {value[:80]!r}" in said
    assert len(said) < 1000


def test_garbage_in_the_store_ends_the_watch_by_name(peers):
    (peer,) = peers(0, rules=Rules(1, lease_s=0.8))
    peer.agree()
    peer.rendezvous.store.set(f"{peer.rendezvous.prefix}/waiting/1", "nobody")
    peer.rendezvous.store.add(f"{peer.rendezvous.prefix}/waiting/count", 1)
    wait_until(peer.failed.is_set)
    assert "holds 'nobody' under the key 'holmes/recovery/waiting/1'" in peer.watch.failure()
    with pytest.raises(StoreContentError, match="must be a member in JSON"):
        peer.watch.raise_if_lost()


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
    assert parse_host_port("[::1]:29400") == ("::1", 29400)
    for wrong in ("head", ":1", "head:", "head:0", "head:70000"):
        with pytest.raises(ValueError, match="must be host:port"):
            parse_host_port(wrong)
    environment = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "HOLMES_HOSTNAME": "a0"}
    assert place_from(environment) == (3, 8, "a0", 4)
    assert place_from(environment, 1, 2) == (1, 2, "a0", 4)
    assert place_from({})[:2] + place_from({})[3:] == (0, 1, 1)  # no launcher: alone
    for wrong in ({"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "two"}, {"WORLD_SIZE": "2", "RANK": "2"}):
        with pytest.raises(UsageError, match="RANK"):
            place_from(wrong)


def fail_generation(number, members, blames):
    for peer, node in zip(members, blames, strict=True):
        peer.rendezvous.blame(number, peer.me.node, node)
    members[0].rendezvous.end(number, "lost")
    for peer in members:
        peer.watch.leave()


def agreed(number, *members):
    return together(*(lambda peer=peer: peer.agree(number) for peer in members))


def test_a_host_that_the_others_lose_again_and_again_is_left_out_and_told(peers):
    rules = Rules(3, silent_s=0.8, lease_s=1.0)
    everybody = peers(0, 1, 2, rules=rules)
    for number in range(1, 4):
        assert places_of(agreed(number, *everybody)) == [0, 1, 2]
        fail_generation(number, everybody, ["n2", "n2", "n0"])  # who is half dead loses others too
    first, second, error = agreed(4, *everybody)
    assert places_of([first, second]) == [0, 1]
    assert isinstance(error, LeftOutError)
    assert "rank 2 on n2 is left out of the job: the other hosts lost it in each of the generations 1 to 3" in str(
        error
    )
    (again,) = peers(2, rules=rules)  # the launcher has started it anew
    with pytest.raises(LeftOutError, match="rank 2 on n2"):
        again.agree()


def test_nobody_is_left_out_without_a_clear_majority_a_row_or_enough_others(peers):
    rules = Rules(3, min_ranks=3, silent_s=0.8, lease_s=1.0, blamed_generations=2)
    everybody = peers(0, 1, 2, rules=rules)
    blames = [
        ["n1", "n0", "n0"],  # n0
        ["n1", "n0", "n1"],  # n1: no row
        ["n1", "n0", "n2"],  # its own host does not count: two are equal
        ["n2", "n2", "n0"],
        ["n2", "n2", "n0"],  # a row, but without it there are too few
    ]
    for number, blamed in enumerate(blames, 1):
        assert places_of(agreed(number, *everybody)) == [0, 1, 2]
        fail_generation(number, everybody, blamed)
    assert places_of(agreed(6, *everybody)) == [0, 1, 2]
    assert everybody[0].rendezvous.left_out() == {}


HUNG = """
import sys, threading, time
from holmes.training.recovery.member import Member
from holmes.training.recovery.rendezvous import Rendezvous
from holmes.training.recovery.watch import Watch
address = sys.argv[1]
me = Member(1, 0, "n0")
watch = Watch(Rendezvous(address, 10), me, 0.1, 2.0, lease_s=1.0, hung_after_s=float(sys.argv[2]))
store = Rendezvous(address, 10)
def hangs_here():
    time.sleep(600)
for number in (1, 2):
    failed = threading.Event()
    watch.follow(number, [me], failed.set)
    store.end(number, "another rank was lost")
    failed.wait(10)
    if number == 1:
        time.sleep(0.2)
        watch.leave()
        time.sleep(1.5)
print("left the first", flush=True)
hangs_here()
"""


def test_a_process_that_hangs_in_a_failed_generation_says_where_and_ends_for_the_launcher(address):
    ended = subprocess.run([sys.executable, "-c", HUNG, address, "1.0"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == HUNG_STATUS, ended.stderr
    assert "left the first" in ended.stdout
    assert (
        "rank 0 on n0 hangs: it has not left generation 2, which failed 1 s ago (another rank was lost)" in ended.stderr
    )
    assert "in hangs_here" in ended.stderr
