"""etcd 3 as a job's store: replicated over its members, so that no single host has to outlive the job.

By etcd's JSON gateway (v3/kv, v3/lease, v3/auth), so that no client need be installed. Every read is linearizable: it
sees all that was written before it began, or fails where fewer than half of the members are left.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import json
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import unquote

import torch.distributed as dist

from holmes.training.recovery.errors import StoreContentError
from holmes.training.recovery.store import AskingStore, parse_host_port
from holmes_comm.errors import UsageError

_SCHEMES = {"etcd://": False, "etcds://": True}
_ATTEMPT_S = 1.5  # for one member to answer before the next is asked: less than half of a rank's lease
_PAUSE_S = 0.1  # after none did
#: A job's keys go when none of its processes has been there for so long.
LEASE_TTL_S = 86_400
_MOST_OPERATIONS = 128  # of one transaction, by etcd's default
# gRPC's codes, as the gateway gives them.
_INVALID_ARGUMENT, _PERMISSION_DENIED, _FAILED_PRECONDITION, _UNAUTHENTICATED = 3, 7, 9, 16
_TRY_AGAIN = {1, 2, 4, 14}  # cancelled, unknown, deadline exceeded, unavailable: no leader, or a new one


def is_etcd(address: str) -> bool:
    """Whether this is an etcd's address, not that of an embedded store."""
    return address.startswith(tuple(_SCHEMES))


@dataclass(frozen=True)
class EtcdAddress:
    """`etcd://[user:password@]host:port,host:port,...`, or `etcds://...` over TLS. As text: without the login."""

    endpoints: tuple[tuple[str, int], ...]
    user: str
    password: str
    tls: bool

    @classmethod
    def parse(cls, text: str) -> EtcdAddress:
        """Raises UsageError, which never shows the password."""
        scheme = next(scheme for scheme in _SCHEMES if text.startswith(scheme))
        login, at, hosts = text[len(scheme) :].rpartition("@")
        user, colon, password = login.partition(":")
        if at and not (user and colon and password):
            raise UsageError(
                f"the login in the store's address {scheme}...@{hosts} must be user:password, with %40 for an @ in it"
            )
        endpoints = tuple(parse_host_port(host) for host in hosts.rstrip("/").split(","))
        return cls(endpoints, unquote(user), unquote(password), _SCHEMES[scheme])

    def __str__(self) -> str:
        """For messages."""
        scheme = next(scheme for scheme, tls in _SCHEMES.items() if tls == self.tls)
        return scheme + ",".join(_shown(endpoint) for endpoint in self.endpoints)


class _GatewayError(Exception):
    """What a member answered in place of a result."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class _Timed(io.RawIOBase):
    """What comes from `connection`, as `raw` reads it, until the deadline: not so long for each byte."""

    def __init__(self, raw: io.RawIOBase, connection: socket.socket, deadline_s: float) -> None:
        self._raw, self._connection, self._deadline_s = raw, connection, deadline_s

    def readable(self) -> bool:
        """As io.RawIOBase."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """As io.RawIOBase."""
        self._connection.settimeout(_left_s(self._deadline_s))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        """As io.RawIOBase."""
        self._raw.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    """A response that must be there as a whole at the deadline."""

    def __init__(self, sock: socket.socket, *args: Any, deadline_s: float, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_Timed(self.fp.detach(), sock, deadline_s))


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


class _Gateway:
    """Requests to whichever member answers, as a whole and in time. Thread safe, one request at a time."""

    def __init__(self, address: EtcdAddress) -> None:
        self.address = address
        self._context = ssl.create_default_context() if address.tls else None
        self._lock = threading.Lock()
        self._current = secrets.randbelow(len(address.endpoints))  # not all clients at one member
        self._connection: http.client.HTTPConnection | None = None
        self._token = ""

    def call(self, path: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer of the first member that gives one. A request may have been carried out more than once.

        Raises _GatewayError where a member refuses, UsageError where it refuses the login, dist.DistNetworkError
        where none answers within `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        said: dict[str, str] = {}
        with self._lock:
            while (left_s := deadline_s - time.monotonic()) > 0:
                if len(said) == len(self.address.endpoints):
                    time.sleep(min(_PAUSE_S, left_s))
                endpoint = self.address.endpoints[self._current]
                try:
                    return self._ask(endpoint, path, body, time.monotonic() + min(_ATTEMPT_S, left_s))
                except UsageError:
                    raise
                except _GatewayError as error:
                    if error.code not in _TRY_AGAIN:
                        raise
                    said[_shown(endpoint)] = str(error)
                except (OSError, http.client.HTTPException, ValueError) as error:
                    said[_shown(endpoint)] = _reason(error, self.address.tls)
                self._disconnect()
                self._current = (self._current + 1) % len(self.address.endpoints)
        answers = (
            "; ".join(f"{where}: {what}" for where, what in sorted(said.items())) or "other requests took that long"
        )
        raise dist.DistNetworkError(
            f"no member of etcd answers within {timeout_s:g} s ({answers}); more than half of its members must run and "
            "reach each other, and this host must reach one of them"
        )

    def _ask(self, endpoint: tuple[str, int], path: str, body: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        if self.address.user and not self._token:
            self._log_in(endpoint, deadline_s)
        try:
            return self._post(endpoint, path, body, deadline_s)
        except _GatewayError as error:
            if error.code == _PERMISSION_DENIED:
                raise UsageError(
                    f"{self._login()} may not read and write the job's keys at {self.address}: {error}; grant it "
                    "the prefix holmes/ (`etcdctl role grant-permission ROLE readwrite holmes/ --prefix=true`)"
                ) from None
            if error.code == _INVALID_ARGUMENT and not self.address.user:  # "user name is empty"
                raise UsageError(
                    f"etcd at {self.address} asks for a login: {error}; give the address as etcd://user:password@host:"
                    "port,..."
                ) from None
            if error.code != _UNAUTHENTICATED or not self.address.user:
                raise
            self._log_in(endpoint, deadline_s)  # a token is good for minutes, and for what members have in memory
            return self._post(endpoint, path, body, deadline_s)

    def _login(self) -> str:
        return f"the user {self.address.user!r}" if self.address.user else "who gives no user"

    def _log_in(self, endpoint: tuple[str, int], deadline_s: float) -> None:
        self._token = ""
        login = {"name": self.address.user, "password": self.address.password}
        try:
            self._token = str(self._post(endpoint, "auth/authenticate", login, deadline_s)["token"])
        except _GatewayError as error:
            if error.code in _TRY_AGAIN:
                raise
            fix = (
                "give the address without user:password@, or `etcdctl auth enable`"
                if error.code == _FAILED_PRECONDITION
                else "set the password that `etcdctl user add` gave it, with %40 for an @ in it"
            )
            raise UsageError(f"etcd at {self.address} refuses {self._login()}: {error}; {fix}") from None

    def _post(self, endpoint: tuple[str, int], path: str, body: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        connection = self._connect(endpoint, deadline_s)
        connection.response_class = partial(_TimedResponse, deadline_s=deadline_s)  # type: ignore[assignment]
        headers = {"Content-Type": "application/json", **({"Authorization": self._token} if self._token else {})}
        connection.request("POST", f"/v3/{path}", json.dumps(body), headers)
        response = connection.getresponse()
        content = response.read()
        if not content.startswith(b"{"):
            raise ValueError(f"no v3 gateway of an etcd 3.4 or later there (HTTP {response.status}, {content[:60]!r})")
        answer: dict[str, Any] = json.loads(content)
        if response.status != http.HTTPStatus.OK or "error" in answer:
            error = answer.get("error", answer)
            text = error.get("message", "") if isinstance(error, dict) else answer.get("message") or error
            raise _GatewayError(int(answer.get("code", 2)), str(text or f"HTTP {response.status}"))
        return answer

    def _connect(self, endpoint: tuple[str, int], deadline_s: float) -> http.client.HTTPConnection:
        if self._connection is None:
            timeout_s = _left_s(deadline_s)
            if self._context is not None:
                self._connection = http.client.HTTPSConnection(*endpoint, timeout=timeout_s, context=self._context)
            else:
                self._connection = http.client.HTTPConnection(*endpoint, timeout=timeout_s)
        if self._connection.sock is None:
            self._connection.connect()
        self._connection.sock.settimeout(_left_s(deadline_s))
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


class EtcdStore(AskingStore):
    """torch's store interface on etcd. Thread safe. Each request takes at most `timeout_s`.

    All keys belong to one etcd lease of the job's, which its processes keep: they vanish a day after the last one.
    A request is repeated at another member when one does not answer; `add` counts once all the same. Raises
    dist.DistNetworkError where no member answers, UsageError where the login is refused.
    """

    def __init__(self, address: EtcdAddress, job: str, connect_timeout_s: float, timeout_s: float) -> None:
        super().__init__(connect_timeout_s)
        self.address = address
        self._gateway = _Gateway(address)
        self._lease = int.from_bytes(hashlib.sha256(f"holmes/{job}".encode()).digest()[:8], "big") >> 1 or 1
        self._kept_s = time.monotonic()
        self._adding = threading.Lock()
        self._own_key = f"holmes/adds/{secrets.token_hex(8)}"  # says which of this client's additions was the last
        self._additions = 0
        self._grant()
        self._values([self._own_key])  # whether the login may: a lease is granted to anybody
        self._timeout_s = timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        """As dist.Store."""
        self._keep_lease()
        self._put([], [(key, value)])

    def get(self, key: str) -> bytes:
        """As dist.Store."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """As dist.Store."""
        self.wait(list(keys))
        values = self._values(keys)
        missing = [key for key, value in zip(keys, values, strict=True) if value is None]
        if missing:
            raise dist.DistStoreError(f"{missing[0]!r} was deleted while it was read")
        return [value for value in values if value is not None]

    def check(self, keys: Sequence[str]) -> bool:
        """As dist.Store."""
        return all(value is not None for value in self._values(keys))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """As dist.Store: an empty `expected` stands for a key that nobody has set, too."""
        current = self._put([_has(key, expected or None)], [(key, desired)])
        if current == [b""] and not expected:
            current = self._put([_has(key, expected)], [(key, desired)])
        if current is None:
            return _bytes(desired)
        return _bytes(expected) if current[0] is None else current[0]

    def add(self, key: str, amount: int) -> int:
        """As dist.Store."""
        if amount == 0:
            return self._count(key, self._values([key])[0])
        with self._adding:
            self._additions += 1
            keys = [key, self._own_key]
            value, last = self._values(keys)
            while True:
                result = self._count(key, value) + amount
                mine = f"{self._additions} {result}".encode()
                unchanged = [_has(key, value), _has(self._own_key, last)]
                current = self._put(unchanged, [(key, str(result)), (self._own_key, mine)])
                if current is None or current[1] == mine:  # by an earlier attempt, of which no answer came
                    return result
                value, last = current

    def _count(self, key: str, value: bytes | None) -> int:
        try:
            return int(value or 0)
        except ValueError as error:
            raise StoreContentError.of(self.address, key, value or b"", "a whole number", error) from None

    def delete_key(self, key: str) -> bool:
        """As dist.Store."""
        return int(self._call("kv/deleterange", {"key": _encoded(key)}).get("deleted", 0)) > 0

    def num_keys(self) -> int:
        """As dist.Store: of all jobs'."""
        every = {"key": _encoded("holmes/"), "range_end": _encoded("holmes0"), "count_only": True}
        return int(self._call("kv/range", every).get("count", 0))

    def _values(self, keys: Sequence[str]) -> list[bytes | None]:
        found: list[bytes | None] = []
        for some in _portions(keys):
            answer = self._call("kv/txn", {"success": [_range(key) for key in some]})
            found += [_value_of(response) for response in answer["responses"]]
        return found

    def _put(
        self, compare: Sequence[Mapping[str, Any]], pairs: Sequence[tuple[str, str | bytes]]
    ) -> list[bytes | None] | None:
        """Sets all these where `compare` holds; returns None then, else the values they have."""
        lease = str(self._lease)
        body = {
            "compare": list(compare),
            "success": [
                {"request_put": {"key": _encoded(key), "value": _encoded(value), "lease": lease}}
                for key, value in pairs
            ],
            "failure": [_range(key) for key, _ in pairs],
        }
        try:
            answer = self._call("kv/txn", body)
        except dist.DistStoreError as error:
            if "lease not found" not in str(error):
                raise
            self._grant()
            answer = self._call("kv/txn", body)
        return None if answer.get("succeeded") else [_value_of(response) for response in answer["responses"]]

    def _grant(self) -> None:
        try:
            self._call("lease/grant", {"ID": str(self._lease), "TTL": str(LEASE_TTL_S)})
        except dist.DistStoreError as error:
            if "lease already exists" not in str(error):
                raise

    def _keep_lease(self) -> None:
        """Now and then."""
        now_s = time.monotonic()
        if now_s - self._kept_s > LEASE_TTL_S / 24:
            self._kept_s = now_s
            self._call("lease/keepalive", {"ID": str(self._lease)})

    def _call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._gateway.call(path, body, self._timeout_s)
        except _GatewayError as error:
            raise dist.DistStoreError(f"etcd at {self.address} refuses: {error}") from None


def _shown(endpoint: tuple[str, int]) -> str:
    host, port = endpoint
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reason(error: Exception, is_over_tls: bool) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    # RemoteDisconnected is one of the first: which of them is a matter of time.
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        closed = "it closes the connection without an answer"
        return closed if is_over_tls else f"{closed}, as one does that speaks TLS only (etcds://...)"
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _encoded(value: str | bytes) -> str:
    return base64.b64encode(_bytes(value)).decode()


def _has(key: str, value: str | bytes | None) -> dict[str, Any]:
    """A condition of a transaction: this value, or None: not set."""
    if value is None:
        return {"key": _encoded(key), "result": "EQUAL", "target": "CREATE", "create_revision": "0"}
    return {"key": _encoded(key), "result": "EQUAL", "target": "VALUE", "value": _encoded(value)}


def _range(key: str) -> dict[str, Any]:
    return {"request_range": {"key": _encoded(key)}}


def _value_of(response: Mapping[str, Any]) -> bytes | None:
    kvs = response["response_range"].get("kvs", [])
    return base64.b64decode(kvs[0].get("value", "")) if kvs else None


def _portions(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    return (keys[first : first + _MOST_OPERATIONS] for first in range(0, len(keys), _MOST_OPERATIONS))
