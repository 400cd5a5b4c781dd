"""What the ranks of test_c10d_cuda.py do, each a process with a (fake) GPU of its own number."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import fake_gpu
import torch
import torch.distributed as dist
from torch_ranks import init

import holmes_comm
from holmes_comm import torch_backend


class Gpu:
    """This rank's GPU: tensors, streams. Tensors are looked at without waiting for anything."""

    def __init__(self, rank: int) -> None:
        self.fake = fake_gpu.load_module("fake_torch_cuda")
        self.number = rank
        self.fake.use_device(rank)
        torch.cuda.get_device_capability = lambda device=None: (8, 0)  # broadcast asks for it

    def tensor(self, values) -> torch.Tensor:
        return self.fake.tensor(torch.as_tensor(values), self.number)

    def full(self, count: int, value: float, dtype=torch.float32) -> torch.Tensor:
        return self.tensor(torch.full((count,), value, dtype=dtype))

    def values(self, tensor: torch.Tensor) -> list:
        return self.fake.values(tensor).flatten().tolist()

    def use_stream(self) -> int:
        """A new stream, from now on the current one."""
        stream = fake_gpu.make_stream()
        self.fake.set_stream(self.number, stream)
        return stream

    def done(self) -> None:
        fake_gpu.synchronize(self.fake.current_stream(self.number))

    def result(self, tensor: torch.Tensor) -> list:
        self.done()
        return self.values(tensor)


def start(rank, size, store, backend="cpu:holmes,cuda:holmes", **options):
    init(store, rank, size, backend, **options)
    return Gpu(rank)


def collectives(rank, size, store):
    gpu = start(rank, size, store)
    total = size * (size + 1) / 2
    on_cpu = torch.full((5,), rank + 1.0)
    dist.all_reduce(on_cpu)
    assert set(on_cpu.tolist()) == {total}

    data = gpu.full(1000, rank + 1.0)
    dist.all_reduce(data)
    assert set(gpu.result(data)) == {total}
    for op, wanted in ((dist.ReduceOp.AVG, total / size), (dist.ReduceOp.MAX, size), (dist.ReduceOp.PRODUCT, 6.0)):
        data = gpu.full(10, rank + 1.0)
        dist.all_reduce(data, op)
        assert set(gpu.result(data)) == {wanted}, (op, gpu.values(data))
    for factor in (0.5, torch.tensor(0.25)):
        data = gpu.full(10, rank + 1.0)
        dist.all_reduce(data, dist._make_nccl_premul_sum(factor))
        assert set(gpu.result(data)) == {float(factor) * total}, (factor, gpu.values(data), rank)
    dist.broadcast(data, 1)
    data = gpu.full(10, float(rank))
    dist.broadcast(data, 1)
    assert set(gpu.result(data)) == {1.0}
    data = gpu.full(10, rank + 1.0)
    dist.reduce(data, 2)
    assert set(gpu.result(data)) == {total if rank == 2 else rank + 1.0}

    gathered = gpu.full(4 * size, -1.0)
    dist.all_gather_into_tensor(gathered, gpu.full(4, float(rank)))
    assert gpu.result(gathered) == [float(r) for r in range(size) for _ in range(4)]
    parts = [gpu.full(4, -1.0) for _ in range(size)]
    dist.all_gather(parts, gpu.full(4, float(rank)))
    assert [gpu.result(part) for part in parts] == [[float(r)] * 4 for r in range(size)]
    if rank == 0:  # the others' lie apart
        parts = [torch.as_strided(gathered, (4,), (1,), 4 * r) for r in range(size)]
    dist.all_gather(parts, gpu.full(4, rank + 3.0))
    assert [gpu.result(part) for part in parts] == [[r + 3.0] * 4 for r in range(size)]
    share = gpu.full(4, -1.0)
    dist.reduce_scatter_tensor(share, gpu.tensor(torch.arange(4.0 * size)))
    assert gpu.result(share) == [size * (4.0 * rank + i) for i in range(4)]
    dist.reduce_scatter(share, [gpu.full(4, float(r)) for r in range(size)])
    assert set(gpu.result(share)) == {float(size * rank)}
    exchanged = gpu.full(2 * size, -1.0)
    dist.all_to_all_single(exchanged, gpu.full(2 * size, float(rank)))
    assert gpu.result(exchanged) == [float(r) for r in range(size) for _ in range(2)]
    dist.gather(gpu.full(3, float(rank)), parts3 := ([gpu.full(3, -1.0) for _ in range(size)] if rank == 0 else None))
    if rank == 0:
        assert [gpu.result(part) for part in parts3] == [[float(r)] * 3 for r in range(size)]
    dist.scatter(share, [gpu.full(4, r + 7.0) for r in range(size)] if rank == 1 else None, src=1)
    assert set(gpu.result(share)) == {rank + 7.0}
    dist.barrier()

    # A transposed tensor goes through a contiguous copy, and back.
    matrix = gpu.tensor(torch.arange(6.0).reshape(2, 3))
    flipped = torch.as_strided(matrix, (3, 2), (1, 3))
    assert not flipped.is_contiguous()
    dist.all_reduce(flipped)
    assert gpu.result(matrix) == [size * float(i) for i in range(6)]
    unknown = gpu.tensor(torch.tensor([rank + 500] * 8, dtype=torch.uint16))  # moved as bytes
    dist.broadcast(unknown, 2)
    assert set(gpu.result(unknown)) == {502}

    small = dist.new_group([0, 2])
    if rank != 1:
        data = gpu.full(7, rank + 1.0)
        dist.all_reduce(data, group=small)
        assert set(gpu.result(data)) == {4.0}
    described = torch_backend.device_descriptions()
    assert len(described) == 1, described
    assert "NCCL" in described[0], described
    assert "Socket over lo" in described[0], described


def streams(rank, size, store):
    """The current stream waits, the host does not; a future's callbacks run behind the operation."""
    gpu = start(rank, size, store)
    dist.all_reduce(gpu.full(1, 1.0))  # connects
    dist.barrier()
    busy = gpu.use_stream()
    data, after = gpu.full(100, rank + 1.0), gpu.full(100, 0.0)
    fake_gpu.keep_busy(busy, 300)
    begin = time.monotonic()
    work = dist.all_reduce(data, async_op=True)
    assert not work.is_completed()
    work.wait()
    assert time.monotonic() - begin < 0.2, "the host waited"
    assert set(gpu.values(data)) == {rank + 1.0}, "it ran before what its stream has"
    after.copy_(data)  # the fake's copy waits for the stream
    assert set(gpu.values(after)) == {3.0}
    assert time.monotonic() - begin > 0.25

    # A deadline makes the host wait.
    fake_gpu.keep_busy(busy, 100)
    work = dist.all_reduce(data, async_op=True)
    work.wait(torch.distributed.constants.default_pg_timeout)
    assert set(gpu.values(data)) == {6.0}
    assert work.is_completed()

    # An operation that is not asynchronous runs on the stream itself.
    fake_gpu.keep_busy(busy, 50)
    dist.all_reduce(data)
    assert set(gpu.result(data)) == {12.0}

    # Another stream that waits for the work, not for the first stream.
    fake_gpu.keep_busy(busy, 50)
    work = dist.all_reduce(data, async_op=True)
    gpu.use_stream()
    work.wait()
    assert set(gpu.result(data)) == {24.0}

    fake_gpu.keep_busy(busy, 50)
    future = dist.all_reduce(data, async_op=True).get_future()
    assert future.done()
    seen = []
    scaled = future.then(lambda done: seen.append(gpu.result(done.value()[0])) or done.value()[0])
    scaled.wait()
    assert set(seen[0]) == {48.0}, seen
    future.wait()
    assert set(gpu.result(data)) == {48.0}

    fake_gpu.keep_busy(busy, 50)
    gpu.fake.set_stream(gpu.number, busy)
    work = dist.all_reduce(data, async_op=True)
    gpu.use_stream()
    begin = time.monotonic()
    work.block_current_stream()
    assert time.monotonic() - begin < 0.04, "the host waited"
    assert set(gpu.result(data)) == {96.0}

    # A result that is copied back is there for every stream that waits.
    matrix = gpu.tensor(torch.ones(2, 3))
    flipped = torch.as_strided(matrix, (3, 2), (1, 3))
    work = dist.all_reduce(flipped, async_op=True)
    work.wait()
    gpu.use_stream()
    work.wait()
    assert set(gpu.result(matrix)) == {2.0}
    fake_gpu.keep_busy(gpu.use_stream(), 100)
    begin = time.monotonic()
    dist.barrier(async_op=True).wait()  # behind what the GPU has
    assert time.monotonic() - begin > 0.08


def freed(rank, size, store):
    """A tensor is let go of once the stream waits for the operation beside it: that wait alone orders its next use."""
    gpu = start(rank, size, store)
    dist.all_reduce(gpu.full(1, 1.0))  # connects
    gpu.use_stream()
    data = gpu.full(100, 1.0)
    work = dist.all_reduce(data, async_op=True)
    work.wait()
    del data, work
    gpu.done()


def memory(rank, size, store):
    """Tensors that the caller lets go of: kept as long as their operation needs them, and not longer."""
    gpu = start(rank, size, store)
    busy = gpu.use_stream()
    count = 100_000
    dist.all_reduce(gpu.full(count, 1.0))  # connects
    gpu.done()

    # A host that runs ahead: what runs on the tensors' own stream holds none of them.
    fake_gpu.keep_busy(busy, 200)
    gpu.fake.take_peak_bytes()
    before = gpu.fake.take_peak_bytes()
    for _ in range(20):
        dist.all_reduce(gpu.full(count, 1.0))
    used_bytes = gpu.fake.take_peak_bytes() - before
    assert used_bytes <= 2 * 4 * count, used_bytes
    fake_gpu.keep_busy(busy, 200)
    for _ in range(20):
        with dist.distributed_c10d._coalescing_manager(device=torch.device("cuda", rank)):
            for _ in range(2):
                dist.all_reduce(gpu.full(count, 1.0))
    used_bytes = gpu.fake.take_peak_bytes() - before
    assert used_bytes <= 4 * 4 * count, used_bytes
    gpu.done()

    # Nor do those beside it, once it has waited for them.
    fake_gpu.keep_busy(busy, 200)
    for _ in range(20):
        dist.all_reduce(gpu.full(count, 1.0), async_op=True).wait()
    used_bytes = gpu.fake.take_peak_bytes() - before
    assert used_bytes <= 2 * 4 * count, used_bytes
    gpu.done()

    # One call of NCCL needs no group.
    fake_gpu.take_calls()
    dist.all_reduce(data := gpu.full(count, 1.0))
    dist.all_gather_into_tensor(gpu.full(count * size, 0.0), data)
    dist.reduce_scatter_tensor(gpu.full(count, 0.0), gpu.full(count * size, 0.0))
    calls = {name: number for name, number in fake_gpu.take_calls().items() if name.startswith("nccl")}
    assert calls == {"ncclAllReduce": 1, "ncclAllGather": 1, "ncclReduceScatter": 1}, calls
    gpu.done()

    # Beside the stream an operation holds its tensors, also while its work is gone.
    total = gpu.full(count, 0.0)
    for _ in range(5):
        fake_gpu.keep_busy(busy, 10)
        contribution = gpu.full(count, rank + 1.0)
        dist.all_gather_into_tensor(total := gpu.full(count * size, 0.0), contribution, async_op=True)
        del contribution
    last = dist.all_gather_into_tensor(total, gpu.full(count, 3.0), async_op=True)
    last.wait()
    assert set(gpu.result(total)) == {3.0}

    # So it does in a graph.
    outputs = [gpu.full(4 * size, 0.0) for _ in range(3)]
    fake_gpu.capture(busy)
    works = []
    for number, output in enumerate(outputs):
        contribution = gpu.full(4, 10.0 * number + rank)
        works.append(dist.all_gather_into_tensor(output, contribution, async_op=True))
        del contribution
    del works[:2]  # only the last one is waited for: they run one after the other
    works[0].wait()
    graph = fake_gpu.end_capture(busy)
    fake_gpu.launch(graph, busy)
    for number, output in enumerate(outputs):
        assert gpu.result(output) == [10.0 * number + r for r in range(size) for _ in range(4)], gpu.values(output)
    dist.barrier()


def point_to_point(rank, size, store):
    gpu = start(rank, size, store)
    # Only two ranks take part.
    if rank == 0:
        dist.send(gpu.full(10, 5.0), 2)
    elif rank == 2:
        data = gpu.full(10, 0.0)
        dist.recv(data, 0)
        assert set(gpu.result(data)) == {5.0}
    mine, other = gpu.full(100, float(rank)), gpu.full(100, -1.0)
    ring = [dist.P2POp(dist.isend, mine, (rank + 1) % size), dist.P2POp(dist.irecv, other, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    assert set(gpu.result(other)) == {float((rank - 1) % size)}
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, other, rank), dist.P2POp(dist.isend, mine, rank)]):
        work.wait()
    assert set(gpu.result(other)) == {float(rank)}
    data = [gpu.full(5, rank + 1.0) for _ in range(3)]
    with dist.distributed_c10d._coalescing_manager(device=mine.device, async_ops=True) as block:
        for one in data:
            dist.all_reduce(one)
    block.wait()
    assert [set(gpu.result(one)) for one in data] == [{6.0}] * 3
    with dist.distributed_c10d._coalescing_manager():
        for one in data:
            dist.all_reduce(one)
    assert [set(gpu.result(one)) for one in data] == [{18.0}] * 3
    outputs = [gpu.full(2 * size, 0.0) for _ in range(2)]
    dist.group.WORLD.allgather_into_tensor_coalesced(outputs, [gpu.full(2, float(rank)) for _ in outputs]).wait()
    assert [gpu.result(one) for one in outputs] == [[float(r) for r in range(size) for _ in range(2)]] * 2
    dist.barrier()


def independent(rank, size, store):
    """Operations of several communicators do not wait for each other."""
    gpu = start(rank, size, store, timeout_s=10.0)
    before, behind = (rank - 1) % size, (rank + 1) % size
    data, mine, received = gpu.full(4, 1.0), gpu.full(4, float(rank)), gpu.full(4, -1.0)
    dist.all_reduce(data)
    for first, second in ((0, 1), (1, 2), (0, 2)):  # connects each pair
        if rank == first:
            dist.send(mine, second)
        elif rank == second:
            dist.recv(received, first)
    # A ring in which all receive first.
    works = [dist.irecv(received, before), dist.isend(mine, behind)]
    for work in works:
        work.wait()
    assert set(gpu.result(received)) == {float(before)}
    # A receive that is posted early holds up no collective.
    received = gpu.full(4, -1.0)
    early = dist.irecv(received, before)
    dist.all_reduce(data)
    assert set(gpu.result(data)) == {9.0}
    dist.isend(mine, behind).wait()
    early.wait()
    assert set(gpu.result(received)) == {float(before)}
    dist.barrier()


def clusters(rank, size, store):
    """Ranks 0 and 1 are one cluster, rank 2 another: messages to and from it are the host communicator's."""
    options = holmes_comm.GroupOptions(cluster="b" if rank == 2 else "a")
    gpu = start(rank, size, store, pg_options=options)

    def sent_bytes():
        return sum(connection["sent_bytes"] for connection in torch_backend.connections())

    before, count = sent_bytes(), 1 << 20
    if rank == 0:
        dist.send(gpu.full(count, 5.0), 2)
        dist.send(gpu.full(count, 6.0), 1)
    else:
        data = gpu.full(count, 0.0)
        dist.recv(data, 0)
        # Between clusters the host waits; inside one the stream does.
        assert set(gpu.values(data) if rank == 2 else gpu.result(data)) == {5.0 if rank == 2 else 6.0}
    if rank == 0:
        assert 4 * count <= sent_bytes() - before < 8 * count  # one of the two messages
    # All in one block, some of each kind, one of them not contiguous.
    mine, others = gpu.full(1000, float(rank)), [gpu.full(1000, -1.0) for _ in range(size)]
    strided = gpu.tensor(torch.full((1000, 2), -1.0))[:, 0]
    others[2] = strided if rank == 0 else others[2]
    block = [dist.P2POp(dist.isend, mine, peer) for peer in range(size) if peer != rank]
    block += [dist.P2POp(dist.irecv, others[peer], peer) for peer in range(size) if peer != rank]
    for work in dist.batch_isend_irecv(block):
        work.wait()
    for peer in range(size):
        assert peer == rank or set(gpu.result(others[peer])) == {float(peer)}, peer
    data = gpu.full(10, 1.0)
    dist.all_reduce(data)
    assert set(gpu.result(data)) == {float(size)}
    dist.barrier()


def refusal(call):
    try:
        call()
    except (RuntimeError, holmes_comm.HolmesError) as error:
        return error
    raise AssertionError("no error where one is due")


def errors(rank, size, store):
    gpu = start(rank, size, store, timeout_s=20.0)
    stream = gpu.use_stream()
    fake_gpu.capture(stream)
    assert "run one before" in str(refusal(lambda: dist.all_reduce(gpu.full(1, 1.0))))
    fake_gpu.end_capture(stream)
    dist.all_reduce(gpu.full(1, 1.0))
    other = gpu.fake.tensor(torch.ones(3), 5)
    cases = [
        (lambda: dist.all_reduce(other), "one device per process"),
        (lambda: dist.all_gather([gpu.full(3, 0.0), torch.ones(3)], gpu.full(3, 1.0)), "tensors of one device"),
        (lambda: dist.send(gpu.full(3, 0.0), 1 - rank, tag=3), "no tags"),
        (lambda: dist.all_reduce(gpu.tensor(torch.ones(3, dtype=torch.int16))), "int16"),
        (lambda: dist.recv(gpu.full(3, 0.0)), "name the source"),
        # Counts that do not fit would have NCCL write past the output.
        (lambda: dist.all_gather_into_tensor(gpu.full(6, 0.0), gpu.full(4, 1.0)), "must be equal"),
        (lambda: dist.all_gather([gpu.full(3, 0.0) for _ in range(size)], gpu.full(4, 1.0)), "must be equal"),
        (lambda: dist.reduce_scatter_tensor(gpu.full(3, 0.0), gpu.full(8, 1.0)), "must be equal"),
        (lambda: dist.gather(gpu.full(4, 1.0), [gpu.full(3, 0.0) for _ in range(size)], rank), "must be equal"),
        (lambda: dist.scatter(gpu.full(3, 0.0), [gpu.full(4, 1.0) for _ in range(size)], rank), "must be equal"),
        (lambda: dist.all_to_all_single(gpu.full(6, 0.0), gpu.full(8, 1.0)), "must be equal"),
        (lambda: dist.all_to_all_single(gpu.full(6, 0.0), gpu.full(6, 1.0), [3, 3], [3, 4]), "sum to the number"),
        (lambda: dist.all_to_all([gpu.full(3, 0.0) for _ in range(size)], [gpu.full(4, 1.0)] * size), "must be equal"),
    ]
    for call, text in cases:
        error = refusal(call)
        assert text in str(error), (text, error)
    # Capture: what is captured runs at each launch.
    data = gpu.full(4, 1.0)
    fake_gpu.capture(stream)
    dist.all_reduce(data)
    graph = fake_gpu.end_capture(stream)
    fake_gpu.launch(graph, stream)
    fake_gpu.launch(graph, stream)
    assert set(gpu.result(data)) == {4.0}
    dist.barrier()
    # A shut group says so; another one works.
    group = dist.new_group([0, 1])
    dist.all_reduce(gpu.full(1, 1.0), group=group)
    dist.barrier()
    if rank == 0:
        group._get_backend(torch.device("cuda")).abort()
    deadline = time.monotonic() + 10
    seen = ""
    while not seen and time.monotonic() < deadline:
        try:
            dist.all_reduce(gpu.full(1, 1.0), group=group)
            time.sleep(0.01)
        except holmes_comm.HolmesError as error:
            seen = str(error)
    assert "aborted" in seen, seen
    data = gpu.full(4, 1.0)
    dist.all_reduce(data)
    assert set(gpu.result(data)) == {2.0}


def meet(store, name, rank, size):
    """All are here; unlike after a collective, nobody has anything left to do."""
    at = dist.PrefixStore(f"met/{name}", store)
    at.set(str(rank), "")
    at.wait([str(one) for one in range(size)])


def everything(rank, size, store):
    """All of the above in one set of processes: starting torch takes longest. Some need two ranks."""
    for number, (body, ranks) in enumerate(
        ((collectives, 3), (streams, 2), (memory, 2), (point_to_point, 3), (independent, 3), (clusters, 3), (errors, 2))
    ):
        if rank < ranks:
            body(rank, ranks, dist.PrefixStore(f"{body.__name__}{number}", store))
            meet(store, f"{body.__name__}{number}", rank, ranks)
            dist.destroy_process_group()
    meet(store, "finished", rank, size)


def late(rank, size, store):
    """A rank may come late to the first operation on a GPU; with a device_id all connect at once."""
    torch_backend._CONNECT_TIMEOUT = timedelta(seconds=1)
    gpu = start(rank, size, dist.PrefixStore("late", store), timeout_s=20.0)
    data = gpu.full(4, 1.0)
    time.sleep(2.5 * rank)
    dist.all_reduce(data)
    assert set(gpu.result(data)) == {float(size)}
    os.environ["HOLMES_CONNECT_TIMEOUT_S"] = "0.5"
    group = dist.new_group(list(range(size)))
    if rank == 0:
        begin = time.monotonic()
        error = refusal(lambda: dist.all_reduce(data, group=group))
        assert isinstance(error, holmes_comm.TimeoutError), error
        assert time.monotonic() - begin < 5
    del os.environ["HOLMES_CONNECT_TIMEOUT_S"]
    meet(store, "late", rank, size)
    dist.destroy_process_group()

    device = torch.device("cuda", rank)
    torch.accelerator.current_accelerator = lambda *_: device  # a torch without CUDA has none
    torch.accelerator.device_count = lambda: 8
    gpu = start(rank, size, dist.PrefixStore("eager", store), device_id=device)
    assert len(torch_backend.device_descriptions()) == 1
    subgroup = dist.new_group([0])
    if rank == 0:
        assert len(torch_backend.device_descriptions(subgroup)) == 1
    dist.all_reduce(data)
    assert set(gpu.result(data)) == {float(size * size)}
    dist.barrier()


def lost_rank(rank, size, store):
    gpu = start(rank, size, store, timeout_s=60.0)
    data = gpu.full(4, 1.0)
    dist.all_reduce(data)
    dist.barrier()
    meet(store, "lost", rank, size)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    error = refusal(lambda: dist.all_reduce(data, async_op=True).wait(torch.distributed.constants.default_pg_timeout))
    assert time.monotonic() - begin < 20, error
    return f"{type(error).__name__}: {error}"
