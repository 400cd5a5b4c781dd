"""Bad input gets an error that names the value, the rule and the fix, and leaves the communicator usable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ranks import run_communicators

import holmes_comm


def refused(comm, pattern: str, call) -> None:
    with pytest.raises(holmes_comm.UsageError, match=pattern):
        call()
    assert not comm.is_dead


def test_bad_arguments_are_refused_and_the_communicator_lives_on() -> None:
    def body(comm):
        data = np.zeros((4, 4), "float32")
        refused(comm, "not contiguous.*ascontiguousarray", lambda: comm.all_reduce(data.T[1:]))
        refused(comm, "'median' is not supported; use one of: sum, avg", lambda: comm.all_reduce(data, "median"))
        refused(comm, "'avg' is not defined for int32", lambda: comm.all_reduce(np.zeros(3, "int32"), "avg"))
        refused(comm, "'band' is not defined for float32", lambda: comm.all_reduce(data, "band"))
        refused(comm, "format 'Zd' is not supported", lambda: comm.all_reduce(np.zeros(3, "complex128")))
        refused(comm, r"format 'I' .*array.view\(numpy.uint8\)", lambda: comm.broadcast(np.zeros(3, "uint32")))
        refused(comm, "big-endian", lambda: comm.all_reduce(np.zeros(3, ">f4")))
        refused(comm, "not a tensor or array", lambda: comm.all_reduce([1.0, 2.0]))
        refused(comm, "root 7 is not a rank.*ranks 0 to 1", lambda: comm.broadcast(data, 7))
        refused(comm, "-1 is not a rank", lambda: comm.send(data, -1))
        refused(comm, "cannot send to or receive from itself", lambda: comm.send(data, comm.rank))
        odd = np.zeros(15)
        refused(comm, "15 elements cannot be cut into 2 equal parts", lambda: comm.all_gather(odd, np.zeros(7)))
        refused(comm, "output holds 3 float32.*input 8 float32", lambda: comm.reduce_scatter(np.zeros(3, "f4"), data))
        refused(comm, "holds 1 buffers.*each of its 2 ranks", lambda: comm.all_gather([data], data))
        refused(comm, "timeout_s is -1", lambda: comm.all_reduce(data, timeout_s=-1))
        refused(comm, r"timeout_s is 1.00000e\+300; it must be", lambda: comm.all_reduce(data, timeout_s=1e300))
        read_only = np.zeros(4)
        read_only.flags.writeable = False
        refused(comm, "read-only", lambda: comm.all_reduce(read_only))
        comm.all_reduce(data)
        comm.barrier()
        assert repr(comm) == f"<Communicator '{comm.name}', rank {comm.rank} of 2>"
        comm.abort()
        assert repr(comm).endswith(" of 2, ended>")

    run_communicators(2, body)


def test_torch_tensors_on_another_device_or_layout_are_refused() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")

    def body(comm):
        refused(comm, "device 'meta'.*CPU tensor", lambda: comm.all_reduce(torch.empty(3, device="meta")))
        refused(comm, "not contiguous.*contiguous", lambda: comm.all_reduce(torch.zeros(4, 4).t()[1:]))
        refused(comm, "complex64 is not supported", lambda: comm.all_reduce(torch.zeros(3, dtype=torch.complex64)))
        comm.barrier()

    run_communicators(2, body)


def test_a_batch_whose_calls_share_memory_is_refused() -> None:
    def body(comm):
        memory, other = np.zeros(8), 1 - comm.rank
        send, recv = ("send", "recv")
        for calls in (
            [(recv, memory[:5], other, 0), (recv, memory[4:], other, 1)],
            [(recv, memory[:5], other, 0), (send, memory[4:], other, 0)],
            [(send, memory, other, 0), (recv, memory[3:4], other, 0)],
            [(send, memory, other, 0), (send, memory[:1], other, 1), (recv, memory[3:4], other, 0)],
        ):
            refused(comm, "batch: a tensor that is received into shares memory", lambda calls=calls: comm.batch(calls))
        for sent, into in ((memory, memory), (memory[4:], memory[:5])):
            refused(
                comm,
                "sendrecv: a tensor that is received into shares memory",
                lambda sent=sent, into=into: comm.sendrecv(sent, other, into, other),
            )
        # Sends may, and neighbours do not.
        into = np.zeros(16)
        for work in comm.batch(
            [(send, memory, other, 0), (send, memory, other, 1), (recv, into[:8], other, 0), (recv, into[8:], other, 1)]
        ):
            work.wait()

    run_communicators(2, body)


def test_rdma_on_one_host_takes_shared_memory_and_else_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(comm):
        data = np.full(5, comm.rank + 1.0, np.float32)
        comm.all_reduce(data)
        assert data.tolist() == [6.0] * 5
        assert {one["transport"] for one in comm.connections()} == {"shm"}

    run_communicators(3, body, transport="rdma")
    if any(Path("/sys/class/infiniband").glob("*")):
        pytest.skip("what follows needs a machine without RDMA")
    monkeypatch.setenv("HOLMES_SHM", "0")
    with pytest.raises(holmes_comm.NicError, match=r"transport rdma is asked for, but rank 0 .* has no RDMA port"):
        run_communicators(2, body, transport="rdma")


def test_impossible_rank_and_transport() -> None:
    store = holmes_comm.LocalStore()
    with pytest.raises(holmes_comm.UsageError, match="rank 3 of 2 is not possible"):
        holmes_comm._C.make_communicator(store, holmes_comm.CommunicatorOptions(rank=3, size=2))
    for rank, size in [(0, 0), (0, -1), (-1, 2), (1, 1)]:
        with pytest.raises(holmes_comm.UsageError, match=f"rank {rank} of {size} is not possible; size must be"):
            holmes_comm.init(store, rank, size)
    with pytest.raises(holmes_comm.UsageError, match="transport 'udp' does not exist; use one of: auto, tcp, shm"):
        holmes_comm.CommunicatorOptions(transport="udp")


@pytest.mark.parametrize("keyword", ["nics", "cluster_nics"])
def test_a_selection_that_is_a_text_is_named(keyword):
    with pytest.raises(
        holmes_comm.UsageError, match=rf"{keyword}='eth99' is no NicSelection; say for example NicSelection.parse"
    ):
        holmes_comm.init(holmes_comm.LocalStore(), 0, 1, **{keyword: "eth99"})


@pytest.mark.parametrize(
    ("field", "wrong", "rule"),
    [
        ("rank", 0.5, "give a whole number"),
        ("timeout_s", "a", "give a number"),
        ("transport", 3, "give text"),
        ("tls", True, "give text"),
        ("priority", "high", "give a whole number or None"),
        ("priority", 2**40, "give a whole number or None"),
        ("dscp", 1.5, "give a whole number or None"),
        ("secret", 12345678901234567890, "give text"),
    ],
)
def test_an_option_of_a_wrong_type_is_named(field, wrong, rule) -> None:
    arguments = {"store": holmes_comm.LocalStore(), "rank": 0, "size": 1, field: wrong}
    with pytest.raises(holmes_comm.UsageError) as caught:
        holmes_comm.init(**arguments)
    said = str(caught.value)
    assert said.startswith(f"{field}=")
    assert rule in said
    assert ("1234567890" in said) is False
    assert field == "secret" or repr(wrong) in said


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"port": 70000}, "port is 70000; it must be a whole number from 0 (any) to 65535"),
        ({"port": -1}, "port is -1;"),
        ({"port": 2**70}, "port is 1180591620717411303424;"),
        ({"port": "29500"}, "port is of type str;"),
        ({"host": 3}, "host is of type int; give text"),
        ({"timeout_s": "a"}, "timeout_s is of type str; give a number"),
        ({"secret": ["The secret of the job 0123"]}, "secret is of type list; give text"),
    ],
)
def test_a_store_names_what_is_wrong_and_never_the_secret(wrong, words) -> None:
    arguments = {"host": "127.0.0.1", "port": 0, "is_server": True, "secret": "The secret of the job 0123", **wrong}
    with pytest.raises(holmes_comm.UsageError) as caught:
        holmes_comm.TcpStore(**arguments)
    assert words in str(caught.value)
    assert "The secret" not in str(caught.value)


def test_nobody_can_send_to_the_only_rank() -> None:
    (comm,) = run_communicators(1, lambda comm: comm)
    refused(comm, "has one rank: nobody can send to it", lambda: comm.recv(np.zeros(3)))
