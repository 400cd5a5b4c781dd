"""Several ranks on one GPU over NCCL, one process and one NCCL host id each, for gpu_check.sh.

`python benchmarks/gpu_ranks.py [--ranks N] [--dry-run] CASE`: `check` (operations against their results, streams,
groups, multiplied sums, registered buffers, shrinking), `graph` (CUDA graphs), `images` (several images on the device,
memory of each), `killed` (a killed rank ends the others). `--dry-run`: on the tests' fakes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import queue
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from gpu_memory import memory, use_fakes

DEADLINE_S = 20.0  # of a lost rank to be noticed
LIMIT_S = 240.0


def communicator(store: Any, rank: int, size: int, **options: Any) -> Any:
    import holmes_comm

    return holmes_comm.init(
        store,
        rank,
        size,
        backend="nccl",
        device=0,
        nics=options.pop("nics", holmes_comm.NicSelection(names=("lo",))),
        nccl_host_id=f"rank{rank}",
        nccl_variables={"NCCL_MNNVL_ENABLE": "0", **options.pop("nccl_variables", {})},
        timeout_s=120.0,
        **options,
    )


def meet(store: Any, what: str, rank: int, ranks: Iterable[int]) -> None:
    """Returns when all these ranks have come to `what`, a name that is used once."""
    store.set(f"{what}/{rank}", b"")
    for other in ranks:
        store.get(f"{what}/{other}", LIMIT_S)


def check(store: Any, rank: int, size: int) -> dict[str, Any]:
    comm = communicator(store, rank, size)
    place = memory(comm.device)
    total = size * (size + 1) / 2

    def same(block: Any, value: float, what: str) -> None:
        found = place.values(block)
        assert found == {value}, f"{what}: {found}, not {value}"

    data = place.make(1000003, rank + 1.0)
    comm.all_reduce(data.array)
    same(data, total, "all_reduce")
    for op, wanted in (("avg", total / size), ("max", float(size)), ("min", 1.0)):
        data = place.make(100, rank + 1.0)
        comm.all_reduce(data.array, op)
        same(data, wanted, op)
    data = place.make(100, rank + 1.0)
    comm.all_reduce(data.array, premultiply=0.5)
    same(data, total / 2, "premultiplied sum")
    parts = [place.make(1000, -1.0) for _ in range(size)]
    comm.all_gather([part.array for part in parts], place.make(1000, float(rank)).array)
    for other, part in enumerate(parts):
        same(part, float(other), "all_gather")
    share = place.make(1000, 0.0)
    comm.reduce_scatter(share.array, place.make(size * 1000, rank + 1.0).array)
    same(share, total, "reduce_scatter")
    comm.broadcast(data.array, size - 1)
    exchanged = [place.make(10, -1.0) for _ in range(size)]
    comm.all_to_all([one.array for one in exchanged], [place.make(10, float(rank)).array for _ in range(size)])
    for other, one in enumerate(exchanged):
        same(one, float(other), "all_to_all")
    mine, received = place.make(1000, float(rank)), place.make(1000, -1.0)
    peers = ("send", mine.array, (rank + 1) % size, 0), ("recv", received.array, (rank - 1) % size, 0)
    for work in comm.batch(list(peers)):
        work.wait()
    same(received, float((rank - 1) % size), "batch")
    several = [place.make(1000, rank + 1.0) for _ in range(8)]
    with comm.group():
        for one in several:
            comm.all_reduce(one.array)
    for one in several:
        same(one, total, "group")
    handle = comm.register_buffer(data.array)
    comm.all_reduce(data.array)
    comm.deregister_buffer(handle)
    comm.barrier()
    half = comm.split(rank % 2, rank)
    data = place.make(10, rank + 1.0)
    half.all_reduce(data.array)
    same(data, sum(r + 1.0 for r in range(rank % 2, size, 2)), "split")
    comm.barrier()
    if size > 2:
        # Shrinking ends the old communicator: the last rank has left it by then.
        if rank == size - 1:
            store.set("left", b"")
        else:
            store.get("left", LIMIT_S)
            rest = comm.shrink([size - 1])
            data = place.make(10, rank + 1.0)
            rest.all_reduce(data.array)
            same(data, total - size, "shrink")
            assert "shrunk from" in rest.description, rest.description
            rest.barrier()
        # Who leaves before would be a lost rank: the others would connect anew.
        meet(store, "shrunk", rank, range(size - 1))
    return {"description": comm.description}


def graph(store: Any, rank: int, size: int) -> dict[str, Any]:
    comm = communicator(store, rank, size)
    place = memory(comm.device)
    data = place.make(1000, 1.0)
    comm.all_reduce(data.array)
    place.synchronize()
    if hasattr(place, "torch"):
        captured = place.torch.cuda.CUDAGraph()
        with place.torch.cuda.graph(captured):
            comm.all_reduce(data.array)
        for _ in range(3):
            captured.replay()
    else:
        place.fake.capture(place.stream)
        comm.all_reduce(data.array)
        captured = place.fake.end_capture(place.stream)
        for _ in range(3):
            place.fake.launch(captured, place.stream)
    found = place.values(data)
    assert found == {float(size) ** 4}, found
    comm.barrier()
    return {"launches": 3}


def images(store: Any, rank: int, size: int) -> dict[str, Any]:
    """Several images on one device, their operations mixed; what each takes of the GPU's memory."""
    place = memory(0)
    used, comms = [], []
    for number in range(4):
        comms.append(communicator(store, rank, size, nccl_variables={"NCCL_HOLMES_NUMBER": str(number)}))
        data = place.make(1000, 1.0)
        comms[-1].all_reduce(data.array)
        place.synchronize()
        if hasattr(place, "torch"):
            free, total = place.torch.cuda.mem_get_info()
            used.append(total - free)
    blocks = [place.make(1 << 20, 1.0) for _ in comms]
    for _ in range(10):
        for comm, block in zip(comms, blocks, strict=True):
            comm.all_reduce(block.array)
    for block in blocks:
        assert place.values(block) == {float(size) ** 10}
    comms[0].barrier()
    grown = [(after - before) / 2**20 / size for before, after in itertools.pairwise(used)]
    return {"images": len(comms), "gpu_memory_mib_per_further_image": [round(one, 1) for one in grown]}


def killed(store: Any, rank: int, size: int) -> dict[str, Any]:
    import holmes_comm

    comm = communicator(store, rank, size)
    place = memory(comm.device)
    data = place.make(1000, 1.0)
    comm.all_reduce(data.array)
    comm.barrier()
    meet(store, "through", rank, range(size))  # who is still in the barrier would lose it there
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        comm.all_reduce(data.array, async_op=True).wait()
    except holmes_comm.CommunicatorError as error:
        seconds = time.monotonic() - start
        assert seconds < DEADLINE_S, f"{seconds:.1f} s"
        return {"noticed_after_s": round(seconds, 2), "error": f"{type(error).__name__}: {error}"}
    raise AssertionError("the lost rank was not noticed")


def _run_rank(
    body: Callable[..., Any], rank: int, size: int, port: int, results: Any, arguments: tuple[Any, ...]
) -> None:
    import holmes_comm

    store = holmes_comm.TcpStore("127.0.0.1", port)
    try:
        results.put((rank, body(store, rank, size, *arguments), ""))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)  # a GPU that hangs must not keep the process


def launch(body: Callable[..., Any], ranks: int, *arguments: Any, lost: tuple[int, ...] = ()) -> list[Any]:
    """What `body(store, rank, size, *arguments)` returns in each of so many processes; raises where one fails."""
    import holmes_comm

    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    server = holmes_comm.TcpStore("127.0.0.1", 0, is_server=True)
    processes = [
        context.Process(target=_run_rank, args=(body, rank, ranks, server.port, results, arguments), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    outcomes: dict[int, Any] = {}
    deadline = time.monotonic() + LIMIT_S
    try:
        while len(outcomes) < ranks - len(lost):
            try:
                rank, outcome, error = results.get(timeout=1.0)
            except queue.Empty:
                dead = [
                    r for r, p in enumerate(processes) if p.exitcode not in (None, 0) and r not in (*lost, *outcomes)
                ]
                if dead or time.monotonic() > deadline:
                    raise SystemExit(f"ranks {dead} died" if dead else f"not done after {LIMIT_S:g} s") from None
                continue
            if error:
                raise SystemExit(f"rank {rank}:\n{error}")
            outcomes[rank] = outcome
    finally:
        for process in processes:
            process.kill()
    return [outcomes.get(rank) for rank in range(ranks)]


def main() -> None:
    cases = {"check": check, "graph": graph, "images": images, "killed": killed}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("case", choices=list(cases))
    arguments = parser.parse_args()
    if arguments.dry_run:
        use_fakes()
    lost = (1,) if arguments.case == "killed" else ()
    print(json.dumps(launch(cases[arguments.case], arguments.ranks, lost=lost)[0], indent=1))


if __name__ == "__main__":
    main()
