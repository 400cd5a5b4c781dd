"""Operations between ranks that are far from each other; rank 0 prints what became of them: ``far_worker.py SCENARIO``.

message: 8 MiB to rank 1, twice; seconds of the second. shared MIB [COUNT]: 10 messages of so many MiB; what each
connection sent of them, and whether bbr's start has ended on the first one. striped: 16 MiB to rank 1 over 16
connections; how many bytes may wait unsent in each, and into how many chunks they were cut. slowed: 8 MiB to rank 1
over 4 connections, one of which then sends no more than 8 KB/s; seconds of the slowest of two more. queued: many small
all_reduces at once. chained: the same buffer reduced again and again without waiting. beside: messages while another
group sends without a pause, without and with priorities. changing FOLDER [PRIORITY [STREAMS]]: all_reduces and
messages of 4 MiB until there is FOLDER/stop, each looked at; FOLDER/begun is made when the first ones are done.
following FOLDER: messages of 1 MiB to rank 1 until there is FOLDER/stop, each looked at; when each was received, and
what rank 0's path then carried. resting: nothing for longer than a silent peer is waited for; a line says when that
begins. counted [FLAT]: 1 MB to rank 1 and 3 MB to rank 2, and the metrics of that; with FLAT= or FLAT=never the first
letters of the hosts are their clusters. uplink: messages to rank 2, the first letters of the hosts being their
clusters, alone and while rank 1 sends to rank 3 without a pause. turns: messages of ranks
0 and 1 to 2 and 3 that begin together, with and without turns. seen FOLDER: 1 MB to rank 1 and, after FOLDER/begun,
to rank 2 until there is FOLDER/stop, the first letters of the hosts being their clusters; every rank's flight record
goes to FOLDER.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import holmes_comm

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STORE = holmes_comm.TcpStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1, is_server=RANK == 0)


def make(name: str, priority: int | None = None, streams: int = 1):
    nics = holmes_comm.NicSelection(names=("eth0",), streams=streams)
    return holmes_comm.init(STORE, RANK, SIZE, nics=nics, name=name, priority=priority, timeout_s=60.0)


def deliver(comm, data: np.ndarray) -> None:
    """`data` of rank 0 to rank 1, which answers once it is there."""
    if RANK == 0:
        comm.send(data, 1)
        comm.recv(np.zeros(1), 1)
    else:
        comm.recv(data, 0)
        comm.send(np.zeros(1), 0)


def message() -> dict[str, object]:
    comm = make("far")
    data = np.arange(1 << 20, dtype="float64") if RANK == 0 else np.zeros(1 << 20)
    seconds = []
    for _ in range(2):
        comm.barrier()
        start_s = time.monotonic()
        deliver(comm, data)
        seconds.append(time.monotonic() - start_s)
    right = bool((data == np.arange(1 << 20)).all())
    comm.barrier()
    return {"right": right, "seconds": seconds[-1]}


def shared() -> dict[str, object]:
    comm = make("far")
    size, count = int(sys.argv[2]) << 17, int((sys.argv[3:] or ["10"])[0])
    right = True
    for number in range(count):
        data = np.arange(size, dtype="float64") + number if RANK == 0 else np.zeros(size)
        deliver(comm, data)
        right &= bool((data == np.arange(size) + number).all())
    streams = [c for c in comm.connections() if c["purpose"] == "p2p"]
    verdicts = np.array([float(right)])
    comm.all_reduce(verdicts, "min")
    gains = of_sockets(lambda own: own.getsockopt(socket.IPPROTO_TCP, 26, 20))  # TCP_CC_INFO
    gain = struct.unpack("5I", gains[streams[0]["local_address"], streams[0]["remote_address"]].ljust(20, b"\0"))[3]
    comm.barrier()
    sent = [float(c["sent_bytes"]) for c in streams]
    return {"right": bool(verdicts[0] == 1), "sent": sent, "started": 0 < gain < 2 * 256}


def striped() -> dict[str, object]:
    size, header_bytes, tcp_notsent_lowat = 1 << 24, 64, 25
    unsent, chunks = [], []
    for number in range(3):
        comm = make(f"far{number}", streams=16)
        deliver(comm, np.zeros(size, dtype="uint8"))
        streams = [c for c in comm.connections() if c["purpose"] == "p2p"]
        sent = sum(int(c["sent_bytes"]) for c in streams)
        chunks.append((sent - size) / header_bytes)  # and what was copied, where a connection seemed to be late
        limits = of_sockets(lambda own: own.getsockopt(socket.IPPROTO_TCP, tcp_notsent_lowat))
        unsent += [limits[c["local_address"], c["remote_address"]] for c in streams]
        comm.barrier()
    return {"unsent": unsent, "chunks": chunks}


def slowed() -> dict[str, object]:
    size, so_max_pacing_rate = 1 << 23, 47
    pace = struct.pack("Q", 8000)
    comm = make("far", streams=4)
    data = np.arange(size, dtype="uint8") if RANK == 0 else np.zeros(size, dtype="uint8")
    right, seconds = True, []
    for number in range(4):
        if number == 2:
            slow = [c for c in comm.connections() if c["purpose"] == "p2p"][1]
            of_sockets(lambda own: own.setsockopt(socket.SOL_SOCKET, so_max_pacing_rate, pace), slow)
        comm.barrier()
        if RANK == 1:
            data.fill(0)
        start_s = time.monotonic()
        deliver(comm, data)
        seconds.append(time.monotonic() - start_s)
        right &= bool((data == np.arange(size, dtype="uint8")).all())
    verdicts = np.array([float(right)])
    comm.all_reduce(verdicts, "min")
    return {"right": bool(verdicts[0] == 1), "seconds": max(seconds[2:]), "before": max(seconds[:2])}


def of_sockets(
    ask: Callable[[socket.socket], Any], connection: Mapping[str, Any] | None = None
) -> dict[tuple[str, str], Any]:
    """Of this process' TCP sockets (of `connection` only), by their addresses."""
    answers = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as own:
            ends = ("{}:{}".format(*end[:2]) for end in (own.getsockname(), own.getpeername()))
            named = tuple(ends)
            if connection is None or named == (connection["local_address"], connection["remote_address"]):
                answers[named] = ask(own)
    return answers


def queued(count: int = 20) -> dict[str, object]:
    comm = make("far")
    for _ in range(2):  # the first time opens TCP's window
        buffers = [np.full(4000, RANK + number + 1.0) for number in range(count)]
        comm.barrier()
        start_s = time.monotonic()
        for work in [comm.all_reduce(data, async_op=True) for data in buffers]:
            work.wait()
        seconds = time.monotonic() - start_s
    total = SIZE * (SIZE + 1) / 2
    right = all((data == total + SIZE * number).all() for number, data in enumerate(buffers))
    comm.barrier()
    return {"right": bool(right), "seconds": seconds}


def chained(count: int = 10) -> dict[str, object]:
    comm = make("far")
    data = np.ones(4000)
    gathered = np.zeros((SIZE, 4000))
    for work in [comm.all_reduce(data, async_op=True) for _ in range(count)] + [
        comm.all_gather(gathered, data, async_op=True)
    ]:
        work.wait()
    right = (data == SIZE**count).all() and (gathered == SIZE**count).all()
    comm.barrier()
    return {"right": bool(right)}


def beside() -> dict[str, object]:
    """Milliseconds of 1 MiB messages and their answers, medians."""
    found = {}
    for name, high, low in (("plain", None, None), ("priorities", 3, 1)):
        messages, gradients = make(f"pp-{name}", high), make(f"dp-{name}", low)
        stop = threading.Event()

        def stream(gradients=gradients, stop=stop) -> None:
            data = np.zeros(1 << 19)
            while data[0] == 0:
                data[0] = stop.is_set()
                if RANK == 0:
                    gradients.send(data, 1)
                else:
                    gradients.recv(data, 0)

        thread = threading.Thread(target=stream)
        thread.start()
        took_ms = []
        data = np.zeros(1 << 17)
        for _ in range(16):
            time.sleep(0.2)
            start_s = time.monotonic()
            if RANK == 0:
                messages.send(data, 1)
                messages.recv(data[:1], 1)
            else:
                messages.recv(data, 0)
                messages.send(data[:1], 0)
            took_ms.append(1e3 * (time.monotonic() - start_s))
        stop.set()
        thread.join()
        found[name] = statistics.median(took_ms[4:])
        messages.barrier()
    return found


def changing(count: int = 1 << 19) -> dict[str, object]:
    """Rounds: when each began and ended, the bytes that went one after the other, and what rank 0's paths carry."""
    folder = Path(sys.argv[2])
    options = [int(text) for text in sys.argv[3:]]
    comm = make("far", options[0] if options and options[0] >= 0 else None, options[1] if options[1:] else 1)
    there, back = np.arange(count, dtype="float64"), np.zeros(count)
    rounds, right, number = [], True, 0
    while True:
        number += 1
        data = np.full(count, RANK + float(number))
        data[0] = RANK == 0 and (folder / "stop").exists()
        start_s = time.monotonic()
        comm.all_reduce(data)
        comm.barrier()  # or what a socket holds yet would share the link with the next
        is_last = data[0] == 1
        right &= bool((data[1:] == 2 * number + 1).all())
        back[:] = 0
        if RANK == 0:
            comm.send(there, 1)
            comm.barrier()
            comm.recv(back, 1)
        else:
            comm.recv(back, 0)
            comm.barrier()
            comm.send(back, 0)
        comm.barrier()
        right &= bool((back == there).all())
        paths = [(c["purpose"], c["path_bytes_per_s"], c["path_changes"]) for c in comm.connections()]
        rounds.append((start_s, time.monotonic(), 3 * data.nbytes, paths))
        if number == 2 and RANK == 0:
            (folder / "begun").touch()
        if is_last:
            break
    comm.barrier()
    return {"right": right, "rounds": rounds}


def following(count: int = 1 << 17, most: int = 4096) -> dict[str, object]:
    folder, comm = Path(sys.argv[2]), make("far")
    expected, received_s, paths, right = np.arange(count, dtype="float64"), np.zeros(most), [], np.ones(1)
    for number in range(1, most):
        data = expected + number if RANK == 0 else np.zeros(count)
        if RANK == 0:
            data[0] = -1 if (folder / "stop").exists() else number
            comm.send(data, 1)
            known = [c for c in comm.connections() if c["purpose"] == "p2p"]
            sums = [sum(c[key] for c in known) for key in ("path_bytes_per_s", "path_changes")]
            paths.append((time.monotonic(), *sums))
        else:
            comm.recv(data, 0)
            received_s[number] = time.monotonic()
            right *= data[0] in (-1, number) and (data[1:] == expected[1:] + number).all()
        if data[0] == -1:
            break
    for array in (received_s, right):
        comm.broadcast(array, 1)
    return {
        "right": bool(right[0]),
        "received_s": received_s[received_s > 0].tolist(),
        "paths": paths,
        "bytes": data.nbytes,
    }


def counted() -> dict[str, object]:
    cluster = socket.gethostname()[0] if sys.argv[2:] else None
    never = (sys.argv[2] or None) if sys.argv[2:] else None
    nics = holmes_comm.NicSelection(names=("eth0",))
    comm = holmes_comm.init(STORE, RANK, SIZE, nics=nics, name="pp", cluster=cluster, hierarchical_min_bytes=never)
    for peer in range(1, SIZE):
        data = np.zeros((0, 125_000, 375_000)[peer])
        if RANK == 0:
            comm.send(data, peer)
        elif peer == RANK:
            comm.recv(data, 0)
    comm.all_reduce(np.zeros(125_000))
    found = holmes_comm.metrics()
    links = [(link["nic"], link["from"], link["to"]) for link in holmes_comm.flight_record()["links"]]
    comm.barrier()
    return {"nics": [asdict(nic) for nic in found.nics], "text": found.to_prometheus(), "links": links}


def seen(pause_s: float = 0.5) -> dict[str, object]:
    folder, nics = Path(sys.argv[2]), holmes_comm.NicSelection(names=("eth0",))
    options = {"cluster": socket.gethostname()[0], "hierarchical_min_bytes": "never", "timeout_s": 60.0}
    comm = holmes_comm.init(STORE, RANK, SIZE, nics=nics, name="pp", **options)
    data, across = np.ones(125_000), 0
    if RANK == 0:
        comm.send(data, 1)
    elif RANK == 1:
        comm.recv(data, 0)
    comm.barrier()
    if RANK == 0:
        (folder / "begun").touch()
    while RANK != 1 and data[0]:
        if RANK == 0:
            data[0] = not (folder / "stop").exists()
            comm.send(data, 2)
            comm.recv(np.zeros(1), 2)
            across += data.nbytes
        else:
            comm.recv(data, 0)
            comm.send(np.ones(1), 0)
    comm.barrier()
    time.sleep(pause_s)  # in which nobody sends
    record = holmes_comm.flight_record()
    (folder / f"{record['host']}-{record['pid']}.json").write_text(json.dumps(record))
    found, connections = holmes_comm.metrics(), comm.connections()
    comm.barrier()
    nics_of = {"nics": [asdict(nic) for nic in found.nics], "connections": connections}
    return {**nics_of, "across": across, "record": record, "text": found.to_prometheus()}


def uplink(count: int = 16) -> dict[str, object]:
    """Milliseconds of 512 KiB messages and their answers."""
    nics, cluster = holmes_comm.NicSelection(names=("eth0",)), socket.gethostname()[0]

    def spanning(name: str, priority: int):
        options = {"priority": priority, "cluster": cluster, "hierarchical_min_bytes": "never", "timeout_s": 60.0}
        return holmes_comm.init(STORE, RANK, SIZE, nics=nics, name=name, **options)

    messages, gradients, peer = spanning("pp", 3), spanning("dp", 1), (RANK + 2) % 4
    found = {}
    for is_busy in (False, True):
        stop = threading.Event()

        def stream(stop=stop) -> None:
            data = np.zeros(1 << 17)
            while data[0] == 0:
                data[0] = stop.is_set()
                if RANK == 1:
                    gradients.send(data, peer)
                else:
                    gradients.recv(data, peer)

        thread = threading.Thread(target=stream)
        if is_busy and RANK % 2:
            thread.start()
        data = np.zeros(1 << 16)
        took_ms = []
        for _ in range(0 if RANK % 2 else count):
            time.sleep(0.3)
            start_s = time.monotonic()
            if RANK == 0:
                messages.send(data, peer)
                messages.recv(data[:1], peer)
            else:
                messages.recv(data, peer)
                messages.send(data[:1], peer)
            took_ms.append(1e3 * (time.monotonic() - start_s))
        messages.barrier()
        stop.set()
        if thread.ident:
            thread.join()
        found["busy" if is_busy else "alone"] = took_ms[count // 4 :]
    messages.barrier()
    return found


def turns(mib: int = 2, count: int = 6) -> dict[str, object]:
    """Milliseconds until messages of two pairs that begin together have come, by pair; with and without turns."""
    nics, cluster = holmes_comm.NicSelection(names=("eth0",)), socket.gethostname()[0]
    clusters = {"nics": nics, "cluster": cluster, "hierarchical_min_bytes": "never", "timeout_s": 60.0}
    pair, world = RANK % 2, holmes_comm.init(STORE, RANK, SIZE, name="world", **clusters)
    data, took_ms = np.zeros(mib << 17), np.zeros((2, 2, count + 1))
    for has_turns in (0, 1):
        given = {"priority": 3, "turn": pair if has_turns else None}
        comm = holmes_comm.init(STORE, RANK // 2, 2, name=f"pp{pair}.{has_turns}", **given, **clusters)
        for number in range(count + 1):
            world.barrier()
            start_s = time.monotonic()
            if RANK < 2:
                comm.send(data, 1)
            else:
                comm.recv(data, 0)
                took_ms[has_turns, pair, number] = 1e3 * (time.monotonic() - start_s)
            comm.barrier()
    world.all_reduce(took_ms)
    return {name: took_ms[i, :, 1:].tolist() for i, name in enumerate(("shared", "turns"))}


def resting() -> dict[str, object]:
    comm = make("far")
    comm.barrier()
    if RANK == 0:
        print("resting", flush=True)
    time.sleep(33)
    data = np.ones(1000)
    comm.all_reduce(data)
    comm.barrier()
    return {"right": bool((data == SIZE).all())}


scenarios = {
    "message": message,
    "shared": shared,
    "striped": striped,
    "slowed": slowed,
    "queued": queued,
    "chained": chained,
    "beside": beside,
    "changing": changing,
    "following": following,
    "counted": counted,
    "seen": seen,
    "turns": turns,
    "uplink": uplink,
    "resting": resting,
}
result = scenarios[sys.argv[1]]()
if RANK == 0:
    print(json.dumps(result), flush=True)
