"""Who reaches whom by verbs: ports without an IP address, which no socket can try."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from holmes.cluster.probe.exchange import Exchange
from holmes_comm import _C
from holmes_comm.errors import HolmesError


class Trial(NamedTuple):
    """Rank `asker`, through its RDMA port `asker_port`, tries the port `target_port` of rank `target`."""

    asker: int
    asker_port: str
    target: int
    target_port: str


class Prober:
    """Opens this rank's ports when they are first tried, until it is dropped. Not thread-safe."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._ports: dict[str, Any] = {}  # None: cannot be opened

    def ready(self, trials: Mapping[tuple[int, ...], Trial]) -> dict[tuple[int, ...], Callable[[float], bool]]:
        """Collective; `trials`, by any keys, are equal on all ranks. What tries those of which this rank is the asker.

        Called with seconds, each says whether the target was reached; all must be done before the next collective call
        of any rank ends, as the targets' ends live as long as what is returned. Where an end cannot be made, nobody
        reaches it.
        """
        rank = self._exchange.rank
        return {key: partial(_reaches, probe, trials[key].asker == rank) for key, probe in self.ends(trials).items()}

    def ends(self, trials: Mapping[tuple[int, ...], Trial], ring_bytes: int = 4096) -> dict[tuple[int, ...], Any]:
        """Collective, as `ready`. This rank's ends of those trials that have both, connected."""
        rank = self._exchange.rank
        probes = {}
        for key, trial in trials.items():
            if rank in (trial.asker, trial.target):
                probes[key] = self._probe(trial.asker_port if rank == trial.asker else trial.target_port, ring_bytes)
        mine = [[list(key), probe.endpoint.hex()] for key, probe in probes.items() if probe is not None]
        gathered = self._exchange.all_gather(mine)
        theirs = [{tuple(key): bytes.fromhex(endpoint) for key, endpoint in ends} for ends in gathered]
        connected = {}
        for key, probe in probes.items():
            trial = trials[key]
            peer = theirs[trial.target if rank == trial.asker else trial.asker].get(key)
            if probe is not None and peer is not None and _connects(probe, peer):
                connected[key] = probe
        self._exchange.all_gather(None)  # all ends are connected
        return connected

    def _probe(self, port: str, ring_bytes: int) -> Any:
        try:
            if port not in self._ports:
                self._ports[port] = _C.RdmaPort(port)
            return _C.RdmaProbe(self._ports[port], ring_bytes)
        except HolmesError:  # peers will find out
            self._ports.setdefault(port, None)
            return None


def verbs_ports(nics: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Local. Of discovered NICs (as dicts) the RDMA ports that are active and that a communicator could use, one entry
    each."""
    found: dict[str, Mapping[str, Any]] = {}
    for nic in nics:
        if nic["hca"] and nic["is_up"] and nic["gids"] and nic["kind"] != "vlan":
            found.setdefault(port_name(nic), nic)
    return [nic for name, nic in found.items() if _opens(name)]


def port_name(nic: Mapping[str, Any]) -> str:
    """The name of a NIC's RDMA port: "mlx5_0:1"."""
    return f"{nic['hca']}:{nic['port'] or 1}"


def _opens(port: str) -> bool:
    try:
        _C.RdmaPort(port).check_room()
    except HolmesError:
        return False
    return True


def _connects(probe: Any, peer: bytes) -> bool:
    try:
        probe.connect(peer)
    except HolmesError:
        return False
    return True


def _reaches(probe: Any, asks: bool, timeout_s: float) -> bool:
    return asks and bool(probe.reaches(timeout_s))
