"""Connect: a client of the job's store, by its address: the embedded one (`holmes store`) or etcd 3."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from holmes.training.recovery.errors import StoreContentError, StoreLostError
from holmes.training.recovery.etcd import EtcdAddress, EtcdStore, is_etcd
from holmes.training.recovery.store import AskingStore, parse_host_port
from holmes_comm import TcpStore
from holmes_comm.errors import UnreachableError, UsageError

T = TypeVar("T")


def connect_store(address: str, job: str, connect_timeout_s: float, timeout_s: float) -> tuple[dist.Store, str]:
    """A store each of whose calls takes at most `timeout_s`, and its address for messages.

    `address`: "host:port" of `holmes store`, or "etcd://[user:password@]host:port,host:port,..." of an etcd's members,
    "etcds://..." over TLS. `job`: whose keys belong together. Raises StoreLostError where nothing answers within
    `connect_timeout_s`, UsageError where the address or the login is wrong, ProtocolError where the store and this
    process have different secrets.
    """
    if not is_etcd(address):
        return EmbeddedStore(address, connect_timeout_s, timeout_s), address
    members = EtcdAddress.parse(address)
    try:
        return EtcdStore(members, job, connect_timeout_s, timeout_s), str(members)
    except dist.DistError as error:
        raise StoreLostError(f"no store at {members}: {error}") from error


class EmbeddedStore(AskingStore):
    """torch's store interface on a TcpStore. Thread safe. Each request takes at most `timeout_s`.

    Raises dist.DistNetworkError where it does not answer, and from then on: one that was started again in its place
    knows nothing of what this one was told.
    """

    def __init__(self, address: str, connect_timeout_s: float, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.address = address
        host, port = parse_host_port(address)
        try:
            self._store = TcpStore(host, port, timeout_s=connect_timeout_s, reply_timeout_s=timeout_s)
        except UnreachableError as error:
            raise StoreLostError(
                f"no store answers at {address} within {connect_timeout_s:g} s: {error}; start one there with `holmes "
                f"store --port {port} --listen {host}`, on a host that outlives the job's, and check that no "
                "firewall is between"
            ) from error
        self._one_at_a_time = threading.Lock()  # on one connection: another might be to another store
        self._lost: UnreachableError | None = None

    def set(self, key: str, value: str | bytes) -> None:
        """As dist.Store."""
        self._call(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """As dist.Store."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """As dist.Store."""
        names = list(keys)
        try:
            return self._call(lambda: self._store.multi_get(names, timeout_s=0))
        except TimeoutError:  # one is not there yet
            self.wait(names)
        return self._call(lambda: self._store.multi_get(names, timeout_s=0))

    def check(self, keys: Sequence[str]) -> bool:
        """As dist.Store."""
        return self._call(lambda: self._store.check(list(keys)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """As dist.Store: an empty `expected` stands for a key that nobody has set, too."""
        return self._call(lambda: self._store.compare_set(key, expected, desired))

    def add(self, key: str, amount: int) -> int:
        """As dist.Store."""
        try:
            return self._call(lambda: self._store.add(key, amount))
        except UsageError as error:
            raise StoreContentError.of(self.address, key, self.get(key), "a whole number", error) from None

    def delete_key(self, key: str) -> bool:
        """As dist.Store."""
        return self._call(lambda: self._store.delete_key(key))

    def num_keys(self) -> int:
        """As dist.Store."""
        return self._call(self._store.num_keys)

    def _call(self, request: Callable[[], T]) -> T:
        with self._one_at_a_time:
            if self._lost is None:
                try:
                    return request()
                except UnreachableError as error:
                    self._lost = error
            raise dist.DistNetworkError(str(self._lost)) from self._lost
