"""Hostile traffic at a running job: its results stay right, its ports are shut, who does not prove the secret gets
nothing.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import hostile_traffic as hostile
import numpy as np
import pytest
from ranks import run_threads

import holmes_comm

SECRET = "the secret of the job"


def _listening_ports() -> set[int]:
    """TCP ports on which this process listens."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.add(int(fields[1].rsplit(":", 1)[1], 16))
    return ports


def test_hostile_traffic_leaves_a_running_job_alone() -> None:
    before = _listening_ports()
    server = holmes_comm.TcpStore("127.0.0.1", 0, is_server=True, secret=SECRET)
    address = ("127.0.0.1", server.port)
    is_set_up = threading.Barrier(3)
    stop = threading.Event()

    def rank_body(rank: int) -> int:
        store = server if rank == 0 else holmes_comm.TcpStore(*address, secret=SECRET)
        comm = holmes_comm.init(store, rank, 2, transport="tcp", name="hostile", secret=SECRET, timeout_s=60.0)
        is_set_up.wait(30.0)
        operations = 0
        expected = np.arange(1 << 18, dtype="float32") * 2 + 1
        go_on = np.ones(1)
        while go_on[0] > 0:
            data = np.arange(1 << 18, dtype="float32") + rank
            comm.all_reduce(data)
            assert np.array_equal(data, expected)
            operations += 1
            go_on[0] = 0.0 if stop.is_set() else 1.0
            comm.all_reduce(go_on, op="min")
        comm.barrier()
        return operations

    results: list[Any] = []
    job = threading.Thread(target=lambda: results.append(run_threads(2, rank_body)), daemon=True)
    job.start()
    is_set_up.wait(30.0)
    try:
        # What the mesh listened on is closed: nothing but the store is open.
        assert _listening_ports() - before == {server.port}
        for attack in hostile.attacks(address, SECRET.encode()):
            attack()
        outcomes = hostile.flood(address, 2000)
        assert outcomes["connected"] > 0
        # The store serves on.
        newcomer = holmes_comm.TcpStore(*address, secret=SECRET)
        newcomer.set("after", b"1")
        assert server.get("after", 5.0) == b"1"
    finally:
        stop.set()
        job.join(60.0)
    assert not job.is_alive()
    assert len(results) == 1
    assert results[0][0] == results[0][1] > 1


@pytest.mark.parametrize("weak", ["a guess", "a" * 64])
def test_a_weak_secret_is_refused_everywhere(weak: str) -> None:
    store = holmes_comm.LocalStore()

    def body(rank: int) -> None:
        with pytest.raises(holmes_comm.UsageError, match=r"at least 16, 5 of them different.*openssl rand -hex 32"):
            holmes_comm.init(store, rank, 2, transport="tcp", name="weak", secret=weak, connect_timeout_s=20.0)

    run_threads(2, body)
    for is_server in (True, False):
        with pytest.raises(holmes_comm.UsageError, match="openssl rand -hex 32"):
            holmes_comm.TcpStore("127.0.0.1", 0, is_server=is_server, secret=weak)


def test_a_store_with_a_secret_serves_nobody_without_it() -> None:
    server = holmes_comm.TcpStore("127.0.0.1", 0, is_server=True, secret=SECRET)
    server.set("key", b"value")
    address = ("127.0.0.1", server.port)
    assert hostile.say(address, hostile.request(b"g", 3, 0, 0, b"key")) == b"r\0\0\0\0"
    assert hostile.wrong_secret(address) == b""
    assert hostile.replay(address, hostile.recorded_handshake(SECRET.encode())) == b""
    with pytest.raises(holmes_comm.ProtocolError, match="HOLMES_SECRET"):
        holmes_comm.TcpStore(*address)
    with pytest.raises(holmes_comm.ProtocolError, match="another secret"):
        holmes_comm.TcpStore(*address, secret="a stranger's guess")
    assert holmes_comm.TcpStore(*address, secret=SECRET).get("key", 5.0) == b"value"
    plain = holmes_comm.TcpStore("127.0.0.1", 0, is_server=True)
    with pytest.raises(holmes_comm.ProtocolError, match="was given no secret"):
        holmes_comm.TcpStore("127.0.0.1", plain.port, secret=SECRET)


def test_a_store_says_nothing_that_guesses_can_be_tried_against() -> None:
    """Before the client's proof is right, what it says is as long as random bytes alone, and depends on no secret."""
    server = holmes_comm.TcpStore("127.0.0.1", 0, is_server=True, secret=SECRET)
    nonce = os.urandom(16)
    answer = hostile.say(("127.0.0.1", server.port), hostile.request(b"h", 16, 0, body=nonce))
    assert len(answer) == 5 + 16
    assert answer[:5] == b"o" + struct.pack("<I", 16)
    with socket.create_connection(("127.0.0.1", server.port), 5.0) as connection:
        connection.sendall(hostile.request(b"h", 16, 0, body=nonce))
        own = hostile.received(connection, 5 + 16)[5:]
        connection.sendall(hostile.request(b"p", 32, 0, body=hostile.proof(SECRET.encode(), b"client", nonce, own)))
        assert hostile.received(connection, 5 + 32)[5:] == hostile.proof(SECRET.encode(), b"server", nonce, own)


def test_a_store_that_does_not_answer_may_be_behind_smaller_packets() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(holmes_comm.UnreachableError, match=r"is lost: .*; check that the process .*NICs' MTU get"),
    ):
        holmes_comm.TcpStore("127.0.0.1", listener.getsockname()[1], timeout_s=0.2, reply_timeout_s=0.3)


def test_who_serves_in_the_stores_place_is_found_out() -> None:
    """It takes any proof, and has none of its own."""
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                for body_bytes, said in ((16, bytes(16)), (32, bytes(32))):
                    heard.append(hostile.received(connection, 21 + body_bytes))
                    connection.sendall(b"o" + struct.pack("<I", len(said)) + said)
                connection.recv(1)

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        with pytest.raises(holmes_comm.ProtocolError, match="did not prove the job's secret"):
            holmes_comm.TcpStore("127.0.0.1", listener.getsockname()[1], secret=SECRET)
        server.join(10.0)
    assert [message[4:5] for message in heard] == [b"h", b"p"]


def test_unfinished_requests_cost_the_store_neither_memory_nor_its_clients() -> None:
    server = holmes_comm.TcpStore("127.0.0.1", 0, is_server=True)
    part = hostile.request(b"s", 1, 16 << 20, body=b"k" + bytes(14 << 20))
    connections = []
    for _ in range(22):  # 308 MiB, if the store kept all
        connection = socket.create_connection(("127.0.0.1", server.port), 5.0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(part)
        connections.append(connection)
    client = holmes_comm.TcpStore("127.0.0.1", server.port)
    client.set("key", b"value")
    assert server.get("key", 5.0) == b"value"

    def is_dropped(connection: socket.socket) -> bool:
        connection.settimeout(0.01)
        try:
            return connection.recv(1) == b""
        except TimeoutError:
            return False
        except ConnectionError:
            return True

    dropped = sum(is_dropped(connection) for connection in connections)
    assert 0 < dropped < len(connections)
    for connection in connections:
        connection.close()
