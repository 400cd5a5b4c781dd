"""What is not plain memory, or not the memory of its values, is refused with the fix; never sent as it lies there."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import os
import threading
import time
import weakref

import numpy as np
import pytest
from process_pair import run_pair
from ranks import run_communicators, run_threads

import holmes_comm
from holmes_comm import NicSelection, UsageError


def refused(comm, pattern: str, call) -> None:
    with pytest.raises(UsageError, match=pattern):
        call()
    assert not comm.is_dead


def refused_everywhere(comm, pattern: str, make) -> None:
    """As an output, as an input, in a list, in a message, and by both forms of a call."""
    refused(comm, pattern, lambda: comm.all_reduce(make()))
    refused(comm, pattern, lambda: comm.all_reduce(make(), async_op=True))
    refused(comm, pattern, lambda: comm.all_gather(np.zeros(8), make()))
    refused(comm, pattern, lambda: comm.all_to_all([make(), make()], [make(), make()]))
    refused(comm, pattern, lambda: comm.send(make(), 1 - comm.rank))
    refused(comm, pattern, lambda: comm.batch([("recv", make(), 1 - comm.rank, 0)]))


def run(body) -> None:
    def checked(comm):
        body(comm)
        rest = np.full(3, comm.rank + 1.0)
        comm.all_reduce(rest)  # the communicator is as it was
        assert rest.tolist() == [3.0] * 3

    run_communicators(2, checked)


# --- numpy, the buffer protocol, DLPack ---
def masked():
    return np.ma.masked_array(np.ones(3), [0, 1, 0])


def released():
    view = memoryview(bytearray(4))
    view.release()
    return view


#: What the message tells to pass, and how that reads as the array's values.
WAYS_OUT = {
    "complex64": (np.float32, r"pass array\.view\(numpy\.float32\)"),
    "complex128": (np.float64, r"pass array\.view\(numpy\.float64\)"),
    "uint16": (np.int16, r"pass array\.view\(numpy\.int16\)"),
    "uint32": (np.int32, r"pass array\.view\(numpy\.int32\)"),
    "uint64": (np.int64, r"pass array\.view\(numpy\.int64\)"),
    "timedelta64[s]": (np.int64, r"pass array\.view\(numpy\.int64\)"),
}


@pytest.mark.parametrize("dtype", WAYS_OUT)
def test_what_a_refusal_tells_to_pass_gives_the_sum(dtype: str) -> None:
    view, pattern = WAYS_OUT[dtype]

    def body(comm):
        def made(rank):
            return np.array([rank + 1, 2**15 + rank]).astype(dtype)

        refused_everywhere(comm, pattern, lambda: made(comm.rank))
        array = made(comm.rank)
        comm.all_reduce(array.view(view))
        assert np.array_equal(array, made(0) + made(1))

    run(body)


REFUSED_ARRAYS = {
    "negative stride": (lambda: np.ones(4)[::-1], "not contiguous.*ascontiguousarray"),
    "zero stride": (lambda: np.lib.stride_tricks.as_strided(np.ones(1), (4,), (0,)), "not contiguous"),
    "structured": (lambda: np.zeros(4, [("a", "f4"), ("b", "i4")]), "is not supported; use one of float64"),
    "object": (lambda: np.array([1, None]), "format 'O' is not supported"),
    "big-endian": (lambda: np.ones(4, ">f4"), "big-endian.*convert it"),
    "text": (lambda: np.array(["a"]), "is not supported"),
    "void": (lambda: np.zeros(3, "V4"), "is not supported"),
    "dates": (lambda: np.zeros(3, "M8[s]"), "no access to its memory.*dtype 'M'"),
    "long double": (lambda: np.ones(3, np.longdouble), "is not supported"),
    "uint64": (lambda: np.ones(3, np.uint64), "is not supported"),
    "uint64 of array.array": (lambda: array.array("L", [1]), r"numpy\.asarray\(array\)\.view\(numpy\.int64\)"),
    "wide floating point": (lambda: np.ones(3, np.longdouble), r"pass array\.astype\(numpy\.float64\)"),
    "objects": (lambda: np.array([1, None]), "Python objects: convert it to numbers, or send what pickle"),
    "byte order": (lambda: np.ones(4, ">f4"), r"array\.astype\(array\.dtype\.newbyteorder\('='\)\)"),
    "columns": (lambda: np.ones((2, 2), order="F"), "a copy: a result lands there"),
    "masked": (masked, r"masked arrays.*array.filled\(value\)"),
    "memoryview with steps": (lambda: memoryview(bytearray(16))[::2], "not contiguous"),
    "memoryview of pointers": (lambda: memoryview(bytearray(16)).cast("P"), "format 'P' is not supported"),
    "released memoryview": (released, "no access to its memory.*released"),
    "structure": (lambda: type("S", (ctypes.Structure,), {"_fields_": [("a", ctypes.c_int)]})(), "is not supported"),
    "text object": (lambda: "abcd", "not a tensor or array"),
    "number": (lambda: 1.0, "not a tensor or array"),
    "class of arrays": (lambda: np.ndarray, "not a tensor or array"),
}


@pytest.mark.parametrize("kind", REFUSED_ARRAYS)
def test_refused_arrays(kind: str) -> None:
    make, pattern = REFUSED_ARRAYS[kind]
    run(lambda comm: refused_everywhere(comm, pattern, make))


def test_read_only_memory_is_an_input_only() -> None:
    def body(comm):
        read_only = np.full(2, comm.rank + 1.0)
        read_only.flags.writeable = False
        for made in (read_only, memoryview(read_only), np.float64(1), np.broadcast_to(np.ones(1), (2,)), b"12345678"):
            refused(comm, "read-only; pass a writable array", lambda made=made: comm.all_reduce(made))
        both = np.zeros(4)
        comm.all_gather(both, read_only)
        assert both.tolist() == [1, 1, 2, 2]
        refused(comm, "not contiguous", lambda: comm.all_gather(both, np.broadcast_to(np.ones(1), (2,))))

    run(body)


def test_odd_memory_that_is_plain_is_taken() -> None:
    def body(comm):
        shared = mmap.mmap(-1, 16)
        for made in (
            np.ones(()), np.ones((2, 1, 3)), np.zeros((0, 3)), np.ones(4, ">i1"), np.ones(2, "?"),
            array.array("d", [1, 2]), (ctypes.c_float * 2)(1, 1), memoryview(bytearray(16)).cast("f"), bytearray(3),
            memoryview(bytearray(8)).cast("B", (4, 2)), shared,
        ):  # fmt: skip
            before = np.array(made, copy=True) if made is not shared else np.zeros(16)
            comm.all_reduce(made)
            after = np.array(made) if made is not shared else np.frombuffer(shared, np.uint8)
            assert np.array_equal(after, before if before.dtype == bool else 2 * before), type(made)
            del after

    run(body)


class Export:
    """An object with DLPack's methods that do what a test says."""

    def __init__(self, capsule=None, device=(1, 0)):
        self.capsule, self.device = capsule, device

    def __dlpack_device__(self):
        return self.device() if callable(self.device) else self.device

    def __dlpack__(self, **options):
        return self.capsule(**options) if callable(self.capsule) else self.capsule


def raising(**_):
    raise BufferError("not now")


class NoDevice:
    def __dlpack__(self):
        return 3


def used_capsule():
    values = np.ones(3)
    capsule = values.__dlpack__()
    np.from_dlpack(Export(capsule))
    return Export(capsule)


REFUSED_EXPORTS = {
    "no capsule": (Export, "gives no unused DLPack capsule"),
    "used capsule": (used_capsule, "gives no unused DLPack capsule"),
    "raises": (lambda: Export(raising), "raised BufferError: not now"),
    "device raises": (lambda: Export(device=raising), "raised BufferError: not now"),
    "device is no pair": (lambda: Export(device="cpu"), "of another type than it must be"),
    "on a GPU": (lambda: Export(device=(2, 0)), "DLPack device type 2|this communicator|CUDA|cuda"),
    "no device": (NoDevice, "has no attribute '__dlpack_device__'"),
    "not contiguous": (lambda: Export(np.ones(4)[::2].__dlpack__), "not contiguous"),
    "complex": (lambda: Export(np.ones(4, complex).__dlpack__), "DLPack dtype .* is not supported"),
}


@pytest.mark.parametrize("kind", REFUSED_EXPORTS)
def test_refused_exports(kind: str) -> None:
    make, pattern = REFUSED_EXPORTS[kind]

    def body(comm):
        refused(comm, pattern, lambda: comm.all_reduce(make()))
        refused(comm, pattern, lambda: comm.all_gather(np.zeros(8), make()))

    run(body)


def test_exports_are_taken_in_both_versions_and_let_go_of() -> None:
    def body(comm):
        def old(**options):
            if options:
                raise TypeError("no options here")
            return values.__dlpack__()

        def new(**options):
            return values.__dlpack__(**options)

        for make in (old, new):
            values = np.full(3, comm.rank + 1.0)
            comm.all_reduce(Export(make))
            assert values.tolist() == [3.0] * 3
        read_only = np.full(2, comm.rank + 1.0)
        read_only.flags.writeable = False
        refused(comm, "read-only", lambda: comm.all_reduce(Export(read_only.__dlpack__)))
        both = np.zeros(4)
        comm.all_gather(both, Export(read_only.__dlpack__))
        assert both.tolist() == [1, 1, 2, 2]
        comm.all_reduce(Export(np.zeros((0, 3))[:, ::2].__dlpack__))  # nothing is contiguous

    run(body)


# --- torch ---
def lazily_negated(torch):
    return torch.ones(4, dtype=torch.cfloat).conj().imag[:1]


def nested(torch, layout):
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def freed(torch, nbytes=0, offset=0):
    tensor = torch.ones(1 << 16)[offset:]
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def fake(torch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(4)[1:]


def wrapper(torch):
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise NotImplementedError(str(function))

    return Wrapper(torch.ones(4))


def inside(transform):
    def make(torch):
        seen = []
        transform(torch)(lambda x: (seen.append(x), x.sum())[1])(torch.ones(2, 4))
        return seen[0]

    return make


REFUSED_TENSORS = {
    "negated view": (lambda t: t._neg_view(t.ones(4)), r"negative bit.*resolve_neg\(\)"),
    "conj().imag": (lazily_negated, r"negative bit.*resolve_neg\(\)"),
    "conjugated": (lambda t: t.ones(4, dtype=t.cfloat).conj(), r"complex64 is not.*view_as_real\(tensor.resolve_conj"),
    "zero tensor": (lambda t: t._efficientzerotensor(4), "no memory of its own; pass the plain tensor"),
    "quantized": (lambda t: t.quantize_per_tensor(t.ones(4), 0.1, 0, t.quint8), r"quint8 is not.*int_repr\(\)"),
    "nested": (lambda t: nested(t, t.strided), r"nested tensors.*tensor.values\(\)"),
    "jagged": (lambda t: nested(t, t.jagged), r"nested tensors.*tensor.values\(\)"),
    "COO": (lambda t: t.eye(4).to_sparse(), r"sparse_coo.*to_dense\(\)"),
    "CSR": (lambda t: t.eye(4).to_sparse_csr(), r"sparse_csr.*to_dense\(\)"),
    "CSC": (lambda t: t.eye(4).to_sparse_csc(), r"sparse_csc.*to_dense\(\)"),
    "BSR": (lambda t: t.eye(4).to_sparse_bsr((2, 2)), r"sparse_bsr.*to_dense\(\)"),
    "mkldnn": (lambda t: t.ones(4, 4).to_mkldnn(), r"_mkldnn.*to_dense\(\)"),
    "in vmap": (inside(lambda t: t.vmap), "reading its memory raised .*BatchedTensorImpl"),
    "in grad": (inside(lambda t: t.func.grad), "reading its memory raised .*TensorWrapper"),
    "functional": (lambda t: t._to_functional_tensor(t.ones(4)), "no memory of its own"),
    "fake": (fake, "no memory of its own"),
    "wrapper subclass": (wrapper, "no memory of its own; pass the plain tensor"),
    "meta": (lambda t: t.empty(4, device="meta"), "device 'meta'.*CPU tensor"),
    "freed": (freed, "storage holds 0 of the 262144 bytes.*freed"),
    "freed, with offset": (lambda t: freed(t, offset=8), "storage holds 0 of the 262144 bytes"),
    "shrunk": (lambda t: freed(t, nbytes=262143), "storage holds 262143 of the 262144 bytes"),
    "expanded": (lambda t: t.ones(1).expand(4), r"not contiguous.*tensor.contiguous\(\)"),
    "complex": (lambda t: t.ones(4, dtype=t.cfloat), "complex64 is not supported; pass torch.view_as_real"),
    "uint16": (lambda t: t.ones(4, dtype=t.uint16), "uint16 is not supported; view it"),
    "uint64": (lambda t: t.ones(4, dtype=t.uint64), "view it as torch.int64, whose bits and sums are the same"),
    "float8": (lambda t: t.ones(4).to(t.float8_e5m2), r"moved: tensor\.view\(torch\.uint8\); .*tensor\.float\(\)"),
    "uninitialized": (lambda t: t.nn.parameter.UninitializedParameter(), "not initialized yet; run its lazy module"),
    "class of tensors": (lambda t: t.Tensor, "not a tensor or array"),
}


@pytest.mark.parametrize("kind", REFUSED_TENSORS)
@pytest.mark.filterwarnings("ignore")  # prototypes, deprecations
def test_refused_tensors(kind: str) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    make, pattern = REFUSED_TENSORS[kind]
    run(lambda comm: refused_everywhere(comm, pattern, lambda: make(torch)))


def test_subclasses_with_memory_are_taken() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")

    class Plain(torch.Tensor):
        pass

    class Closed(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            raise ValueError("nobody asks me")

    def held(cls):
        class Dispatching(cls):
            @classmethod
            def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
                raise ValueError("nobody asks me")

        return torch.Tensor._make_subclass(Dispatching, torch.ones(4))

    def body(comm):
        makers = [
            lambda: torch.nn.Parameter(torch.ones(4)), lambda: torch.ones(4).as_subclass(Plain),
            lambda: torch.ones(4).as_subclass(Closed), lambda: held(torch.Tensor),
            lambda: torch.nn.Buffer(torch.ones(4)),
            lambda: torch.ones(8)[4:], lambda: torch.ones(4, 1, 3), lambda: torch.ones(()), lambda: torch.ones(0, 3),
            lambda: torch._neg_view(torch.ones(4)).resolve_neg().neg(),
        ]  # fmt: skip
        for make in makers:
            tensor = make()
            comm.all_reduce(tensor)
            with torch._C.DisableTorchFunctionSubclass():
                values = torch.frombuffer((ctypes.c_char * 4).from_address(tensor.data_ptr()), dtype=torch.float32)
                assert tensor.numel() == 0 or values.item() == 2
        with torch.inference_mode():
            tensor = torch.ones(4)
        comm.all_reduce(tensor)
        assert tensor.tolist() == [2] * 4

    run(body)


@pytest.mark.parametrize("how", ["data", "set_"])
def test_a_tensor_may_be_given_other_memory_while_its_own_is_in_use(how: str) -> None:
    """What is received went to where the allocator had put something else by then."""
    torch = pytest.importorskip("torch")
    count = 3_000_000

    def body(comm):
        if comm.rank == 1:
            comm.barrier()
            comm.send(np.ones(count, "float32"), 0)
            return
        tensor = torch.zeros(count)
        work = comm.recv(tensor, 1, async_op=True)
        if how == "data":
            tensor.data = torch.zeros(1)
        else:
            tensor.set_(torch.zeros(1))
        others = torch.full((count,), 7.0)
        comm.barrier()
        work.wait()
        assert bool((others == 7).all())

    run(body)


# --- splits, tags, buffers that share memory ---
def test_split_sizes_that_are_none() -> None:
    def body(comm):
        data, out = np.arange(8.0), np.zeros(8)
        for splits, pattern in (
            ([2**62, 2**62], "split size 4611686018427387904 makes the sum larger"),
            ([2**63 - 1, 1], "makes the sum larger"),
            ([2**62, 2**61], "8 rows cannot be cut into 6917529027641081856 .the sum of the split sizes"),
            ([3, 1], "8 rows cannot be cut into 4 .the sum of the split sizes"),
            ([-1, 9], "split size -1 is negative; use 0 or more"),
            ([8], "1 split sizes for 2 ranks"),
            ([0, 0], "8 rows cannot be cut into 0 .the sum of the split sizes"),
        ):
            refused(comm, pattern, lambda splits=splits: comm.all_to_all(out, data, input_split_sizes=splits))
            refused(comm, pattern, lambda splits=splits: comm.all_to_all(out, data, output_split_sizes=splits))
        table = np.arange(24.0).reshape(8, 3)
        refused(comm, "8 rows cannot be cut into 24", lambda: comm.all_to_all(table.copy(), table, [12, 12], [12, 12]))
        comm.all_to_all(np.zeros(12), table[:4], [6, 6], [2, 2])  # as many rows as each says, of the same bytes
        parts = [data[:4], data[4:]]
        refused(comm, "split sizes are for one buffer", lambda: comm.all_to_all(out, parts, input_split_sizes=[4, 4]))
        comm.all_to_all(out, parts)

    run(body)


def test_tags_that_are_none() -> None:
    def body(comm):
        data, peer = np.zeros(2), 1 - comm.rank
        for tag in (-1, 2**32 - 1, 2**32, 2**40):
            refused(comm, f"tag {tag} is not possible; use 0 to 4294967294", lambda tag=tag: comm.send(data, peer, tag))
            refused(comm, f"tag {tag} is not", lambda tag=tag: comm.recv(data, peer, tag))
            refused(comm, f"tag {tag} is not", lambda tag=tag: comm.recv(data, None, tag))
            refused(comm, f"tag {tag} is not", lambda tag=tag: comm.batch([("send", data, peer, tag)]))
        works = comm.batch([("send", data + comm.rank, peer, 2**32 - 2), ("recv", data, peer, 2**32 - 2)])
        for work in works:
            work.wait()
        assert data.tolist() == [peer] * 2

    run(body)


@pytest.mark.parametrize("clusters", [False, True])
def test_buffers_that_share_memory_are_refused(clusters: bool) -> None:
    def body(comm):
        size, rank = comm.size, comm.rank
        memory = np.zeros(size * 4 + 2)
        whole, part = memory[: size * 4], np.zeros(4)
        parts = [memory[4 * r : 4 * r + 4] for r in range(size)]
        shifted = memory[4 * rank + 1 : 4 * rank + 5]
        other = parts[(rank + 1) % size]
        in_and_out = "share memory, and one is written while the other is read"
        for wrong in (shifted, other):
            refused(comm, f"all_gather: .*{in_and_out}", lambda wrong=wrong: comm.all_gather(whole, wrong))
            refused(comm, f"reduce_scatter: .*{in_and_out}", lambda wrong=wrong: comm.reduce_scatter(wrong, whole))
            refused(comm, f"gather: .*{in_and_out}", lambda wrong=wrong: comm.gather(wrong, whole, dst=rank))
            refused(comm, f"scatter: .*{in_and_out}", lambda wrong=wrong: comm.scatter(wrong, whole, src=rank))
        refused(comm, f"all_to_all: .*{in_and_out}", lambda: comm.all_to_all(whole, whole))
        refused(
            comm, "outputs? 0 and output 1 share.*both are written", lambda: comm.all_gather([part] * size, part + 1)
        )
        crossed = [memory[3:7], memory[0:4], *[np.zeros(4) for _ in range(size - 2)]]
        refused(comm, "output 0 and output 1 share", lambda: comm.all_to_all(crossed, [part] * size))
        # This rank's whole part is the way to work in place; inputs may be one.
        parts[rank][:] = rank
        comm.all_gather(whole, parts[rank])
        assert np.array_equal(whole.reshape(size, 4), np.repeat(np.arange(size)[:, None], 4, axis=1))
        comm.reduce_scatter(parts[rank], whole)
        assert parts[rank].tolist() == [size * rank] * 4
        comm.all_to_all(parts, [part] * size)
        comm.gather(parts[rank], whole, dst=0) if rank == 0 else comm.gather(part, dst=0)
        comm.scatter(parts[rank], whole, src=0) if rank == 0 else comm.scatter(part, src=0)
        comm.all_gather([memory[4 * r : 4 * r + 4] for r in reversed(range(size))][::-1], np.ones(4))

    if not clusters:
        run_communicators(2, body)
        return
    run_clusters(body)


def run_clusters(body) -> None:
    store = holmes_comm.LocalStore()

    def rank_body(rank: int):
        body(
            holmes_comm.init(
                store,
                rank,
                4,
                name="buffers-clusters",
                cluster="ab"[rank // 2],
                hierarchical_min_bytes=1,
                timeout_s=30.0,
            )
        )

    run_threads(4, rank_body)


def test_works_hold_what_they_use() -> None:
    """Buffers that the caller drops while an operation runs: their memory lasts until it is done."""

    def body(comm):
        kept = [np.full(1 << 18, comm.rank + 1.0) for _ in range(4)]
        works = []
        for values in kept:
            works.append(comm.all_reduce(memoryview(values), async_op=True))
            works.append(comm.all_gather(np.empty(2 << 16), np.full(1 << 16, 1.0), async_op=True))
        del values
        gc.collect()
        trash = [np.full(1 << 16, -1.0) for _ in range(8)]
        for work in works:
            work.wait()
        del trash
        assert all((values == 3).all() for values in kept)

    run(body)


@pytest.mark.parametrize(
    "call",
    [
        lambda comm, parts, data: comm.all_gather(parts, data),
        lambda comm, parts, data: comm.reduce_scatter(data, parts),
        lambda comm, parts, data: comm.gather(data, parts, 0),
        lambda comm, parts, data: comm.scatter(data, parts, 0),
        lambda comm, parts, data: comm.all_to_all(np.zeros(8), parts),
        lambda comm, parts, data: comm.all_to_all(parts, np.zeros(8)),
    ],
    ids=["all_gather", "reduce_scatter", "gather", "scatter", "all_to_all inputs", "all_to_all outputs"],
)
def test_a_call_holds_what_its_lists_held_when_it_began(call) -> None:
    may_come = threading.Event()

    def body(comm):
        data = np.zeros(4)
        if comm.rank == 1:
            may_come.wait(30)
            call(comm, [np.zeros(4), np.zeros(4)], data)
            return []
        parts = [np.zeros(4), np.zeros(4)]
        held = [weakref.ref(part) for part in parts]
        seen = []

        def change():
            while not any(record["state"] == "running" and record["op"] != "split" for record in comm.flight_record()):
                time.sleep(0.01)
            parts.clear()
            seen.extend(one() is not None for one in held)
            may_come.set()

        changer = threading.Thread(target=change, daemon=True)
        changer.start()
        call(comm, parts, data)
        changer.join(30)
        gc.collect()
        return seen, [one() is None for one in held]

    assert run_communicators(2, body)[0] == ([True, True], [True, True])


def test_works_hold_their_communicator() -> None:
    """One that the caller drops while its operations run ends when they are done."""

    def body(comm):
        part = comm.split(0)
        values, message = np.ones(1 << 20), np.full(4, comm.rank)
        works = [part.all_reduce(values, async_op=True)]
        works += part.batch([("send" if comm.rank == 0 else "recv", message, 1 - comm.rank, 0)])
        del part
        gc.collect()
        for work in works:
            work.wait()
        assert (values == 2).all()
        assert not message.any()

    run(body)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("counts", [[191, 0, 0], [0, 0, 1], [5, 3, 0], [0, 0, 0]])
def test_all_gather_in_place_of_a_rank_without_elements(counts: list[int], transport: str) -> None:
    """Its empty part begins where another rank's does: that one must be written all the same."""

    def body(comm):
        ends = np.cumsum([0, *counts])
        whole = np.full(ends[-1], -1, np.int8)
        parts = [whole[ends[r] : ends[r + 1]] for r in range(3)]
        parts[comm.rank][:] = comm.rank
        comm.all_gather(parts, parts[comm.rank])
        assert whole.tolist() == [r for r, count in enumerate(counts) for _ in range(count)]

    run_communicators(3, body, transport=transport)


# --- memory that goes away while it is in use ---
@pytest.fixture
def cut_file(tmp_path):
    """Makes arrays of 4 MiB over a mapped file, of which the second half is gone: to touch it would be SIGBUS."""

    def make(number: int):
        path = tmp_path / f"cut{number}"
        path.write_bytes(bytes(4 << 20))
        made = np.memmap(path, np.uint8, "r+")
        os.truncate(path, 2 << 20)
        return made

    return make


CUT = {
    "sent": (0, lambda comm, cut, whole: comm.send(cut, 1) if comm.rank == 0 else comm.recv(whole, 0)),
    "sent later": (
        0,
        lambda comm, cut, whole: (comm.send(cut, 1, async_op=True) if comm.rank == 0 else
                                  comm.recv(whole, 0, async_op=True)).wait(),
    ),
    "received": (1, lambda comm, cut, whole: comm.send(whole, 1) if comm.rank == 0 else comm.recv(cut, 0)),
    "broadcast": (0, lambda comm, cut, whole: comm.broadcast(cut if comm.rank == 0 else whole, 0)),
    "broadcast's target": (1, lambda comm, cut, whole: comm.broadcast(cut if comm.rank == 1 else whole, 0)),
}  # fmt: skip


@pytest.mark.parametrize("kind", CUT)
def test_memory_that_went_away_is_told_of_who_gave_it(kind: str, cut_file) -> None:
    culprit, call = CUT[kind]
    store = holmes_comm.LocalStore()

    def body(rank: int) -> Exception | None:
        comm = holmes_comm.init(
            store, rank, 2, name=kind, nics=NicSelection(names=("lo",), transport="tcp"), timeout_s=60.0,
            connect_timeout_s=20.0,
        )  # fmt: skip
        try:
            call(comm, cut_file(rank), np.ones(4 << 20, np.uint8))
            comm.barrier()
        except holmes_comm.HolmesError as error:
            return error
        return None

    for rank, error in enumerate(run_threads(2, body)):
        assert isinstance(error, UsageError), (rank, error)
        assert f"rank {culprit} (host" in str(error).split(":")[0], (rank, error)
        assert "Bad address (errno 14)" in str(error), (rank, error)
        assert "until it ends" in str(error), (rank, error)
        assert "lost" not in str(error), (rank, error)


@pytest.mark.parametrize("scenario", ["cut_sent", "cut_received"])
def test_rails_and_memory_that_went_away(scenario: str) -> None:
    """What waits for its turn is copied: who gave the memory may end with SIGBUS, as by any other copy. It is that
    rank whom the other one names."""
    said = {one["rank"]: one for one in run_pair(scenario, "tcp")}
    assert "rank 1 (host" in said[0]["message"], said
    if 1 in said:
        assert said[1]["error"] == "UsageError", said
        assert "Bad address (errno 14)" in said[1]["message"], said
