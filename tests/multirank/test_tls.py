"""TLS from Python: which connections are encrypted, nothing readable on the wire, refusals by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from namespaces import child_env, needs_namespaces
from ranks import run_threads

import holmes_comm

SECRET = "the secret of the job"
WORKER = Path(__file__).parents[1] / "workers" / "wire_worker.py"


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


@needs_namespaces
@pytest.mark.parametrize("tls", ["off", "all"])
def test_nothing_readable_is_on_the_wire(tls: str) -> None:
    alone = ["unshare", "-Urn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    done = subprocess.run(
        [*alone, sys.executable, str(WORKER), tls], env=child_env(), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    wire = json.loads(done.stdout)
    assert wire["lost"] == 0
    assert wire["frames"] > 20
    assert wire["readable"] == 0 if tls == "all" else wire["readable"] > 0, wire


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
