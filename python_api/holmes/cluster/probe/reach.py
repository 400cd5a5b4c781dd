"""Who reaches whom: the hosts try the connections that make an assumed fabric a real one."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from holmes.cluster.probe.exchange import Exchange
from holmes.cluster.probe.verbs import Prober, Trial
from holmes.cluster.topology import Fabric, Host, is_verbs_only, make_fabric
from holmes.cluster.topology.fabrics import components

_TARGETS = 4  # hosts that all others of a fabric try to reach in one round
_ROUNDS = 4  # after which hosts that reached nobody count as alone
_PARALLEL = 128  # connection attempts of one host at once: four for each of its subnets, mostly


def confirm_fabrics(
    exchange: Exchange, hosts: Sequence[Host], fabrics: Sequence[Fabric], timeout_s: float
) -> tuple[Fabric, ...]:
    """Collective. The parts of the assumed fabrics whose hosts really reach each other; parts of one host are dropped.

    One rank of each host answers on all of its NICs, where they have no IP address by its HCA. In each round the first
    hosts of a fabric are the targets of all its others, each from its own NIC's address; those that reach none of them
    (same subnet, other wire) form the next round. Takes at most four times `timeout_s`, and O(hosts) connections.
    """
    by_id = {host.host_id: host for host in hosts}
    me = next(host for host in hosts if exchange.rank in host.ranks)
    leads = exchange.rank == me.ranks[0]
    confirmed = []
    with contextlib.ExitStack() as stack:
        responder = stack.enter_context(Responder([port.address for port in me.ports])) if leads else None
        answers = exchange.all_gather([responder.token, responder.ports] if responder else None)
        waiting = [(fabric, list(fabric.ports), 1) for fabric in fabrics]
        prober = Prober(exchange)
        for _round in range(_ROUNDS):
            targets: dict[tuple[int, int], _Trying] = {}
            trials = _trials(waiting, by_id)
            by_verbs = prober.ready(trials) if trials else {}
            for (index, position, asker), tries in by_verbs.items():
                if asker == exchange.rank:
                    targets[index, position] = tries
            for index, (fabric, members, _) in enumerate(waiting):
                if is_verbs_only(fabric.subnet):
                    continue
                for position, target_id in enumerate(members[:_TARGETS]):
                    target = by_id[target_id]
                    source, address = fabric.port_of(me), fabric.port_of(target)
                    # Two hosts with one address are on two wires.
                    if leads and source and address and me is not target and source.address != address.address:
                        token, ports = answers[target.ranks[0]]
                        listener = (address.address, ports.get(address.address))
                        targets[index, position] = partial(reaches, source.address, listener, token)
            reached = [set(map(tuple, found)) for found in exchange.all_gather(_reachable(targets, timeout_s))]
            following = []
            for index, (fabric, members, part) in enumerate(waiting):
                tried = members[:_TARGETS]
                edges = [
                    (host_id, target_id)
                    for host_id in members
                    for position, target_id in enumerate(tried)
                    if (index, position) in reached[by_id[host_id].ranks[0]]
                ]
                done = set(tried)
                for joined in components(members, edges):
                    if len(joined) > 1:
                        confirmed.append(_joined(fabric, part, [by_id[host_id] for host_id in joined]))
                        part += 1
                        done.update(joined)
                rest = [host_id for host_id in members if host_id not in done]
                if len(rest) > 1:
                    following.append((fabric, rest, part))
            waiting = following
            if not waiting:
                break
    return tuple(confirmed)


class Responder:
    """Answers every connection to the given local addresses with a random token. Runs a thread until closed.

    On each address it listens on the first of `ports` that is free; 0: the kernel chooses.
    """

    def __init__(self, addresses: Sequence[str], ports: Iterable[int] = (0,)) -> None:
        self.token = secrets.token_hex(8)
        self.ports: dict[str, int] = {}  # address -> TCP port
        self._selector = selectors.DefaultSelector()
        for address in dict.fromkeys(addresses):
            # An address that cannot be bound is not reachable: peers will find out.
            if (listener := _listen(address, ports)) is not None:
                listener.setblocking(False)
                self._selector.register(listener, selectors.EVENT_READ)
                self.ports[address] = listener.getsockname()[1]
        self._closing, self._close = socket.socketpair()
        self._selector.register(self._closing, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="holmes-probe", daemon=True)

    def __enter__(self) -> Responder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._close.close()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._closing:
                    return
                with contextlib.suppress(OSError):
                    connection, _ = key.fileobj.accept()  # type: ignore[union-attr]
                    with connection:
                        connection.sendall(self.token.encode())


def _listen(address: str, ports: Iterable[int]) -> socket.socket | None:
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server((address, port), family=family(address), backlog=128)
    return None


def ask_token(source: str, address: str, port: int, token: str, timeout_s: float) -> tuple[str, float | None]:
    """Local. Connects from address `source` to a Responder: what came of it, and how long the connection took in s.

    "ok": the host that has `token` answered; "other host": another one; "silent": nobody within `timeout_s`; "refused";
    "unroutable".
    """
    start_s = time.monotonic()
    try:
        with socket.create_connection((address, port), timeout_s, source_address=(source, 0)) as connection:
            round_trip_s = time.monotonic() - start_s
            received = b""
            while len(received) < len(token) and (chunk := connection.recv(len(token))):
                received += chunk
            return ("ok" if received == token.encode() else "other host"), round_trip_s
    except TimeoutError:
        return "silent", None
    except OSError as error:
        return ("refused" if error.errno in (errno.ECONNREFUSED, errno.ECONNRESET) else "unroutable"), None


def reaches(source: str, target: tuple[str, int | None], token: str, timeout_s: float) -> bool:
    """Local. True when a connection from address `source` to `target` is answered by the host that has `token`."""
    address, port = target
    return port is not None and ask_token(source, address, port, token, timeout_s)[0] == "ok"


def family(address: str) -> socket.AddressFamily:
    """The socket family of an address."""
    return socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET


def _joined(fabric: Fabric, part: int, hosts: Sequence[Host]) -> Fabric:
    name = fabric.name if part == 1 else f"{fabric.name} ({part})"
    ports = {host.host_id: port for host in hosts if (port := fabric.port_of(host)) is not None}
    return make_fabric(name, fabric.nic_class, fabric.subnet, ports, confirmed=True)


def _trials(
    waiting: Sequence[tuple[Fabric, Sequence[str], int]], hosts: Mapping[str, Host]
) -> dict[tuple[int, ...], Trial]:
    """What is tried by verbs in a round: by fabric's and target's place and the rank that asks."""
    trials: dict[tuple[int, ...], Trial] = {}
    for index, (fabric, members, _) in enumerate(waiting):
        if not is_verbs_only(fabric.subnet):
            continue
        for position, target_id in enumerate(members[:_TARGETS]):
            for host_id in members:
                if host_id != target_id:
                    asker, target = hosts[host_id].ranks[0], hosts[target_id].ranks[0]
                    trial = Trial(asker, fabric.ports[host_id], target, fabric.ports[target_id])
                    trials[index, position, asker] = trial
    return trials


_Trying = Callable[[float], bool]  # with seconds: whether it is reached


def _reachable(targets: Mapping[tuple[int, int], _Trying], timeout_s: float) -> list[tuple[int, int]]:
    if not targets:
        return []
    with ThreadPoolExecutor(max_workers=min(len(targets), _PARALLEL)) as pool:
        results = pool.map(lambda tries: tries(timeout_s), targets.values())
        return [key for key, reached in zip(targets, results, strict=True) if reached]
