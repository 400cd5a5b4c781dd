"""The store of an elastic job that `holmes store` serves, as torch sees it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

dist = pytest.importorskip("torch.distributed")

from c10d_stores import store_program  # noqa: E402

from holmes.training.recovery.connect import EmbeddedStore, connect_store  # noqa: E402
from holmes.training.recovery.errors import StoreLostError  # noqa: E402
from holmes_comm import TcpStore  # noqa: E402
from holmes_comm.errors import ProtocolError, UsageError  # noqa: E402

SECRET, ANOTHER = "0123456789abcdef", "fedcba9876543210"


@contextmanager
def holmes_store(port: int = 0, **variables: str) -> Iterator[int]:
    """`holmes store`, and its port."""
    command = [sys.executable, "-m", "holmes", "store", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables}) as server:
        try:
            yield int(server.stdout.readline().rpartition(" ")[2])
        finally:
            server.kill()


def connected(port: int) -> EmbeddedStore:
    return EmbeddedStore(f"127.0.0.1:{port}", 20, 20)


def test_it_does_what_torchs_store_does() -> None:
    torchs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server = TcpStore("127.0.0.1", 0, is_server=True)
    store = connected(server.port)
    before = store.num_keys()
    assert list(store_program(store)) == list(store_program(torchs))
    assert store.num_keys() - before == 303
    prefixed = dist.PrefixStore("under", store)  # as process groups use it, from C++
    prefixed.set("key", "value")
    assert (prefixed.get("key"), prefixed.add("n", 2), store.get("under/key")) == (b"value", 2, b"value")


def test_process_groups_are_made_through_it() -> None:
    server = TcpStore("127.0.0.1", 0, is_server=True)
    program = """
import sys, torch, torch.distributed as dist
from holmes.training.recovery.connect import connect_store
rank = int(sys.argv[1])
store, _ = connect_store(sys.argv[2], "", 20, 20)
for backend in ("gloo", "holmes"):
    dist.init_process_group(backend, store=dist.PrefixStore(backend, store), rank=rank, world_size=3)
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    assert value.item() == 3
    dist.destroy_process_group()
"""
    ranks = [
        subprocess.Popen([sys.executable, "-c", program, str(rank), f"127.0.0.1:{server.port}"], stderr=subprocess.PIPE)
        for rank in range(3)
    ]
    for rank in ranks:
        _, said = rank.communicate(timeout=120)
        assert rank.returncode == 0, said.decode()


def test_it_asks_for_the_jobs_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    with holmes_store(HOLMES_SECRET=SECRET) as port:
        with pytest.raises(ProtocolError, match="serves only who proves the job's secret, and this process was given"):
            connected(port)
        with pytest.raises(RuntimeError):  # torch's client, which has none to give
            dist.TCPStore("127.0.0.1", port, is_master=False, timeout=dist.default_pg_timeout / 600).get("key")
        monkeypatch.setenv("HOLMES_SECRET", ANOTHER)
        with pytest.raises(ProtocolError, match="has another secret than this process"):
            connected(port)
        monkeypatch.setenv("HOLMES_SECRET", SECRET)
        assert connected(port).add("n", 1) == 1
    with holmes_store(HOLMES_SECRET="") as port, pytest.raises(ProtocolError, match="was given no secret"):
        connected(port)


def test_a_store_that_was_lost_stays_lost() -> None:
    """Another one in its place does not know what this one was told: who was told so by it must not go on."""
    with holmes_store() as port:
        store = connected(port)
        assert store.compare_set("decided", "", "this") == b"this"
    said = []
    with holmes_store(port):
        for _ in range(3):
            with pytest.raises(dist.DistNetworkError, match="is lost") as caught:
                store.compare_set("decided", "", "that")
            said.append(str(caught.value))
        assert len(set(said)) == 1
        assert connected(port).compare_set("decided", "", "that") == b"that"


def test_threads_of_one_client() -> None:
    server = TcpStore("127.0.0.1", 0, is_server=True)
    store = connected(server.port)
    seen: list[int] = []
    threads = [threading.Thread(target=lambda: seen.extend(store.add("n", 1) for _ in range(50))) for _ in range(4)]
    waiting = threading.Thread(target=lambda: seen.append(int(store.get("late"))))
    for thread in [waiting, *threads]:
        thread.start()
    for thread in threads:
        thread.join(60)
    store.set("late", b"0")  # nobody who waits keeps the others
    waiting.join(60)
    assert sorted(seen) == list(range(201))


def test_what_cannot_be_an_address_and_what_does_not_answer() -> None:
    with pytest.raises(UsageError, match="must be host:port"):
        connect_store("head", "", 1, 1)
    with pytest.raises(StoreLostError, match=r"no store answers at 127\.0\.0\.1:1 within 0\.3 s"):
        connect_store("127.0.0.1:1", "", 0.3, 1)
