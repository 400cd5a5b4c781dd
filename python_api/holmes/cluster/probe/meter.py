"""Measures rounds of pairs: one rank of each host streams to and from one other host at a time."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence
from typing import Any

from holmes.cluster.probe.exchange import Exchange
from holmes.cluster.probe.stream import Listener, Window, dial, measure_admitted, measure_dialled, own_limit_gbps
from holmes.cluster.probe.verbs import Prober, Trial
from holmes.cluster.probe.verbs_stream import measure
from holmes.cluster.topology import Fabric, Host, is_verbs_only
from holmes.cluster.topology.measured import PairRate

#: A fabric and the ids of the hosts that measure it; the first one connects.
Meeting = tuple[Fabric, str, str]
_HOST_SHARE = 0.5  # of what a host streams to itself: beyond it, the host bounds a measurement
_RING_BYTES = 1 << 16  # of a write by verbs; both rings of a pair of hosts are locked for each round
_OVERHEAD_S = 0.05  # of a pair: connections and round trips


def slot_s(window: Window) -> float:
    """How long a round takes: both directions, one after the other."""
    return 2 * (window.warm_s + window.count_s) + _OVERHEAD_S


class Meter:
    """Collective: every rank enters, measures and leaves together; the lowest rank of each host does the work.

    Opens a port on every NIC of the host between enter and exit. Not thread-safe.
    """

    def __init__(self, exchange: Exchange, hosts: Sequence[Host], window: Window, timeout_s: float) -> None:
        """`timeout_s` bounds how long a host waits for its partner of a round."""
        self._exchange = exchange
        self._hosts = {host.host_id: host for host in hosts}
        self._window = window
        self._timeout_s = timeout_s
        self._batch = 0
        self._me = next(host for host in hosts if exchange.rank in host.ranks)
        self._leads = exchange.rank == self._me.ranks[0]
        self._listeners: dict[str, Listener] = {}
        self._prober = Prober(exchange)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Meter:
        own: list[Any] | None = None
        token = secrets.token_hex(8)
        if self._leads:
            for address in dict.fromkeys(port.address for port in self._me.ports):
                with contextlib.suppress(OSError):  # peers will find out
                    self._listeners[address] = Listener(address, token)
                    self._stack.callback(self._listeners[address].close)
        self._exchange.all_gather(None)  # all hosts try themselves at the same time, as their processors may be shared
        if self._leads:
            own = [
                token,
                {address: listener.port for address, listener in self._listeners.items()},
                own_limit_gbps(self._window),
            ]
        self._answers = self._exchange.all_gather(own)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, rounds: Sequence[Sequence[Meeting]]) -> list[list[PairRate]]:
        """Collective. The measured pairs of each round; a pair that failed or came too late is missing.

        Takes `slot_s` a round and, where partners do not come, at most twice that and the time-out.
        """
        self._batch += 1
        trials: dict[tuple[int, ...], Trial] = {
            (number, place): Trial(self._lead(one), fabric.ports[one], self._lead(other), fabric.ports[other])
            for number, meetings in enumerate(rounds)
            for place, (fabric, one, other) in enumerate(meetings)
            if is_verbs_only(fabric.subnet)
        }
        ends = self._prober.ends(trials, _RING_BYTES) if trials else {}
        start_s = time.monotonic()
        mine: list[list[Any]] = []
        for number, meetings in enumerate(rounds):
            for place, (fabric, one, other) in enumerate(meetings if self._leads else ()):
                if self._me.host_id in (one, other):
                    # A partner that was itself kept waiting comes late, so all have one time-out in common.
                    deadline_s = start_s + 2 * (number + 1) * slot_s(self._window) + self._timeout_s
                    with contextlib.suppress(OSError):
                        if (number, place) in trials:
                            found = self._meet_by_verbs(ends.get((number, place)), one, deadline_s)
                        else:
                            found = self._meet(fabric, one, other, f"{self._batch}/{number}/{place}", deadline_s)
                        mine.append([number, place, *found])
        gathered = self._exchange.all_gather(mine)
        reports: dict[tuple[int, int], list[tuple[float, float | None]]] = {}
        for lead in gathered:
            for number, place, gbps, latency_s in lead:
                reports.setdefault((number, place), []).append((gbps, latency_s))
        return [
            [
                self._pair(meeting, reports[number, place])
                for place, meeting in enumerate(meetings)
                if len(reports.get((number, place), ())) == 2
            ]
            for number, meetings in enumerate(rounds)
        ]

    def _meet(self, fabric: Fabric, one: str, other: str, name: str, deadline_s: float) -> tuple[float, float | None]:
        mine = fabric.port_of(self._me)
        if mine is None:
            raise ConnectionError(f"no NIC in {fabric.name}")
        if self._me.host_id == one:
            peer = self._hosts[other]
            port = fabric.port_of(peer)
            token, ports, _ = self._answers[peer.ranks[0]]
            if port is None or port.address not in ports:
                raise ConnectionError(f"host {peer.name} does not listen in {fabric.name}")
            target = (port.address, ports[port.address])
            return measure_dialled(dial(mine.address, target, token, name, deadline_s), self._window, deadline_s)
        if mine.address not in self._listeners:
            raise ConnectionError(f"cannot listen at {mine.address}")
        connections = self._listeners[mine.address].admit(name, deadline_s)
        return measure_admitted(connections, self._window, deadline_s), None

    def _meet_by_verbs(self, end: Any, one: str, deadline_s: float) -> tuple[float, float | None]:
        left_s = deadline_s - time.monotonic()
        if end is None or left_s <= 0:
            raise ConnectionError("no queue pair, or too late")
        return measure(end, self._me.host_id == one, self._window, left_s)

    def _lead(self, host_id: str) -> int:
        return self._hosts[host_id].ranks[0]

    def _pair(self, meeting: Meeting, reports: Sequence[tuple[float, float | None]]) -> PairRate:
        fabric, one, other = meeting
        gbps = min(rate for rate, _ in reports)
        latency_s = next(value for _, value in reports if value is not None)
        limits = [self._answers[self._lead(host_id)][2] for host_id in (one, other)]
        limited = all(limit is not None for limit in limits) and gbps >= _HOST_SHARE * min(limits)
        limited &= not is_verbs_only(fabric.subnet)  # the limit is of sockets
        return PairRate(((one, fabric.ports[one]), (other, fabric.ports[other])), gbps, latency_s, limited)
