"""Probe: the ranks exchange their inventories through a store and try which assumed fabrics really connect."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from holmes.topology import (
    Fabric,
    Host,
    NodeInventory,
    Port,
    Topology,
    candidate_fabrics,
    make_fabric,
    make_topology,
    merge_hosts,
)


class KeyValueStore(Protocol):
    """What a rendezvous must do; every torch.distributed Store does. `get` waits until the key is set."""

    def set(self, key: str, value: str, /) -> None:
        """Sets a key."""

    def get(self, key: str, /) -> bytes:
        """The value of a key, waiting for it."""


class Exchange:
    """All-gather of JSON values through a store, in O(ranks) keys. Not thread-safe; `name` is unique in the store."""

    def __init__(self, store: KeyValueStore, rank: int, size: int, name: str) -> None:
        self.rank = rank
        self._store = store
        self._size = size
        self._name = name
        self._round = 0

    def all_gather(self, value: Any) -> list[Any]:
        """Collective. The values of all ranks, by rank. Blocks as long as the store's own timeout allows."""
        prefix = f"{self._name}/{self._round}"
        self._round += 1
        self._store.set(f"{prefix}/{self.rank}", json.dumps(value))
        if self.rank == 0:
            values = [json.loads(self._store.get(f"{prefix}/{rank}")) for rank in range(self._size)]
            self._store.set(f"{prefix}/all", json.dumps(values))
        gathered: list[Any] = json.loads(self._store.get(f"{prefix}/all"))
        return gathered


def local_inventory(rank: int) -> NodeInventory:
    """Local. This host's NICs that are up and have an address, as `holmes_comm` discovers them."""
    from holmes_comm import discover_nics

    ports = usable_ports([nic.to_dict() for nic in discover_nics()])
    return NodeInventory(rank, socket.gethostname(), host_identity(), ports)


def host_identity() -> str:
    """Tells hosts apart, and also containers and network namespaces of one host: they share no loopback."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot_id[:8]}/{os.stat('/proc/self/ns/net').st_ino}"


def discover_topology(store: KeyValueStore, rank: int, size: int, name: str, timeout_s: float = 3.0) -> Topology:
    """Collective over `size` ranks: their inventories, merged, with every fabric confirmed by connections.

    `name` must be new in the store; `timeout_s` bounds one connection attempt. Equal result on all ranks.
    """
    exchange = Exchange(store, rank, size, name)
    mine = local_inventory(rank)
    entries = exchange.all_gather([mine.host, mine.host_id, [vars(port) for port in mine.ports]])
    inventories = [
        NodeInventory(r, host, host_id, tuple(Port(**port) for port in ports))
        for r, (host, host_id, ports) in enumerate(entries)
    ]
    hosts = merge_hosts(inventories)
    return make_topology(hosts, confirm_fabrics(exchange, hosts, candidate_fabrics(hosts), timeout_s))


def confirm_fabrics(
    exchange: Exchange, hosts: Sequence[Host], fabrics: Sequence[Fabric], timeout_s: float
) -> tuple[Fabric, ...]:
    """Collective. The parts of the assumed fabrics whose hosts really reach each other; parts of one host are dropped.

    One rank of each host answers on all of its NICs. In each round the first host of a fabric is the target of all its
    others, each from its own NIC's address; those that do not reach it (same subnet, other wire) form the next round.
    """
    by_id = {host.host_id: host for host in hosts}
    me = next(host for host in hosts if exchange.rank in host.ranks)
    leads = exchange.rank == me.ranks[0]
    confirmed = []
    with contextlib.ExitStack() as stack:
        responder = stack.enter_context(Responder([port.address for port in me.ports])) if leads else None
        answers = exchange.all_gather([responder.token, responder.doors] if responder else None)
        waiting = [(fabric, list(fabric.ports), 1) for fabric in fabrics]
        while waiting:
            targets = {}
            for index, (fabric, members, _) in enumerate(waiting):
                if leads and me.host_id in members[1:]:
                    target = by_id[members[0]]
                    token, doors = answers[target.ranks[0]]
                    source, address = _port(me, fabric).address, _port(target, fabric).address
                    if source != address:  # two hosts with one address are on two wires
                        targets[index] = (source, (address, doors.get(address)), token)
            reached = exchange.all_gather(_reachable(targets, timeout_s))
            following = []
            for index, (fabric, members, part) in enumerate(waiting):
                joined = members[:1] + [m for m in members[1:] if index in reached[by_id[m].ranks[0]]]
                if len(joined) > 1:
                    name = fabric.name if part == 1 else f"{fabric.name} ({part})"
                    ports = {host_id: _port(by_id[host_id], fabric) for host_id in joined}
                    confirmed.append(make_fabric(name, fabric.nic_class, fabric.subnet, ports, confirmed=True))
                rest = [host_id for host_id in members if host_id not in joined]
                if len(rest) > 1:
                    following.append((fabric, rest, part + 1))
            waiting = following
    return tuple(confirmed)


class Responder:
    """Answers every connection to the given local addresses with a random token. Runs a thread until closed."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.token = secrets.token_hex(8)
        self.doors: dict[str, int] = {}  # address -> TCP port
        self._selector = selectors.DefaultSelector()
        for address in dict.fromkeys(addresses):
            with contextlib.suppress(OSError):  # an address that cannot be bound is not reachable: peers will find out
                listener = socket.create_server((address, 0), family=_family(address), backlog=128)
                listener.setblocking(False)
                self._selector.register(listener, selectors.EVENT_READ)
                self.doors[address] = listener.getsockname()[1]
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


def reaches(source: str, target: tuple[str, int | None], token: str, timeout_s: float) -> bool:
    """Local. True when a connection from address `source` to `target` is answered by the host that has `token`."""
    address, port = target
    if port is None:
        return False
    try:
        with socket.create_connection((address, port), timeout_s, source_address=(source, 0)) as connection:
            received = b""
            while len(received) < len(token) and (chunk := connection.recv(len(token))):
                received += chunk
            return received == token.encode()
    except OSError:
        return False


def usable_ports(nics: Sequence[dict[str, Any]]) -> tuple[Port, ...]:
    """Of discovered NICs (as dicts) those that are up with an address that is not link-local; the first such counts."""
    ports = []
    for nic in nics:
        if nic["nic_class"] == "loopback" or not nic["is_netdev_up"]:
            continue
        routable = [text for text in nic["addresses"] if not ipaddress.ip_interface(text).is_link_local]
        if routable:
            address = ipaddress.ip_interface(routable[0])
            place = (nic["name"], nic["nic_class"], str(address.ip), str(address.network))
            ports.append(Port(*place, nic["speed_gbps"], nic["has_gateway"]))
    return tuple(ports)


def _reachable(targets: dict[int, tuple[str, tuple[str, int | None], str]], timeout_s: float) -> list[int]:
    if not targets:
        return []
    with ThreadPoolExecutor(max_workers=min(len(targets), 32)) as pool:
        results = pool.map(lambda t: reaches(t[0], t[1], t[2], timeout_s), targets.values())
        return [index for index, reached in zip(targets, results, strict=True) if reached]


def _port(host: Host, fabric: Fabric) -> Port:
    return next(port for port in host.ports if port.name == fabric.ports[host.host_id])


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
