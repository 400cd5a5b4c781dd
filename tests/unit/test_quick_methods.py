"""Methods of a communicator that are called past pybind11's dispatch: every way to write a call does the same, and what
is wrong is refused as pybind11 does, in a sentence."""

import inspect

import numpy as np
import pytest
from helpers.ranks import run_communicators

import holmes_comm as hc

QUICK = (
    "all_reduce reduce_scatter all_gather broadcast reduce gather scatter all_to_all barrier send recv sendrecv batch"
)


@pytest.fixture
def comm() -> hc.Communicator:
    return hc.init(hc.LocalStore(), 0, 1)


def test_every_way_to_write_a_call() -> None:
    def body(comm: hc.Communicator) -> list[list[float]]:
        calls = [
            lambda data: comm.all_reduce(data),
            lambda data: comm.all_reduce(data, "sum"),
            lambda data: comm.all_reduce(tensor=data),
            lambda data: comm.all_reduce(op="sum", tensor=data),
            lambda data: comm.all_reduce(data, "sum", False, None, None, None),
            lambda data: comm.all_reduce(data, timeout_s=20),
            lambda data: comm.all_reduce(data, timeout_s=20.5),
            lambda data: comm.all_reduce(data, **{"o" + "p": "su" + "m"}),
            lambda data: comm.all_reduce(data, async_op=True).wait(),
            lambda data: hc.Communicator.all_reduce(comm, data),
            lambda data: getattr(comm, "all_" + "reduce")(*[data]),
        ]
        results = []
        for call in calls:
            data = np.full(3, comm.rank + 1.0)
            assert call(data) is None
            results.append(data.tolist())
        # A bool is a number, and so is numpy's.
        for root in (1, True, np.int64(1)):
            data = np.full(1, float(comm.rank))
            comm.broadcast(data, root)
            results.append(data.tolist())
        received = np.zeros(1)
        if comm.rank == 0:
            comm.send(np.array([7.0]), 1, 3)
            assert comm.recv(received, src=1) == 1
        else:
            assert comm.recv(received, tag=3) == 0
            comm.send(received, dst=0)
        results.append(received.tolist())
        return results

    for results in run_communicators(2, body, transport="shm"):
        assert results == [[3.0] * 3] * 11 + [[1.0]] * 3 + [[7.0]]


def test_every_way_to_write_split_sizes() -> None:
    def body(comm: hc.Communicator) -> None:
        sizes, peer = [comm.rank + 1, 2 - comm.rank], 1 - comm.rank
        for splits in (sizes, tuple(sizes), np.array(sizes), [np.int64(size) for size in sizes]):
            sent, received = np.full(3, comm.rank + 7.0), np.full(3, -1.0)
            comm.all_to_all(received, sent, splits, input_split_sizes=splits)
            assert received.tolist() == [7.0] * sizes[0] + [8.0] * sizes[1]
        sent, received = np.full(4, comm.rank + 7.0), np.full(4, -1.0)
        comm.all_to_all(received, sent, None, None)
        assert received[2 * peer :].tolist()[:2] == [peer + 7.0] * 2

    run_communicators(2, body, transport="shm")


def test_every_way_to_write_a_batch() -> None:
    def body(comm: hc.Communicator) -> None:
        peer = 1 - comm.rank
        for count in (1, 100, 600, 100_000):  # of 5 messages each way: short ones, and longer
            sent = [np.full(count, comm.rank * 10.0 + i) for i in range(5)]
            received = [np.zeros(count) for _ in range(5)]
            calls = [("send", data, peer, i) for i, data in enumerate(sent)]
            calls += [("recv", data, np.int64(peer) if count == 1 else peer, i) for i, data in enumerate(received)]
            forms = [
                lambda calls=calls: comm.batch(calls, async_op=False),
                lambda calls=calls: comm.batch(tuple(calls), 20.0, False),
                lambda calls=calls: comm.batch(calls=[tuple(call) for call in calls], async_op=False),
                lambda calls=calls: [work.wait() for work in comm.batch(calls)] and [],
            ]
            for form in forms:
                for data in received:
                    data[:] = -1
                assert form() == []
                assert all((data == peer * 10.0 + i).all() for i, data in enumerate(received))
        assert comm.batch([], async_op=False) == comm.batch([]) == []

    run_communicators(2, body, transport="shm")
    run_communicators(2, body, transport="tcp")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda comm, data: comm.batch([("send", data, 0)]), "incompatible function arguments"),
        (lambda comm, data: comm.batch([("send", data, 0, None)]), "incompatible function arguments"),
        (lambda comm, data: comm.batch("send"), "incompatible function arguments"),
        (lambda comm, data: comm.all_reduce(), "incompatible function arguments"),
        (
            lambda comm, data: comm.all_reduce(data, "sum", False, None, None, None, 1),
            "incompatible function arguments",
        ),
        (lambda comm, data: comm.all_reduce(data, 7), "incompatible function arguments"),
        (lambda comm, data: comm.all_reduce(data, "sum", async_op="yes"), "incompatible function arguments"),
        (lambda comm, data: comm.all_reduce(data, timeout_s="1"), "incompatible function arguments"),
        (lambda comm, data: comm.all_reduce(data, opp="sum"), "incompatible function arguments"),
        (lambda comm, data: comm.all_reduce(data, tensor=data), "incompatible function arguments"),
        (lambda comm, data: comm.broadcast(data, 2**31), "incompatible function arguments"),
        (lambda comm, data: comm.broadcast(data, 2**70), "incompatible function arguments"),
        (lambda comm, data: comm.broadcast(data, 0.0), "incompatible function arguments"),
        (lambda comm, data: comm.send(data, 0, None), "incompatible function arguments"),
        (lambda comm, data: hc.Communicator.barrier(7), "Communicator"),
    ],
)
def test_wrong_calls_are_type_errors(comm: hc.Communicator, call, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call(comm, np.zeros(2))
    comm.barrier()  # nothing has happened to it


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda comm, data: comm.all_reduce(data, np.add),
            r"op=<ufunc 'add'> is of type numpy.ufunc; give text, as 'sum'",
        ),
        (lambda comm, data: comm.reduce(data, op=7), "op=7 is of type int; give text, as 'sum'"),
        (
            lambda comm, data: comm.broadcast(data, root=0),
            "there is no 'root'; it takes tensor, src, async_op, timeout_s",
        ),
        (
            lambda comm, data: comm.broadcast(data, np.int64(0), timeout_s="1"),
            "timeout_s='1' is of type str; give a number or None",
        ),
        (
            lambda comm, data: comm.broadcast(data, 2**31),
            "src=2147483648 is of type int; give a whole number of 32 bits",
        ),
        (lambda comm, data: comm.send(data, **{"ds" + "t": "x"}), "dst='x' is of type str"),
        (lambda comm, data: comm.all_reduce(data, **{"\ud800": 1}), r"there is no '.ud800'; it takes"),
        (lambda comm, data: comm.send(data), "dst is missing; it takes tensor, dst, tag"),
        (lambda comm, data: comm.all_reduce(data, tensor=data), "'tensor' is given twice"),
        (lambda comm, data: comm.barrier(False, None, 3), "there are too many; it takes async_op, timeout_s"),
        (lambda comm, data: comm.batch([("send", data, 0)]), "calls=.* is of type list; give a list of tuples"),
        (
            lambda comm, data: comm.all_to_all(data, data, [1.5]),
            "output_split_sizes=.* is of type list; give a list of whole numbers of 64 bits or None",
        ),
        (lambda comm, data: comm.all_reduce(data, compression=data), "give what help.. says, or None"),
        (lambda comm, data: comm.split(2**40), "color=1099511627776 is of type int; give a whole number of 32 bits"),
        (lambda comm, data: comm.split(0, key="first"), "key='first' is of type str; give a whole number of 32 bits"),
        (lambda comm, data: comm.split(), "color is missing; it takes color, key"),
    ],
)
def test_wrong_calls_are_told_in_a_sentence(comm: hc.Communicator, call, words: str) -> None:
    with pytest.raises(TypeError, match=words) as told:
        call(comm, np.zeros(2))
    assert len(str(told.value).splitlines()) == 1
    comm.barrier()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda comm, data: comm.all_reduce(data, "summe"), "summe"),
        (lambda comm, data: comm.all_reduce(data, "\ud800"), "op|surrogates|incompatible"),
        (lambda comm, data: comm.all_reduce(data, timeout_s=-1.0), "timeout_s is -1"),
        (lambda comm, data: comm.all_reduce([1, 2]), "not a tensor or array"),
        (lambda comm, data: comm.batch([("put", data, 0, 0)]), "'put' is not a call"),
        (lambda comm, data: comm.batch([("send", data, 0, -2)], async_op=False), "tag -2"),
        (lambda comm, data: comm.broadcast(data, 5), "root"),
        (lambda comm, data: comm.send(data, 0, -1), "tag -1"),
        (lambda comm, data: comm.all_reduce(data, compression=hc.Compression("bf16")), "compress"),
    ],
)
def test_wrong_values_keep_their_errors(comm: hc.Communicator, call, words: str) -> None:
    with pytest.raises((ValueError, TypeError, hc.HolmesError), match=words):
        call(comm, np.zeros(2, np.float32))
    comm.barrier()


def test_an_object_that_was_never_made_is_refused() -> None:
    empty = hc.Communicator.__new__(hc.Communicator)
    for name in QUICK.split():
        with pytest.raises(TypeError, match="never made"):
            getattr(empty, name)()


def test_a_python_error_of_the_argument_goes_through(comm: hc.Communicator) -> None:
    class Strange:
        @property
        def __array_interface__(self) -> dict:
            raise KeyboardInterrupt

        @property
        def __cuda_array_interface__(self) -> dict:
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, hc.HolmesError)):
        comm.send(Strange(), 0)
    comm.barrier()


@pytest.mark.parametrize("name", QUICK.split())
def test_they_look_like_methods(comm: hc.Communicator, name: str) -> None:
    method = getattr(hc.Communicator, name)
    assert inspect.isroutine(method)
    assert method.__name__ == name
    assert method.__doc__.startswith(f"{name}(self: ")
    assert getattr(comm, name).__self__ is comm


def test_arguments_are_let_go_of(comm: hc.Communicator) -> None:
    import sys

    data, text = np.zeros(2), "".join(["s", "um"])
    before = sys.getrefcount(data), sys.getrefcount(text), sys.getrefcount(None), sys.getrefcount(False)
    for _ in range(1000):
        comm.all_reduce(data, text)
        comm.all_reduce(data, op=text, async_op=False, timeout_s=None)
        comm.barrier()
    after = sys.getrefcount(data), sys.getrefcount(text), sys.getrefcount(None), sys.getrefcount(False)
    assert all(abs(a - b) < 100 for a, b in zip(before, after, strict=True))
