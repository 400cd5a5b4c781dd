"""NCCL's own host half behind Holmes' NCCL backend, without a GPU: `real_nccl.sh SOURCE` builds both and starts this.

Three ranks on nodes of an emulated testbed (network namespaces, no root needed), two interfaces each. Every rank makes
a communicator for each interface in one process, sends messages over both, then makes a group (split) and a smaller one
(shrink), and aborts all. What is checked: of the sockets that NCCL opened for a communicator, bootstrap and transport,
none stands on another interface than the communicator's; nor do the messages' bytes, by the kernel's counters; what
arrives is right; a kernel that nothing stands in for is refused with CUDA's error on every rank; what is aborted leaves
no socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpu_interfaces import INTERFACES, run_on_nodes, sent_bytes
from gpu_memory import FakeMemory
from gpu_ranks import communicator, meet

RANKS = 3
WAIT_S = 60.0
MESSAGE_BYTES = 16 << 20
SIMPLE = {"NCCL_PROTO": "Simple", "NCCL_P2P_LL_THRESHOLD": "0"}  # the protocol of the stand-in kernel
SIOCGIFADDR = 0x8915


def sockets() -> dict[str, str]:
    """The local address of each TCP socket of this process, by the socket's inode."""
    mine = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            mine.add(os.readlink(path))
    found = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, *_, inode = line.split()[:10]
        if f"socket:[{inode}]" in mine:
            found[inode] = socket.inet_ntoa(struct.pack("=I", int(local.split(":")[0], 16)))
    return found


def address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        request = fcntl.ioctl(one, SIOCGIFADDR, struct.pack("256s", interface.encode()))
    return socket.inet_ntoa(request[20:24])


class Seen:
    """What each step opened, by interface."""

    def __init__(self) -> None:
        self.names = {address_of(name): name for name in INTERFACES}
        self.rows: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def step(self, what: str, interface: str) -> Iterator[None]:
        """Checks that what its body opens is on this interface, and notes what each one sent."""
        before, bytes_before = sockets(), sent_bytes()
        yield
        opened = [local for inode, local in sockets().items() if inode not in before]
        counts, after = Counter(self.names.get(local, local) for local in opened), sent_bytes()
        sent = {name: after[name] - bytes_before[name] for name in INTERFACES}
        self.rows.append({"step": what, "interface": interface, "sockets": dict(counts), "sent_bytes": sent})
        assert set(counts) <= {interface}, (what, interface, opened)


def refused(call: Callable[[], Any], words: str) -> str:
    """The error of an operation that no device can run."""
    import holmes_comm

    try:
        call()
    except holmes_comm.HolmesError as error:
        said = str(error)
    else:
        said = "nothing"
    assert words in said, said
    return said


def pass_around(place: FakeMemory, comm: Any, rank: int, size: int) -> None:
    """Every rank's message to the next one, of several sizes; what arrives is compared."""
    for count in (1, 1000, MESSAGE_BYTES // 4):
        mine, received = place.make(count, rank + 1.0), place.make(count, -1.0)
        peers = ("send", mine.array, (rank + 1) % size, 0), ("recv", received.array, (rank - 1) % size, 0)
        for work in comm.batch(list(peers)):
            work.wait()
        assert place.values(received) == {(rank - 1) % size + 1.0}, count


def run_rank() -> None:
    import holmes_comm

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = holmes_comm.TcpStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_server=rank == 0)
    place = FakeMemory(0)
    seen = Seen()
    comms = {}
    for name in INTERFACES:
        with seen.step("init", name):
            comms[name] = communicator(
                store,
                rank,
                size,
                name=name,
                nics=holmes_comm.NicSelection(names=(name,)),
                nccl_variables={"NCCL_HOLMES_NUMBER": name, "NCCL_RUNTIME_CONNECT": "0", **SIMPLE},
            )
    descriptions = {name: comm.description for name, comm in comms.items()}
    first, second = comms[INTERFACES[0]], comms[INTERFACES[1]]
    meet_all = functools.partial(meet, store, rank=rank, ranks=range(size))

    with seen.step("split", INTERFACES[1]):
        part = second.split(rank % 2, rank)
    for name, comm in comms.items():
        with seen.step("messages", name):
            pass_around(place, comm, rank, size)
            meet_all(f"passed/{name}")
        sent = seen.rows[-1]["sent_bytes"]
        assert sent[name] > MESSAGE_BYTES, sent
        assert sum(sent.values()) - sent[name] < MESSAGE_BYTES / 100, sent
    with seen.step("shrink", INTERFACES[0]):
        rest = None if rank == size - 1 else first.shrink([size - 1])
        meet_all("shrunk")
    with seen.step("operation", INTERFACES[1]):
        data = place.make(1 << 10, 1.0)
        said = refused(functools.partial(second.all_reduce, data.array), "CUDA_ERROR_NO_BINARY_FOR_GPU")
        meet_all("refused")
    kept = len(sockets())
    if rest is not None:
        rest.abort()
    part.abort()
    second.abort()
    del part, second, rest, first
    comms.clear()
    meet_all("ended")
    # An abort ends NCCL's communicator on a thread of its own. The store's sockets stay.
    deadline = time.monotonic() + WAIT_S
    while len(sockets()) > kept / 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    left = len(sockets())
    assert left <= kept / 4, (kept, left)
    if rank == 0:
        report = {"communicators": descriptions, "steps": seen.rows, "operation": said, "sockets": [kept, left]}
        print(json.dumps(report, indent=1), flush=True)
    # Who serves the store leaves last.
    meet(store, "done", rank, range(size) if rank == 0 else ())
    os._exit(0)


def main() -> None:
    if "RANK" in os.environ:
        run_rank()
        return
    sys.exit(run_on_nodes(__file__, RANKS))


if __name__ == "__main__":
    main()
