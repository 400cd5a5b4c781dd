"""Communicators with priorities and code points, and the packets they send: ``priority_worker.py [SUBNET]``.

Rank 0 captures what its NIC sends and receives, and prints for each communicator the code points of its packets and how
many there were, as JSON.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
from collections import Counter

import numpy as np

import holmes_comm

# Name, priority, dscp.
COMMUNICATORS = (
    ("plain", None, None),
    ("checkpoints", 0, None),
    ("data", 1, None),
    ("tensor", 2, None),
    ("pipeline", 3, None),
    ("own", 1, 46),
    ("only-dscp", None, 8),
)
_IPV4, _IPV6, _TCP = 0x0800, 0x86DD, 6


def capture(link: socket.socket, seen: Counter[tuple[int, int, int]]) -> None:
    """Counts TCP packets by both ports and code point, until the link is shut."""
    while True:
        frame = link.recv(65535)
        (kind,) = struct.unpack_from("!H", frame, 12)
        if kind == _IPV4 and frame[23] == _TCP:
            dscp, ports = frame[15] >> 2, 14 + (frame[14] & 15) * 4
        elif kind == _IPV6 and frame[20] == _TCP:
            dscp, ports = (struct.unpack_from("!I", frame, 14)[0] >> 22) & 63, 54
        else:
            continue
        seen[(*struct.unpack_from("!HH", frame, ports), dscp)] += 1


def main() -> None:
    rank = int(os.environ["RANK"])
    seen: Counter[tuple[int, int, int]] = Counter()
    if rank == 0:
        link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0003))
        link.bind(("eth0", 0))
        threading.Thread(target=capture, args=(link, seen), daemon=True).start()
    store = holmes_comm.TcpStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1, is_server=rank == 0)
    nics = holmes_comm.NicSelection(subnet=sys.argv[1]) if sys.argv[1:] else holmes_comm.NicSelection(names=("eth0",))
    found = {}
    comms = []
    for name, priority, dscp in COMMUNICATORS:
        comm = holmes_comm.init(store, rank, 2, nics=nics, name=name, priority=priority, dscp=dscp)
        data = np.full(50_000, rank + 1.0)
        comm.all_reduce(data)
        assert (data == 3).all()
        if rank == 0:
            comm.send(data, 1)
        else:
            comm.recv(data, 0)
        comm.barrier()
        ports = {
            tuple(int(c[side].rpartition(":")[2]) for side in ("local_address", "remote_address"))
            for c in comm.connections()
        }
        found[name] = ports
        comms.append(comm)
    if rank == 0:
        result = {}
        for name, ports in found.items():
            both = ports | {(there, here) for here, there in ports}
            counts: Counter[int] = Counter()
            for (source, target, dscp), count in seen.items():
                if (source, target) in both:
                    counts[dscp] += count
            result[name] = counts
        print(json.dumps(result), flush=True)
    comms[0].barrier()


main()
