"""TLS from Python: which connections are encrypted, nothing readable on the wire, refusals by name."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from ranks import run_threads

import holmes_comm

SECRET = "the secret of the job"
MARK = b"these are the gradients of a model that is nobody's business.   "  # 64 bytes


def _run(name: str, size: int, body: Callable[[Any], Any], **options: Any) -> list[Any]:
    """`body(communicator)` on every rank; `options` of init, by rank where they are callable."""
    store = holmes_comm.LocalStore()

    def rank_body(rank: int) -> Any:
        given = {key: value(rank) if callable(value) else value for key, value in options.items()}
        comm = holmes_comm.init(
            store,
            rank,
            size,
            transport="tcp",
            name=name,
            secret=SECRET,
            timeout_s=30.0,
            connect_timeout_s=20.0,
            **given,
        )
        return body(comm)

    return run_threads(size, rank_body)


def _sum(comm: Any, count: int = 100_000) -> float:
    data = np.full(count, comm.rank + 1.0, "float32")
    comm.all_reduce(data)
    assert (data == data[0]).all()
    return float(data[0])


def _encryption(comm: Any) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for connection in comm.connections():
        found.setdefault(connection["peer"], set()).add(connection["encryption"])
    return found


def test_all_connections_are_encrypted() -> None:
    def body(comm: Any) -> Any:
        assert _sum(comm) == 6.0
        part = comm.split(comm.rank % 2)
        assert _sum(part) == (3.0 if comm.rank == 0 else 1.0 if comm.rank == 1 else 3.0)
        return [*_encryption(comm).values(), *_encryption(part).values()]

    for kinds in _run("tls", 3, body, tls="all"):
        assert all(kind.startswith("TLSv1.3 TLS_") for each in kinds for kind in each)


def test_only_what_joins_clusters_is_encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLMES_TLS", "clusters")

    def body(comm: Any) -> Any:
        assert _sum(comm, 1_000_000) == 10.0  # hierarchical
        assert _sum(comm, 10) == 10.0  # flat
        return comm.rank, _encryption(comm)

    for rank, kinds in _run("tls", 4, body, cluster=lambda rank: "ab"[rank // 2], hierarchical_min_bytes=1 << 16):
        for peer, each in kinds.items():
            crosses = peer // 2 != rank // 2
            assert {bool(kind) for kind in each} == {crosses}


def test_a_pair_in_two_clusters_and_a_group_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLMES_TLS", "clusters")

    def body(comm: Any) -> Any:
        _sum(comm)
        return [bool(kind) for each in _encryption(comm).values() for kind in each]

    assert _run("pair", 2, body, cluster=lambda rank: "ab"[rank]) == [[True], [True]]
    assert _run("one", 2, body, cluster="a") == [[False], [False]]


@contextlib.contextmanager
def _captured(port_filter: Callable[[], set[int]]) -> Iterator[list[bytes]]:
    """Frames that pass loopback meanwhile, as the kernel sees them: those of the ports that `port_filter` names."""
    try:
        sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0003))
    except PermissionError:
        pytest.skip("a capture of loopback needs CAP_NET_RAW: run as root")
    sniffer.bind(("lo", 0))
    sniffer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
    sniffer.settimeout(0.2)
    frames: list[bytes] = []
    stop = threading.Event()

    def capture() -> None:
        while True:  # to the last frame that waits
            try:
                frames.append(sniffer.recv(1 << 17))
            except TimeoutError:
                if stop.is_set():
                    return

    thread = threading.Thread(target=capture)
    thread.start()
    try:
        yield frames
    finally:
        stop.set()
        thread.join()
        sniffer.close()
    ports = port_filter()

    def is_ours(frame: bytes) -> bool:
        return len(frame) > 38 and frame[12:14] == b"\x08\x00" and (
            int.from_bytes(frame[34:36], "big") in ports or int.from_bytes(frame[36:38], "big") in ports
        )  # fmt: skip

    frames[:] = [frame for frame in frames if is_ours(frame)]


@pytest.mark.parametrize("tls", ["off", "all"])
def test_nothing_readable_is_on_the_wire(tls: str) -> None:
    ports: set[int] = set()
    both_done = threading.Barrier(2, timeout=30)

    def body(comm: Any) -> None:
        ports.update(int(c["local_address"].rsplit(":", 1)[1]) for c in comm.connections())
        data = np.frombuffer(MARK * 512, "uint8").copy()
        comm.broadcast(data, 0)
        if comm.rank == 0:
            comm.send(data, 1)
        else:
            got = np.zeros_like(data)
            comm.recv(got, 0)
            assert got.tobytes() == MARK * 512
        both_done.wait()
        comm.abort(MARK.decode())  # a control message

    with _captured(lambda: ports) as frames:
        _run("wire", 2, body, tls=tls)
    assert len(frames) > 20
    readable = sum(MARK[:32] in frame for frame in frames)
    assert readable == 0 if tls == "all" else readable > 0


def test_what_cannot_be_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(holmes_comm.UsageError, match=r"'all' and 'off'.*HOLMES_TLS"):
        _run("mixed", 2, _sum, tls=lambda rank: ["all", "off"][rank])
    with pytest.raises(holmes_comm.UsageError, match="HOLMES_CLUSTER on every rank"):
        _run("unnamed", 2, _sum, tls="clusters")
    with pytest.raises(holmes_comm.UsageError, match="use one of: off, clusters, all"):
        _run("unknown", 2, _sum, tls="perhaps")
    monkeypatch.setenv("HOLMES_TLS", "perhaps")
    with pytest.raises(holmes_comm.UsageError, match="HOLMES_TLS='perhaps'"):
        _run("variable", 2, _sum)
