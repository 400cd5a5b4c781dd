"""holmes_comm.empty: the same results as in ordinary memory, in place or not, and what is given back."""

from __future__ import annotations

import gc
import json
import os
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from paths import WORKERS
from ranks import run_communicators, run_threads

import holmes_comm
from holmes_comm import MismatchError, UsageError

COUNT = 300_007  # several slices and a rest
TRANSPORTS = ["tcp", "auto"]


def in_shared(data: np.ndarray) -> np.ndarray:
    array = holmes_comm.empty(data.shape, data.dtype)
    array[...] = data
    return array


def every_operation(comm, place) -> list[np.ndarray]:
    """The results of all kinds of operations on arrays that `place` makes of their values."""
    size, rank = comm.size, comm.rank
    values = np.random.default_rng(rank).integers(0, 1000, COUNT * size).astype("float32")
    blocks = [values[COUNT * peer : COUNT * (peer + 1)] for peer in range(size)]
    reduced, mine, scattered, gathered = (
        place(np.array(part)) for part in (values, blocks[0], blocks[0] * 0, values * 0)
    )
    exchanged, received, rooted = place(values * 0), place(blocks[0] * 0), place(blocks[0])
    comm.all_reduce(reduced)
    comm.reduce_scatter(scattered, place(values))
    comm.all_gather(gathered, mine)
    comm.all_to_all(exchanged, place(values))
    works = [
        comm.send(mine, (rank + 1) % size, async_op=True),
        comm.recv(received, (rank - 1) % size, async_op=True),
    ]
    for work in works:
        work.wait()
    comm.broadcast(rooted, src=size - 1)
    summed = place(np.array(blocks[0]))
    comm.reduce(summed, dst=0)
    return [
        np.array(one)
        for one in (reduced, scattered, gathered, exchanged, received, rooted, summed if rank == 0 else mine)
    ]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("cma", ["0", "always"])
def test_results_are_the_same_in_shared_memory(
    size: int, transport: str, cma: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLMES_CMA", cma)

    def body(comm) -> None:
        for _ in range(2):  # ranks hear in the first what all of them can
            for wanted, got in zip(every_operation(comm, np.array), every_operation(comm, in_shared), strict=True):
                np.testing.assert_array_equal(got, wanted)
        # One rank's memory is ordinary, another's is not.
        mixed = in_shared if comm.rank % 2 else np.array
        for wanted, got in zip(every_operation(comm, np.array), every_operation(comm, mixed), strict=True):
            np.testing.assert_array_equal(got, wanted)

    run_communicators(size, body, transport=transport)


def two_processes(what: str, **variables: str) -> list[dict[str, Any]]:
    """What two ranks of shared_worker.py say; of one that was killed, nothing."""
    server = holmes_comm.TcpStore("127.0.0.1", 0, is_server=True)
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKERS / "shared_worker.py"), str(server.port), str(rank), what],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"HOLMES_CMA": "always"} | variables,
        )
        for rank in range(2)
    ]
    try:
        return [json.loads(process.communicate(timeout=120)[0] or "{}") for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_processes_read_each_other() -> None:
    """Real processes; each maps the other's memory, and lets go of it in the end."""
    for rank, said in enumerate(two_processes("sums")):
        assert said["is_right"], said
        assert (said["mapped_during"], said["mapped_after"], said["open_after"]) == (2, 0, 0), (rank, said)


@pytest.mark.parametrize("variables", [{"HOLMES_INTEGRITY": "1"}, {"HOLMES_CMA": "0"}])
def test_nothing_is_read_in_place_where_it_must_not_be(variables: dict[str, str]) -> None:
    """With integrity everything is checked on its way, so it has to travel."""
    for said in two_processes("sums", **variables):
        assert said["is_right"], said
        assert said["mapped_during"] == 1, said


def test_a_rank_that_can_map_nothing_has_right_results() -> None:
    """It has no descriptor left for a while: until then everything goes through rings."""
    without, other = two_processes("no descriptor left")
    assert without["is_right"]
    assert other["is_right"]
    assert without["mapped_during"] == 1


def test_a_killed_rank_is_an_error_of_the_other() -> None:
    killed, other = two_processes("killed")
    assert killed == {}
    assert other["error"] == "PeerLostError"
    assert other["is_usable"]  # its own memory
    assert (other["mapped_after"], other["open_after"]) == (0, 0)


def test_forked_children_change_nothing() -> None:
    for said in two_processes("forks"):
        assert said["is_right"], said


def test_many_buffers() -> None:
    for said in two_processes("many"):
        assert said["is_right"], said
        assert (said["mapped_after"], said["open_after"]) == (0, 0)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_different_sizes_are_a_mismatch(transport: str) -> None:
    def body(comm) -> None:
        array = in_shared(np.ones(1_000_000 + comm.rank, "float32"))
        with pytest.raises(MismatchError, match="all_reduce"):
            comm.all_reduce(array)

    run_communicators(2, body, transport=transport)


def test_parts_and_views_of_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLMES_CMA", "always")

    def body(comm) -> None:
        whole = holmes_comm.empty((3, 1_000_001), "int16")
        for _ in range(3):
            whole[...] = comm.rank + 1
            comm.all_reduce(whole[1, 1:])  # not aligned
            assert (whole[1, 1:] == 3).all()
            assert (whole[[0, 2]] == comm.rank + 1).all()
            assert whole[1, 0] == comm.rank + 1
            other = whole[2, :1_000_000].view("float32")
            other[:] = comm.rank + 1
            comm.all_reduce(other)
            assert (other == 3).all()
            with pytest.raises(UsageError, match="contiguous"):
                comm.all_reduce(whole[:, ::2])

    run_communicators(2, body, transport="auto")


def test_one_work_after_another_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays that nobody but the work holds, several at once, also of both kinds."""
    monkeypatch.setenv("HOLMES_CMA", "always")

    def body(comm) -> None:
        kept = [in_shared(np.full(COUNT, rank, "float32")) for rank in range(4)]
        for _ in range(5):
            works = []
            for array in kept:
                works.append(comm.all_reduce(array, op="max", async_op=True))
                works.append(comm.all_reduce(in_shared(np.ones(COUNT, "float32")), async_op=True))
                works.append(comm.all_reduce(np.ones(COUNT, "float32"), async_op=True))
            for work in works:
                work.wait()
            gc.collect()
        for rank, array in enumerate(kept):
            assert (array == rank).all()

    run_communicators(3, body, transport="auto")


@pytest.mark.parametrize("options", [{"cluster": "ab"}, {"tls": "all", "secret": "a secret of these tests"}])
def test_over_clusters_and_encrypted(options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLMES_CMA", "always")
    store = holmes_comm.LocalStore()

    def body(rank: int) -> None:
        given = options | ({"cluster": "aabb"[rank]} if "cluster" in options else {})
        comm = holmes_comm.init(store, rank, 4, name="test", transport="auto", timeout_s=60, **given)
        for _ in range(2):
            for wanted, got in zip(every_operation(comm, np.array), every_operation(comm, in_shared), strict=True):
                np.testing.assert_array_equal(got, wanted)

    run_threads(4, body)


def test_a_tensor_goes_to_another_process() -> None:
    """torch moves what it hands to a process into memory of its own; pickle copies."""
    torch = pytest.importorskip("torch")
    tensor = holmes_comm.empty(1000, torch.float32).fill_(5)
    copied = pickle.loads(pickle.dumps(tensor))
    tensor.fill_(6)
    assert copied.sum() == 5000
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    child = context.Process(target=_add_one, args=(tensor, queue))
    child.start()
    assert queue.get() == 6000
    child.join(60)
    assert child.exitcode == 0
    assert tensor.sum() == 7000  # as torch's tensors are


def _add_one(tensor: Any, queue: Any) -> None:
    queue.put(float(tensor.sum()))
    tensor += 1


def test_made_of_what_numpy_and_torch_take() -> None:
    torch = pytest.importorskip("torch")
    assert holmes_comm.empty(3, "int8").tolist() == [0, 0, 0]
    assert holmes_comm.empty((), np.float64).shape == ()
    assert holmes_comm.empty((0, 4), np.float64).shape == (0, 4)
    tensor = holmes_comm.empty((2, 3), torch.bfloat16)
    assert tensor.shape == (2, 3)
    assert tensor.dtype is torch.bfloat16
    assert not tensor.any()
    assert holmes_comm.empty((2, 0), torch.bool).shape == (2, 0)
    view = holmes_comm.empty((4, 5), torch.float32)[1:]
    gc.collect()
    assert view.fill_(3).sum() == 45  # a view keeps the memory


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        (-1, "float32", "shape -1 has a negative size"),
        ((2, -3), "float32", "negative size"),
        ("ab", "float32", "shape 'ab' is none"),
        (1.5, "float32", "shape 1.5 is none"),
        ((2, None), "float32", "is none"),
        (2**70, "int8", "more elements than any memory"),
        (3, "no such", "dtype 'no such' is none of"),
        (3, object, "cannot be shared"),
        (3, None, "dtype None"),
        (3, "S3", "cannot be shared"),
        ((4, 6), (np.float32, (2,)), "cannot be shared"),
        ((1,) * 70, np.float32, "no array of shape"),
        ({2, 3}, np.float32, "shape {2, 3} is none"),
        (b"ab", np.float32, "shape b'ab' is none"),
    ],
)
def test_wrong_inputs(shape, dtype, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        holmes_comm.empty(shape, dtype)


WITHOUT_DESCRIPTORS = """
import resource
import numpy, torch, holmes_comm
holmes_comm.empty(1, "int8")
resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
array = holmes_comm.empty((2, 3), "float32")
tensor = holmes_comm.empty((2, 3), torch.float32)
assert array.shape == tensor.shape == (2, 3) and not array.any() and not tensor.any()
array[1] = tensor[1] = 2
assert array.sum() == tensor.sum() == 6
try:
    holmes_comm.empty(2**45, "int8")
except holmes_comm.SystemError as error:
    assert "open files" in str(error), error
else:
    raise AssertionError("so much memory there is not")
"""


def test_ordinary_memory_where_there_is_no_descriptor() -> None:
    pytest.importorskip("torch")
    subprocess.run([sys.executable, "-c", WITHOUT_DESCRIPTORS], check=True, timeout=60)


LAST_DESCRIPTORS = """
import resource
import numpy, holmes_comm
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
arrays = [holmes_comm.empty(10, "float32") for _ in range(400)]
open("/dev/null").close()
comm = holmes_comm.init(holmes_comm.LocalStore(), 0, 1)
"""


def test_arrays_leave_the_process_some_descriptors() -> None:
    subprocess.run([sys.executable, "-c", LAST_DESCRIPTORS], check=True, timeout=60)


ALL_COME_BACK = """
import gc, os
import holmes_comm
holmes_comm.empty(100, "float32")[0] = 1
before = len(os.listdir("/proc/self/fd"))
for _ in range(2000):
    holmes_comm.empty(100, "float32")[0] = 1
gc.collect()
assert len(os.listdir("/proc/self/fd")) == before
"""


def test_memory_and_descriptors_come_back() -> None:
    """In a process of its own: what other tests left in this one may go or come meanwhile."""
    subprocess.run([sys.executable, "-c", ALL_COME_BACK], check=True, timeout=60)
