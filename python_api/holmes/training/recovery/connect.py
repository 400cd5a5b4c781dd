"""Connect: a client of the job's store, by its address: the embedded one (torch's TCPStore) or etcd 3."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from datetime import timedelta

import torch.distributed as dist

from holmes.training.recovery.errors import StoreLostError
from holmes.training.recovery.etcd import EtcdAddress, EtcdStore, is_etcd
from holmes.training.recovery.store import parse_host_port


def connect_store(address: str, job: str, connect_timeout_s: float, timeout_s: float) -> tuple[dist.Store, str]:
    """A store each of whose calls takes at most `timeout_s`, and its address for messages.

    `address`: "host:port" of `holmes store`, or "etcd://[user:password@]host:port,host:port,..." of an etcd's members,
    "etcds://..." over TLS. `job`: whose keys belong together. Raises StoreLostError where nothing answers within
    `connect_timeout_s`, UsageError where the address or the login is wrong.
    """
    if not is_etcd(address):
        return _connect_embedded(address, connect_timeout_s, timeout_s), address
    members = EtcdAddress.parse(address)
    try:
        return EtcdStore(members, job, connect_timeout_s, timeout_s), str(members)
    except dist.DistError as error:
        raise StoreLostError(f"no store at {members}: {error}") from error


def _connect_embedded(address: str, connect_timeout_s: float, timeout_s: float) -> dist.Store:
    host, port = parse_host_port(address)
    before = _descriptors()
    try:
        store = dist.TCPStore(
            host, port, is_master=False, timeout=timedelta(seconds=connect_timeout_s), wait_for_workers=False
        )
    except (RuntimeError, OSError) as error:
        raise StoreLostError(
            f"no store answers at {address} within {connect_timeout_s:g} s: {error}; start one there with `holmes "
            f"store --port {port} --listen {host}`, on a host that outlives the job's, and check that no "
            "firewall is between"
        ) from error
    store.set_timeout(timedelta(seconds=timeout_s))
    opened = _descriptors() - before
    if not any([_limit_waits(descriptor, port, timeout_s) for descriptor, _ in opened]):
        raise StoreLostError(f"no connection to the store at {address} among the descriptors that it opened")
    return store


def _descriptors() -> set[tuple[int, str]]:
    """This process's open descriptors and what each is; a socket's text has its inode, so none is taken for another."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, as is the listing's own
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found


def _limit_waits(descriptor: int, port: int, timeout_s: float) -> bool:
    """Lets reads and writes end, if this is a connection to `port`: torch's client waits for an answer as long as TCP.

    Which takes a quarter of an hour where the network is cut, and forever where the server is stopped. torch neither
    gives its client's socket away nor bounds a reply (`set_timeout` is for keys that nobody has set), and process
    groups need torch's own store; so the socket is looked for among what the client opened.
    """
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.getpeername()[1] != port:
                return False
            limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                connection.setsockopt(socket.SOL_SOCKET, option, limit)
    except (OSError, IndexError):  # closed meanwhile, not connected, or to no port
        return False
    return True
