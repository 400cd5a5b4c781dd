"""Measures a case on all peers: agreed iteration counts, interleaved rounds, ratios, correctness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from holmes.tools.bench.control import Control, Samples
from holmes.tools.bench.measurement import Measurement
from holmes.tools.bench.operations import Case
from holmes.tools.bench.peer import AnyPeer, Peer, SelfTimedPeer
from holmes.tools.bench.settings import Settings
from holmes.tools.bench.timing import RoundTimes, time_calls, time_round

# The warm-up ends when it took this share of a round: first calls are several times slower than the rest, and rounds
# planned from them alone too short.
_WARMUP_SHARE = 0.1


@dataclass
class _Running:
    """One peer's state while a case is measured."""

    peer: AnyPeer
    time_call: Callable[[int], float]  # of so many calls the median, on this rank
    time_round: Callable[[int], RoundTimes]  # of so many calls: the slowest's times, everyone's CPU time
    wrong_elements: int | None  # None: nothing was checked
    calls: int = 0  # in each round
    rounds: list[RoundTimes] = field(default_factory=list)

    def round_times_s(self) -> Samples:
        return np.array([np.median(each.parts_s) for each in self.rounds])


def _start(peer: AnyPeer, case: Case, control: Control) -> _Running:
    if isinstance(peer, Peer):
        call, wrong = _first_call(peer, case, control)
        return _Running(
            peer,
            lambda calls: float(np.median(time_calls(call, calls))),
            lambda calls: _time_round(call, calls, control),
            wrong,
        )
    assert isinstance(peer, SelfTimedPeer)
    return _Running(
        peer,
        lambda calls: float(np.median(peer.time_round(case, calls).parts_s)),
        lambda calls: peer.time_round(case, calls),
        None,
    )


def _first_call(peer: Peer, case: Case, control: Control) -> tuple[Callable[[], None], int]:
    """Returns the peer's call on buffers of zeros, and the wrong elements of its first call, on real values."""
    source, output = case.make_buffers()
    call = peer.prepare(case, source, output)
    control.barrier()
    call()
    wrong = int(control.gather(np.array([float(case.wrong_elements(output))])).sum())
    # Zeros stay zeros: repeated reductions in place would else overflow.
    source.fill(0)
    return call, wrong


def _agree_calls(running: _Running, control: Control, settings: Settings) -> int:
    """Returns the calls of one round, the same on all ranks: what fits the time by the last part of the warm-up."""
    round_s = settings.seconds / settings.rounds
    least, most = running.peer.least_calls, running.peer.most_calls
    calls = settings.warmup
    while True:
        slowest = control.maximum(np.array([running.time_call(calls)]))
        call_s = max(float(slowest[0]), 1e-9)
        if calls * call_s >= _WARMUP_SHARE * round_s or calls >= most:
            return int(min(max(round_s / call_s, least), most))
        calls = min(max(calls, int(_WARMUP_SHARE * round_s / call_s)) * 2, most)


def _time_round(call: Callable[[], None], calls: int, control: Control) -> RoundTimes:
    control.barrier()
    own = time_round(call, calls)
    every = control.gather(np.concatenate([own.parts_s, own.singles_s, [own.cpu_s, own.machine_s, own.wall_s]]))
    slowest, parts = every.max(axis=0), len(own.parts_s)
    cpu_s, machine_s, wall_s = float(every[:, -3].sum()), float(every[0, -2]), float(slowest[-1])
    return RoundTimes(slowest[:parts], slowest[parts:-3], cpu_s, machine_s, wall_s)


def _on_one_machine(control: Control) -> bool:
    """Collective. Whether all ranks run under one kernel."""
    boot = int(Path("/proc/sys/kernel/random/boot_id").read_text()[:8], 16)
    return len(np.unique(control.gather(np.array([float(boot)])))) == 1


def measure(
    case: Case, peers: Sequence[AnyPeer], control: Control, settings: Settings, references: Sequence[str] = ()
) -> list[Measurement]:
    """Collective. Measures `case` on every peer in turns (A B A B ...); checks the first call of each that calls it.

    `references` names the peers that the others' ratios refer to; ratios compare rounds that ran next to each other.
    """
    running = [_start(peer, case, control) for peer in peers if peer.unsupported(case) is None]
    one_machine = _on_one_machine(control)
    for each in running:
        each.calls = _agree_calls(each, control, settings)
    for _ in range(settings.rounds):
        for each in running:
            each.rounds.append(each.time_round(each.calls))
    times = {each.peer.name: each.round_times_s() for each in running}
    return [
        Measurement(
            peer=name,
            case=case,
            round_times_s=tuple(map(float, times[name])),
            singles_s=np.concatenate([part.singles_s for part in each.rounds]),
            calls=each.calls * settings.rounds,
            cpu_s=sum(part.cpu_s for part in each.rounds),
            machine_s=sum(part.machine_s for part in each.rounds) if one_machine else None,
            wall_s=sum(part.wall_s for part in each.rounds),
            wrong_elements=each.wrong_elements,
            ratios={
                reference: float(np.median(times[reference] / times[name]))
                for reference in references
                if reference in times and reference != name
            },
        )
        for each in running
        for name in [each.peer.name]
    ]
