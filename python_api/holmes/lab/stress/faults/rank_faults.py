"""Faults of a rank: its process, its limits, its clock, its calls."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import replace

from holmes.lab.stress.faults.catalogue import Injection, fault
from holmes.lab.stress.faults.expect import LOST, SURVIVED, Expectation, about
from holmes.lab.stress.faults.scene import Scene

_JUMPS_S = (2 * 86400, -2 * 86400, 3 * 3600, -3600, 30, -30)
_PAUSES = 4  # of a slow reader
_RECORD_FIELDS = 60  # more than a record has; they are counted through
_PAUSE_S, _WORK_S = (0.3, 0.8), 0.25


@fault("kill", "a rank's process is killed (SIGKILL)")
def kill(scene: Scene, choice: random.Random) -> Injection | None:
    """Everybody hears of it at once: the kernel closes its connections."""
    rank = _victim(scene, choice, but=scene.kept)
    if rank is None:
        return None
    return Injection(
        "kill",
        f"rank {rank} on {scene.nodes[rank]} is killed",
        about(frozenset({rank})),
        act=lambda: scene.kill(rank),
        ended=frozenset({rank}),
    )


@fault("stop", "a rank's process is stopped (SIGSTOP) and goes on after the others have reported it")
def stop(scene: Scene, choice: random.Random) -> Injection | None:
    """Nothing is closed: only the deadline tells."""
    rank = _victim(scene, choice)
    if rank is None:
        return None
    return Injection(
        "stop",
        f"rank {rank} on {scene.nodes[rank]} is stopped",
        about(frozenset({rank})),
        act=lambda: scene.kill(rank, signal.SIGSTOP),
        heal=lambda: scene.kill(rank, signal.SIGCONT),
        silent=frozenset({rank}),
    )


@fault("slow-reader", "a rank stands still again and again, each time for less than the deadline")
def slow_reader(scene: Scene, choice: random.Random) -> Injection | None:
    """Slow is not lost."""
    rank = _victim(scene, choice)
    if rank is None:
        return None
    pauses_s = [choice.uniform(*_PAUSE_S) for _ in range(_PAUSES)]

    def act() -> None:
        for pause_s in pauses_s:
            scene.kill(rank, signal.SIGSTOP)
            time.sleep(pause_s)
            scene.kill(rank, signal.SIGCONT)
            time.sleep(_WORK_S)

    what = f"rank {rank} on {scene.nodes[rank]} stands still {_PAUSES} times, {max(pauses_s):.1f} s at most"
    return Injection("slow-reader", what, SURVIVED, act=act, hold_s=0.5)


@fault("wrong-collective", "a rank calls another collective than the others")
def wrong_collective(scene: Scene, choice: random.Random) -> Injection | None:
    """A mismatch, on every rank of the group, naming one of the two that disagree."""
    rank = _victim(scene, choice)
    if rank is None:
        return None
    group = choice.choice([group for group in scene.groups() if rank in group.ranks])
    expect = Expectation(True, frozenset({"MismatchError"}), lambda reporter, culprit: rank in (reporter, culprit))
    key = f"mistake/{group.kind}/{rank}"
    what = f"rank {rank} calls broadcast where its {group.kind} group calls all_reduce"
    return Injection("wrong-collective", what, expect, act=lambda: scene.store.set(key, b""))


@fault("clock-jump", "the wall clock of a rank jumps by seconds, hours or days")
def clock_jump(scene: Scene, choice: random.Random) -> Injection | None:
    """Deadlines are of the monotonic clock: nothing may happen. None where no rank has a false clock."""
    ranks = [rank for rank in scene.free_ranks() if rank in scene.clocks]
    if not ranks:
        return None
    rank = choice.choice(ranks)
    scene.taken.add(rank)
    offset_s = choice.choice(_JUMPS_S)
    clock = scene.clocks[rank]
    return Injection(
        "clock-jump",
        f"the clock of rank {rank} on {scene.nodes[rank]} jumps by {offset_s} s",
        SURVIVED,
        act=lambda: clock.set(offset_s),
        heal=lambda: clock.set(0),
        hold_s=2.0,
    )


@fault("descriptors", "a rank has no descriptors left when its groups are made", at_setup=True)
def descriptors(scene: Scene, choice: random.Random) -> Injection | None:
    """SystemError on every rank, naming the one and its limit."""
    rank = choice.choice(scene.free_ranks())
    expect = about(frozenset({rank}), frozenset({"SystemError"}), at_setup=True)
    what = f"rank {rank} on {scene.nodes[rank]} has no descriptors left"
    return Injection("descriptors", what, expect, tamper={rank: {"descriptors": True}})


@fault(
    "descriptors-1024", "a rank may have 1024 descriptors, soft and hard limit, and few of them are left", at_setup=True
)
def descriptors_1024(scene: Scene, choice: random.Random) -> Injection | None:
    """As many as are needed: right results. Fewer: SystemError on every rank, naming the one."""
    rank = choice.choice(scene.free_ranks())
    spare = choice.randrange(60)
    expect = Expectation(None, frozenset({"SystemError"}), lambda reporter, culprit: culprit == rank)
    what = f"rank {rank} on {scene.nodes[rank]} has {spare} of 1024 descriptors left"
    return Injection("descriptors-1024", what, expect, tamper={rank: {"of_1024": spare}})


@fault("memory-at-setup", "a rank gets hardly any more memory while its groups are made (RLIMIT_AS)", at_setup=True)
def memory_at_setup(scene: Scene, choice: random.Random) -> Injection | None:
    """Where that is not enough: SystemError or MemoryError on it, which all others hear of."""
    rank = choice.choice(scene.free_ranks())
    spare = int(2 ** choice.uniform(12, 24))
    what = f"rank {rank} on {scene.nodes[rank]} may map {spare} more bytes while its groups are made"
    return Injection("memory-at-setup", what, _short_of_memory(rank), tamper={rank: {"memory": spare}})


@fault("memory", "a rank gets hardly any more memory (RLIMIT_AS)")
def memory(scene: Scene, choice: random.Random) -> Injection | None:
    """As memory-at-setup, while operations run."""
    rank = _victim(scene, choice)
    if rank is None:
        return None
    spare = int(2 ** choice.uniform(12, 20))
    what = f"rank {rank} on {scene.nodes[rank]} may map {spare} more bytes"
    key = f"memory/{rank}"
    return Injection("memory", what, _short_of_memory(rank), act=lambda: scene.store.set(key, str(spare).encode()))


def _short_of_memory(rank: int) -> Expectation:
    return Expectation(None, frozenset({"SystemError", "MemoryError"}), lambda reporter, culprit: culprit == rank)


@fault("killed-at-setup", "a rank is killed on its n-th system call of the set-up, or later", at_setup=True)
def killed_at_setup(scene: Scene, choice: random.Random) -> Injection | None:
    """As kill, wherever it was. None where no rank counts its calls."""
    ranks = [rank for rank in scene.free_ranks() if rank in scene.faulty_calls]
    if not ranks:
        return None
    rank, call = choice.choice(ranks), _call_number(choice)
    what = f"rank {rank} on {scene.nodes[rank]} is killed on call {call} from its set-up on"
    expect = about(frozenset({rank}), at_setup=True)
    ended = frozenset({rank})
    heal = scene.faulty_calls[rank].set
    return Injection("killed-at-setup", what, expect, tamper={rank: {"killed_on": call}}, heal=heal, ended=ended)


@fault("killed-at-call", "a rank is killed on the n-th system call from a moment on")
def killed_at_call(scene: Scene, choice: random.Random) -> Injection | None:
    """As kill. None where no rank counts its calls."""
    ranks = [rank for rank in scene.free_ranks() if rank in scene.faulty_calls]
    if not ranks:
        return None
    rank, call = choice.choice(ranks), _call_number(choice)
    scene.taken.add(rank)
    calls = scene.faulty_calls[rank]
    what = f"rank {rank} on {scene.nodes[rank]} is killed on its {call}th call"
    ended = frozenset({rank})
    act, heal = (lambda: calls.set(killed_on=call)), calls.set
    return Injection("killed-at-call", what, about(ended), act=act, heal=heal, ended=ended)


def _call_number(choice: random.Random) -> int:
    return int(2 ** choice.uniform(0, 10))


@fault("segment-refused", "a rank's system refuses memory for a shared segment (RLIMIT_FSIZE)", at_setup=True)
def segment_refused(scene: Scene, choice: random.Random) -> Injection | None:
    """SystemError naming the rank: of a pair on one host the lower rank makes the segment."""
    makers = sorted(
        {
            rank
            for group in scene.groups()
            for rank in group.ranks
            if any(
                scene.nodes[other] == scene.nodes[rank] and group.ranks.index(other) > group.ranks.index(rank)
                for other in group.ranks
            )
        }
    )
    if not makers:
        return None
    rank = choice.choice(makers)
    expect = about(frozenset({rank}), frozenset({"SystemError"}), at_setup=True)
    what = f"rank {rank} on {scene.nodes[rank]} may not make a shared segment"
    return Injection("segment-refused", what, expect, tamper={rank: {"file_size": True}})


@fault("full-shm", "/dev/shm of all ranks of a node is a full disk", at_setup=True)
def full_shm(scene: Scene, choice: random.Random) -> Injection | None:
    """Segments have no name and lie in memory, not there: nothing may happen."""
    node = choice.choice(scene.free_nodes())
    tamper: dict[int, dict[str, object]] = {rank: {"full_shm": True} for rank in scene.ranks_on(node)}
    return Injection("full-shm", f"/dev/shm on {node} is full", SURVIVED, tamper=tamper, hold_s=1.0)


@fault("old-version", "a rank speaks the protocol version before", at_setup=True)
def old_version(scene: Scene, choice: random.Random) -> Injection | None:
    """ProtocolError on every rank, naming the one."""
    rank = choice.choice(scene.free_ranks())
    expect = about(frozenset({rank}), frozenset({"ProtocolError"}), at_setup=True)
    what = f"rank {rank} on {scene.nodes[rank]} speaks the version before"
    return Injection("old-version", what, expect, tamper={rank: {"old_version": True}})


@fault("rewritten-record", "the store changes a field of a rank's record while the groups are made", at_setup=True)
def rewritten_record(scene: Scene, choice: random.Random) -> Injection | None:
    """ProtocolError on every rank, naming the one whose record it is, and the field."""
    rank, field = choice.choice(scene.free_ranks()), choice.randrange(_RECORD_FIELDS)
    expect = replace(about(frozenset({rank}), frozenset({"ProtocolError"}), at_setup=True), says="the field '")
    what = f"the store changes field {field} of what rank {rank} on {scene.nodes[rank]} writes"
    return Injection("rewritten-record", what, expect, tamper={rank: {"rewritten": field}})


@fault(
    "half-open",
    "a node is cut off and its ranks end unheard: their connections stay open on the others",
    takes_paths=True,
)
def half_open(scene: Scene, choice: random.Random) -> Injection | None:
    """As when a machine loses power. Then the node comes back without the ranks."""
    nodes = [node for node in scene.free_nodes() if node != scene.nodes[scene.kept]]
    if not nodes:
        return None
    node = choice.choice(nodes)
    ranks = scene.ranks_on(node)
    scene.taken |= {node, *ranks}
    nics = [nic.name for nic in scene.session.spec.node(node).nics]
    comes_back = choice.random() < 0.5
    wait_s = choice.uniform(0.2, 1.0)

    def set_links(up: bool) -> None:
        for nic in nics:
            scene.session.set_link(node, nic, up=up)

    def act() -> None:
        set_links(up=False)
        for rank in ranks:
            scene.kill(rank)
        if comes_back:
            time.sleep(wait_s)
            set_links(up=True)

    what = f"node {node} is cut off with its ranks {', '.join(map(str, sorted(ranks)))}, which end"
    what += f"; it comes back after {wait_s:.1f} s without them" if comes_back else ""
    return Injection("half-open", what, about(ranks, LOST), act=act, heal=lambda: set_links(up=True), ended=ranks)


def _victim(scene: Scene, choice: random.Random, but: int | None = None) -> int | None:
    ranks = [rank for rank in scene.free_ranks() if rank != but]
    if not ranks:
        return None
    rank = choice.choice(ranks)
    scene.taken.add(rank)
    return rank
