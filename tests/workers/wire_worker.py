"""Two ranks in a network namespace of their own; prints what passed its loopback device, as the kernel saw it.

    wire_worker.py TLS        (the `tls` of init)

Nothing else lives in the namespace, so that every frame is theirs and the socket that captures loses none.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading

import numpy as np

import holmes_comm

MARK = b"these are the gradients of a model that is nobody's business.   "  # 64 bytes


def rank_body(store: holmes_comm.LocalStore, rank: int, tls: str, both_done: threading.Barrier) -> None:
    comm = holmes_comm.init(
        store, rank, 2, transport="tcp", name="wire", secret="the secret of the job", timeout_s=30.0, tls=tls
    )
    data = np.frombuffer(MARK * 512, "uint8").copy()
    comm.broadcast(data, 0)
    if rank == 0:
        comm.send(data, 1)
    else:
        got = np.zeros_like(data)
        comm.recv(got, 0)
        assert got.tobytes() == MARK * 512
    both_done.wait()
    comm.abort(MARK.decode())  # a control message


def main() -> None:
    sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0003))
    sniffer.bind(("lo", 0))
    sniffer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    sniffer.settimeout(0.2)
    frames: list[bytes] = []
    ranks_ended = threading.Event()

    def capture() -> None:
        while True:  # to the last frame that waits
            try:
                frames.append(sniffer.recv(1 << 17))
            except TimeoutError:
                if ranks_ended.is_set():
                    return

    store = holmes_comm.LocalStore()
    both_done = threading.Barrier(2, timeout=30)
    ranks = [threading.Thread(target=rank_body, args=(store, rank, sys.argv[1], both_done)) for rank in range(2)]
    capturing = threading.Thread(target=capture)
    for thread in (capturing, *ranks):
        thread.start()
    for thread in ranks:
        thread.join()
    ranks_ended.set()
    capturing.join()
    sol_packet, packet_statistics = 263, 6
    _, lost = struct.unpack("=II", sniffer.getsockopt(sol_packet, packet_statistics, 8))
    readable = sum(MARK[:32] in frame for frame in frames)
    print(json.dumps({"frames": len(frames), "lost": lost, "readable": readable}))


main()
