"""Operations over two rails; prints what became of them, as JSON: ``rails_worker.py SCENARIO``.

plain: a few all-reduces. lossy: 100 operations, some of them sends, while the test breaks a rail; prints "operation N"
before each. idle: a rail breaks between operations. unread: one side does not read for a while. lonely: as lossy, but
rank 1 ends without a word after the operation that the test broke a rail in.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time

import numpy as np

import holmes_comm

DEADLINE_S = 20.0
COUNT = 1_000_000


def plain(comm) -> dict[str, object]:
    """Right results, and the bytes each NIC sent."""
    rounds, count = 4, 2_000_000
    right = True
    for number in range(rounds):
        data = np.arange(count, dtype="float32") % 1000 + comm.rank + number
        comm.all_reduce(data)
        right &= bool((data == 2 * (np.arange(count) % 1000) + 1 + 2 * number).all())
    sent: dict[str, int] = {}
    for connection in comm.connections():
        if connection["purpose"] == "collective":
            sent[connection["interface"]] = sent.get(connection["interface"], 0) + connection["sent_bytes"]
    return {"right": right, "sent_bytes": sent, "payload_bytes": rounds * count * 4}


def lossy(comm, operations: int = 100) -> dict[str, object]:
    """Right results and no operation near its deadline, whatever the test does to one rail."""
    wrong, longest_s = 0, 0.0
    pattern = np.arange(COUNT, dtype="float32") % 1000
    for number in range(operations):
        if comm.rank == 0:
            # The local ports of the second rail, for a test that wants to cut one connection.
            ports = [c["local_address"] for c in comm.connections() if c["interface"] == "roce1"]
            print(f"operation {number} {' '.join(ports)}", flush=True)
        start_s = time.monotonic()
        if number % 4 < 3:
            data = pattern + comm.rank + number
            comm.all_reduce(data)
            wrong += int((data != 2 * pattern + 1 + 2 * number).sum())
        elif comm.rank == number // 4 % 2:
            comm.send(pattern + number, 1 - comm.rank)
        else:
            data = np.zeros(COUNT, "float32")
            comm.recv(data, 1 - comm.rank)
            wrong += int((data != pattern + number).sum())
        longest_s = max(longest_s, time.monotonic() - start_s)
    retired = sorted({(c["purpose"], c["interface"]) for c in comm.connections() if c["retired"]})
    return {"wrong": wrong, "longest_s": longest_s, "retired": retired}


def idle(comm) -> dict[str, object]:
    """The rail breaks between two operations."""
    lossy(comm, 8)
    print("resting", flush=True)
    time.sleep(1.0)
    return lossy(comm, 8)


def unread(comm) -> dict[str, object]:
    """A peer that does not read for long is no loss."""
    count = 16_000_000
    right = True
    if comm.rank == 0:
        comm.send(np.arange(count, dtype="float32"), 1)
    else:
        time.sleep(2.0)
        data = np.zeros(count, "float32")
        comm.recv(data, 0)
        right = bool((data == np.arange(count, dtype="float32")).all())
    return {"right": right, "retired": [c["interface"] for c in comm.connections() if c["retired"]]}


def lonely(comm) -> dict[str, object]:
    """The last rail's peer dies: an error that names it, soon."""
    has_lost = np.zeros(1)
    while not has_lost[0]:  # the sides may hear of it in different rounds
        lossy(comm, 4)
        has_lost[0] = any(connection["retired"] for connection in comm.connections())
        comm.all_reduce(has_lost, op="max")
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start_s = time.monotonic()
    try:
        while True:
            comm.all_reduce(np.ones(COUNT, "float32"))
    except holmes_comm.PeerLostError as error:
        return {"peer": error.peer, "host": error.host, "seconds": time.monotonic() - start_s}


def main() -> None:
    scenario, rank = sys.argv[1], int(os.environ["RANK"])
    store = holmes_comm.TcpStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_server=rank == 0)
    nics = holmes_comm.NicSelection(nic_class="roce", max_rails=2, streams=int(os.environ.get("STREAMS", "1")))
    comm = holmes_comm.init(store, rank, 2, nics=nics, name="rails", timeout_s=DEADLINE_S)
    outcome = globals()[scenario](comm)
    print(json.dumps({"rank": rank, "name": socket.gethostname()} | outcome), flush=True)
    if scenario != "lonely":
        comm.barrier()


main()
