"""A rank of a job whose NCCL groups go over Holmes as NCCL's plugin: `nccl_plugin_worker.py CASE [RANK SIZE PORT]`.

Without the last three it takes them from a launcher's variables. Prints what became of it, as JSON, on the fake NCCL
and CUDA driver that the environment names.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from fake_gpu import Array

import holmes_comm
from holmes_comm import NcclSettings, NicSelection

COUNT = 500_000  # float32: 2 MB
ROUNDS = 3
TIMEOUT_S = 15.0


def place() -> tuple[int, int, holmes_comm.TcpStore]:
    if len(sys.argv) > 2:
        rank, size, port = map(int, sys.argv[2:5])
        return rank, size, holmes_comm.TcpStore("127.0.0.1", port)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1
    return rank, size, holmes_comm.TcpStore(address, port, is_server=rank == 0)


RANK, SIZE, STORE = place()


def make(*nics: str, name: str = "test", max_rails: int | None = None, **options):
    options = {"timeout_s": TIMEOUT_S, "connect_timeout_s": TIMEOUT_S, "nccl": NcclSettings(net="holmes"), **options}
    selection = NicSelection(names=nics, max_rails=max_rails) if nics else None
    return holmes_comm.init(STORE, RANK, SIZE, backend="nccl", device=0, nics=selection, name=name, **options)


def sums_are_right(comm, rounds: int = ROUNDS) -> bool:
    """all_reduce, all_gather and a message, each compared with what it should be."""
    pattern = np.arange(COUNT, dtype="float32") % 1000
    right = True
    for number in range(rounds):
        data = Array(pattern + comm.rank + number, 0)
        comm.all_reduce(data, async_op=True).wait()
        wanted = comm.size * (pattern + number) + sum(range(comm.size))
        right = right and bool((data.values == wanted).all())
    parts = [Array(np.zeros(1001), 0) for _ in range(comm.size)]
    comm.all_gather(parts, Array(np.full(1001, comm.rank + 1.0), 0), async_op=True).wait()
    right = right and all(set(part.values) == {peer + 1.0} for peer, part in enumerate(parts))
    if comm.size == 2:
        data = Array(np.full(3, comm.rank + 1.0), 0)
        if comm.rank == 0:
            comm.send(data, 1, async_op=True).wait()
        else:
            comm.recv(data, 0, async_op=True).wait()
            right = right and set(data.values) == {1.0}
    return right


def sent_bytes(interface: str) -> int:
    """What left over an interface of this process's network."""
    with open("/proc/net/dev") as file:
        for line in file:
            name, _, numbers = line.partition(":")
            if name.strip() == interface:
                return int(numbers.split()[8])
    raise LookupError(interface)


def case_plain() -> dict[str, object]:
    comm = make("lo")
    return {"description": comm.description, "right": sums_are_right(comm)}


def case_image() -> dict[str, object]:
    comm = make("lo", nccl_variables={"NCCL_HOLMES_NUMBER": "1"})
    return {"description": comm.description, "right": sums_are_right(comm)}


def case_no_rendezvous() -> dict[str, object]:
    make("lo", nccl_variables={"NCCL_SOCKET_IFNAME": "none"})
    return {}


def case_variables() -> dict[str, object]:
    comm = make("lo", nccl=None)
    return {"description": comm.description, "right": sums_are_right(comm)}


def case_contradiction() -> dict[str, object]:
    make("lo", nccl_variables={"NCCL_NET": "Socket"})
    return {}


def case_late() -> dict[str, object]:
    comm = make("lo", name="early", nccl=None)
    os.environ["NCCL_NET_PLUGIN"] = "holmes"
    try:
        make("lo", name="late")
    except holmes_comm.CommunicatorError as error:
        return {"error": type(error).__name__, "message": str(error), "description": comm.description}
    return {}


def case_any_nic() -> dict[str, object]:
    """Where no NIC is asked for, NCCL_NET_PLUGIN=holmes is no transport of the site's own."""
    comm = make()
    return {"description": comm.description, "right": sums_are_right(comm)}


def case_two_nics() -> dict[str, object]:
    """Two communicators of one process, each on its own interface."""
    found: dict[str, object] = {"right": True}
    comms = {nic: make(nic, name=nic) for nic in ("e0", "e1")}
    for nic, comm in comms.items():
        comm.barrier()
        before = {one: sent_bytes(one) for one in comms}
        found["right"] = sums_are_right(comm) and found["right"]
        comm.barrier()
        found[nic] = {one: sent_bytes(one) - before[one] for one in comms}
        found[f"{nic} is"] = comm.description
    # Beside each other, and once more after one of them has ended.
    works = []
    for number in range(5):
        for comm in comms.values():
            data = Array(np.full(10_000, float(number + comm.rank)), 0)
            works.append((comm.all_reduce(data, async_op=True), data, 2.0 * number + 1))
    for work, data, wanted in works:
        work.wait()
        found["right"] = found["right"] and set(data.values) == {wanted}
    del comms["e0"], comm
    found["right"] = sums_are_right(comms["e1"], 1) and found["right"]
    return found


def case_rails() -> dict[str, object]:
    """One communicator striped over both."""
    comm = make("e0", "e1", max_rails=2)
    before = {one: sent_bytes(one) for one in ("e0", "e1")}
    right = sums_are_right(comm)
    comm.barrier()
    return {
        "right": right,
        "description": comm.description,
        "sent": {one: sent_bytes(one) - before[one] for one in before},
    }


def case_rail_lost() -> dict[str, object]:
    """As rails, while the test takes one of the two away."""
    comm = make("e0", "e1", max_rails=2)
    right, longest_s = True, 0.0
    for number in range(60):
        if RANK == 0:
            print(f"operation {number}", flush=True)
        start_s = time.monotonic()
        data = Array(np.full(COUNT, float(number + RANK), "float32"), 0)
        comm.all_reduce(data, async_op=True).wait()
        right = right and set(data.values) == {2.0 * number + 1}
        longest_s = max(longest_s, time.monotonic() - start_s)
    return {"right": right, "longest_s": longest_s}


def case_torch() -> dict[str, object]:
    """Two process groups, by HOLMES_NCCL_NET."""
    import torch.distributed as dist

    sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
    from cuda_ranks import Gpu

    from holmes_comm import torch_backend

    dist.init_process_group("holmes")
    gpu = Gpu(0)
    found: dict[str, object] = {"right": True}
    everyone = list(range(SIZE))
    groups = {nic: dist.new_group(everyone, pg_options=NicSelection(names=(nic,))) for nic in ("e0", "e1")}
    for nic, group in groups.items():
        for number in range(ROUNDS + 1):
            if number == 1:
                before = {one: sent_bytes(one) for one in groups}
            data = gpu.full(COUNT, RANK + 1.0)
            dist.all_reduce(data, group=group)
            found["right"] = found["right"] and set(gpu.result(data)) == {SIZE * (SIZE + 1) / 2}
        dist.barrier(group)
        found[nic] = {one: sent_bytes(one) - before[one] for one in groups}
        found[f"{nic} is"] = "; ".join(torch_backend.device_descriptions(group))
    dist.barrier()
    return found


def case_split() -> dict[str, object]:
    """What is split off is on the same NIC."""
    comm = make("e1")
    part = comm.split(0, -comm.rank)
    assert part.rank == SIZE - 1 - comm.rank
    before = {one: sent_bytes(one) for one in ("e0", "e1")}
    right = sums_are_right(part)
    part.barrier()
    sent = {one: sent_bytes(one) - before[one] for one in before}
    return {"right": right and sums_are_right(comm, 1), "description": part.description, "sent": sent}


def case_shrink() -> dict[str, object]:
    """Rank 2 leaves."""
    comm = make("lo")
    right = sums_are_right(comm, 1)
    if RANK == 2:
        STORE.set("left", b"")
        return {"right": right}
    rest = comm.shrink([2])
    return {"right": right and sums_are_right(rest, 1), "description": rest.description}


def case_failing() -> dict[str, object]:
    """Fifty times a communicator whose set-up fails on one rank; what is open before and after, and one that works."""
    counts = []
    for number in range(51):
        try:
            make("lo", name=f"f{number}", nccl=NcclSettings(net="holmes" if RANK == 0 else "socket"))
            raise AssertionError("made")
        except holmes_comm.UsageError:
            pass
        if number in (0, 50):
            time.sleep(0.5)
            counts.append(len(os.listdir("/proc/self/fd")))
    return {"open": counts, "right": sums_are_right(make("lo"), 1)}


def case_killed() -> dict[str, object]:
    """Rank 1 is killed in mid-operation."""
    comm = make("e1")
    sums_are_right(comm, 1)
    comm.barrier()
    if RANK == 1:
        STORE.get("begun", TIMEOUT_S)  # otherwise it could die while rank 0 is still in the barrier
        os.kill(os.getpid(), signal.SIGKILL)
    STORE.set("begun", b"")
    start_s = time.monotonic()
    try:
        while True:
            comm.all_reduce(Array(np.ones(COUNT), 0), async_op=True).wait()
    except holmes_comm.CommunicatorError as error:
        seconds = time.monotonic() - start_s
        return {
            "error": type(error).__name__,
            "message": str(error),
            "seconds": seconds,
            "host": error.host,
            "peer": error.peer,
            "nic": error.nic,
        }


def case_churn() -> dict[str, object]:
    """A hundred communicators, one after the other; what is open before and after."""
    counts = []
    for number in range(101):
        comm = make("lo", name=f"c{number}")
        data = Array(np.full(10, comm.rank + 1.0), 0)
        comm.all_reduce(data, async_op=True).wait()
        assert set(data.values) == {3.0}
        comm.barrier()
        del comm
        if number in (0, 100):
            time.sleep(1.0)  # NCCL's end is another thread's
            counts.append(len(os.listdir("/proc/self/fd")))
    return {"open": counts}


def main() -> None:
    try:
        outcome = globals()[f"case_{sys.argv[1]}"]()
    except holmes_comm.HolmesError as error:
        outcome = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(outcome), flush=True)
    STORE.set(f"done/{RANK}", b"")
    if RANK == 0 and sys.argv[1] not in ("killed", "shrink") and "error" not in outcome:
        for rank in range(SIZE):
            STORE.get(f"done/{rank}", 30.0)
    os._exit(0)


if __name__ == "__main__":
    main()
