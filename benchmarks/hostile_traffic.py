"""What strangers send to a job's open port: garbage, absurd lengths, replayed and wrong proofs, connection floods.

Used by bench_security.py and tests/multirank/test_hostile.py. Only against addresses of the own machine or testbed.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator

Address = tuple[str, int]

_TIMEOUT_S = 5.0
# What port scanners say first.
GARBAGE = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.2\r\n",
    bytes.fromhex("16030100f8010000f40303") + bytes(64),  # a TLS ClientHello
    b"\x00\x00\x00\x2f\xffSMBr" + bytes(32),
    b"HOLMES\r\n" + bytes(40),
    b"\x80\x00\x00\x28\x72\xfe\x1d\x13" + bytes(32),  # RPC
)


def request(operation: bytes, key_bytes: int, value_bytes: int, wait_ms: int = 0, body: bytes = b"") -> bytes:
    """A request to a TcpStore as its protocol has it, with any lengths."""
    return b"HST2" + operation + struct.pack("<IIQ", key_bytes, value_bytes, wait_ms) + body


def say(address: Address, message: bytes) -> bytes:
    """Connects, sends, returns what comes until the other side ends the connection; empty where it is reset."""
    try:
        with socket.create_connection(address, _TIMEOUT_S) as connection:
            connection.sendall(message)
            connection.shutdown(socket.SHUT_WR)
            parts = []
            while part := connection.recv(65536):
                parts.append(part)
            return b"".join(parts)
    except OSError:  # reset, or no longer connected
        return b""


def received(connection: socket.socket, count: int) -> bytes:
    """So many bytes, or fewer where the other side ends the connection before."""
    parts = b""
    while len(parts) < count and (part := connection.recv(count - len(parts))):
        parts += part
    return parts


def proof(secret: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """What the store's "client" or "server" says to prove the secret."""
    return hmac.new(secret, b"holmes store " + role + client_nonce + server_nonce, hashlib.sha256).digest()


def scan(address: Address) -> None:
    """Everything a port scanner says, and random bytes."""
    for garbage in (*GARBAGE, os.urandom(4096)):
        say(address, garbage)


def absurd_lengths(address: Address) -> None:
    """Lengths as large as the fields take, and 10 GB as the number of milliseconds; a little of the value follows."""
    for message in (
        request(b"s", 0xFFFFFFFF, 0xFFFFFFFF),
        request(b"s", 1, 0xFFFFFFFF, body=b"k" + bytes(100_000)),
        request(b"g", 0, 5, 10_000_000_000, b"\1\0\0\0k"),
        b"10000000000:" + bytes(1000),  # as a length in a record
    ):
        say(address, message)


def wrong_secret(address: Address) -> bytes:
    """The store's handshake by somebody who does not know the secret. Returns what the store said to the proof."""
    nonce = os.urandom(16)
    with socket.create_connection(address, _TIMEOUT_S) as connection:
        connection.sendall(request(b"h", 16, 0, body=nonce))
        reply = connection.recv(1024)
        server_nonce = reply[5:21]
        connection.sendall(request(b"p", 32, 0, body=proof(b"a guess", b"client", nonce, server_nonce)))
        try:
            return connection.recv(1024)
        except OSError:
            return b""


def replay(address: Address, recorded: bytes) -> bytes:
    """Sends what a rank once sent, byte for byte. Returns what came, less the server's part of the handshake."""
    hello, rest = recorded[:37], recorded[37:]
    with socket.create_connection(address, _TIMEOUT_S) as connection:
        connection.sendall(hello)
        connection.recv(1024)
        try:
            connection.sendall(rest)
            return connection.recv(1024)
        except OSError:
            return b""


def recorded_handshake(secret: bytes) -> bytes:
    """Both messages of a rank's handshake with a store that had other random bytes, then a request."""
    nonce, server_nonce = os.urandom(16), os.urandom(16)
    own = proof(secret, b"client", nonce, server_nonce)
    return request(b"h", 16, 0, body=nonce) + request(b"p", 32, 0, body=own) + request(b"g", 0, 5, 0, b"\1\0\0\0k")


def flood(address: Address, count: int, keep: int = 200) -> Counter[str]:
    """`count` connection attempts as fast as they go, of which the last `keep` stay open and silent meanwhile.

    Returns how many of each outcome: "connected", or the error's name.
    """
    outcomes: Counter[str] = Counter()
    kept: list[socket.socket] = []
    for _ in range(count):
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        code = connection.connect_ex(address)
        outcomes["connected" if code in (0, errno.EINPROGRESS) else errno.errorcode[code]] += 1
        # A reset at the end: no port stays behind.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        kept.append(connection)
        if len(kept) > keep:
            kept.pop(0).close()
    for connection in kept:
        connection.close()
    return outcomes


def attacks(address: Address, secret: bytes) -> Iterator[Callable[[], object]]:
    """All of them but the flood, one after the other. `secret` serves to make a recording, as of a wire."""
    recording = recorded_handshake(secret)
    yield lambda: scan(address)
    yield lambda: absurd_lengths(address)
    yield lambda: wrong_secret(address)
    yield lambda: replay(address, recording)
