"""What the fakes of CUDA and NCCL do to who uses them wrongly, by their plain calls: `hostile_fakes_worker.py CASE`.

So that the tests of the backend can fail.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
from fake_gpu import Array, capture, destroy, end_capture, launch, make_stream, synchronize

SUCCESS, INVALID_ARGUMENT, INVALID_USAGE, IN_PROGRESS = 0, 4, 5, 7
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED = 900, 901
RELAXED = 2
FLOAT64, SUM = 8, 0
DEFAULT = -(1 << 31)
INTEGERS = ("collnet", "policy", "shrink", "nvls", "channels", "nvlink", "usage", "rma", "peers", "ordering", "launch")
LIMIT_S = 20.0

cuda = ctypes.CDLL(os.environ["HOLMES_CUDA_LIBRARY"])
nccl = ctypes.CDLL(os.environ["HOLMES_NCCL_LIBRARY"])
nccl.ncclGetLastError.restype = ctypes.c_char_p


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class Config(ctypes.Structure):
    """ncclConfig_t of 2.32."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split", ctypes.c_int),
        ("traffic", ctypes.c_int),
        ("comm_name", ctypes.c_char_p),
        *((name, ctypes.c_int) for name in (*INTEGERS, "signals", "eager", "cft", "nvls_host")),
    ]


def use_device(device: int) -> None:
    context = ctypes.c_void_p()
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    cuda.cuCtxSetCurrent(context)


def make_id() -> UniqueId:
    made = UniqueId()
    assert nccl.ncclGetUniqueId(ctypes.byref(made)) == SUCCESS
    return made


def join(unique_id: UniqueId, rank: int, size: int, *, blocking: int) -> tuple[int, ctypes.c_void_p]:
    """What NCCL returns, and the communicator."""
    comm = ctypes.c_void_p()
    names = [name for name, kind in Config._fields_ if kind is ctypes.c_int]
    config = Config(**dict.fromkeys(names, DEFAULT))
    config.size, config.magic, config.version = ctypes.sizeof(Config), 0xCAFEBEEF, 23203
    config.blocking, config.net_name = blocking, b"Socket"
    return nccl.ncclCommInitRankConfig(ctypes.byref(comm), size, unique_id, rank, ctypes.byref(config)), comm


def state(comm: ctypes.c_void_p) -> int:
    found = ctypes.c_int()
    assert nccl.ncclCommGetAsyncError(comm, ctypes.byref(found)) == SUCCESS
    return found.value


def all_reduce(comm: ctypes.c_void_p, data: Array, stream: int) -> int:
    address, count = ctypes.c_void_p(data.address), ctypes.c_size_t(data.values.size)
    return int(nccl.ncclAllReduce(address, address, count, FLOAT64, SUM, comm, ctypes.c_void_p(stream)))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.001)


def alone(*, blocking: int) -> ctypes.c_void_p:
    """A communicator of one rank."""
    use_device(0)
    result, comm = join(make_id(), 0, 1, blocking=blocking)
    assert result == (SUCCESS if blocking else IN_PROGRESS)
    until(lambda: state(comm) == SUCCESS)
    return comm


def case_progress() -> None:
    """A group of a communicator that does not block goes on in a thread; what comes before its end is refused."""
    comm, stream = alone(blocking=0), make_stream()
    data = Array(np.ones(10), 0)
    refused: list[int] = []

    def is_refused() -> bool:
        assert all_reduce(comm, data, stream) == IN_PROGRESS
        if state(comm) == IN_PROGRESS:
            refused.append(all_reduce(comm, data, stream))
        until(lambda: state(comm) == SUCCESS)
        return INVALID_ARGUMENT in refused

    until(is_refused)
    assert all_reduce(alone(blocking=1), data, stream) == SUCCESS


def case_sticky() -> None:
    """An argument that such a communicator has refused stays its state."""
    comm, stream = alone(blocking=0), make_stream()
    data = Array(np.ones(10), 0)
    os.environ["FAKE_NCCL_FAULT"] = "refuse@0"
    assert all_reduce(comm, data, stream) == INVALID_ARGUMENT
    os.environ["FAKE_NCCL_FAULT"] = ""
    for _ in range(2):
        assert state(comm) == INVALID_ARGUMENT
        assert all_reduce(comm, data, stream) == INVALID_ARGUMENT


def case_duplicate() -> None:
    """Two ranks of one host on one GPU are refused; on two they are not."""
    for devices, wanted in (((0, 0), INVALID_USAGE), ((0, 1), SUCCESS)):
        unique_id, results = make_id(), {}

        def body(rank: int, devices=devices, unique_id=unique_id, results=results) -> None:
            use_device(devices[rank])
            results[rank] = join(unique_id, rank, 2, blocking=1)[0]

        ranks = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join(LIMIT_S)
        assert results == {0: wanted, 1: wanted}, results
        assert wanted == SUCCESS or b"Duplicate GPU" in nccl.ncclGetLastError(None)


def case_capture() -> None:
    """A question of another thread breaks a capture in global mode, unless its mode is relaxed."""
    use_device(0)
    event, stream = ctypes.c_void_p(), make_stream()
    cuda.cuEventCreate(ctypes.byref(event), 0)

    def ask(mode: int, results: list[int]) -> None:
        own = ctypes.c_int(mode)
        cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(own))
        results.append(cuda.cuEventQuery(event))

    for mode, wanted, end in ((RELAXED, SUCCESS, SUCCESS), (0, CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED)):
        results: list[int] = []
        capture(stream)
        asking = threading.Thread(target=ask, args=(mode, results))
        asking.start()
        asking.join(LIMIT_S)
        graph = ctypes.c_void_p()
        assert results == [wanted]
        assert cuda.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph)) == end


def case_graph() -> None:
    """An end waits for graphs with the communicator's operations to be destroyed, in order and by force."""
    for end in (nccl.ncclCommFinalize, nccl.ncclCommAbort):
        comm, stream = alone(blocking=1), make_stream()
        data = Array(np.ones(10), 0)
        capture(stream)
        assert all_reduce(comm, data, stream) == SUCCESS
        graph = end_capture(stream)
        launch(graph, stream)
        synchronize(stream)
        ending = threading.Thread(target=end, args=(comm,))
        ending.start()
        ending.join(0.3)
        assert ending.is_alive()
        destroy(graph)
        ending.join(LIMIT_S)
        assert not ending.is_alive()


def case_bounds() -> None:
    """An output that is shorter than what is written to it ends the process."""
    comm, stream = alone(blocking=1), make_stream()
    output, data = Array(np.ones(10), 0), Array(np.ones(11), 0)
    addresses = ctypes.c_void_p(data.address), ctypes.c_void_p(output.address)
    nccl.ncclAllGather(*addresses, ctypes.c_size_t(11), FLOAT64, comm, ctypes.c_void_p(stream))


def case_order() -> None:
    """Two streams that write the same memory with no event between them end the process."""
    use_device(0)
    first, second = make_stream(), make_stream()
    data = Array(np.ones(10), 0)
    for stream in (first, second):
        cuda.cuMemsetD8Async(ctypes.c_ulonglong(data.address), 0, ctypes.c_size_t(80), ctypes.c_void_p(stream))


def case_order_in_graph() -> None:
    """So do two branches of a graph, which are joined at its end, when it is launched."""
    use_device(0)
    first, second = make_stream(), make_stream()
    data, event = Array(np.ones(10), 0), ctypes.c_void_p()
    cuda.cuEventCreate(ctypes.byref(event), 0)

    def let_wait(stream: int, other: int) -> None:
        cuda.cuEventRecord(event, ctypes.c_void_p(other))
        cuda.cuStreamWaitEvent(ctypes.c_void_p(stream), event, 0)

    capture(first)
    let_wait(second, first)
    for stream in (first, second):
        cuda.cuMemsetD8Async(ctypes.c_ulonglong(data.address), 0, ctypes.c_size_t(80), ctypes.c_void_p(stream))
    let_wait(first, second)
    graph = end_capture(first)
    print("captured", flush=True)
    launch(graph, first)


if __name__ == "__main__":
    globals()[f"case_{sys.argv[1]}"]()
    print("passed", flush=True)
    os._exit(0)  # communicators are left as they are
