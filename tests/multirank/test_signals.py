"""A signal while the main thread is in a blocking call: its handler runs at once, and what it raises ends the call."""

import contextlib
import os
import signal
import threading
import time

import numpy as np
import pytest

import holmes_comm
from holmes_comm import AbortedError

SIGNAL_AFTER_S = 0.3
PROMPT_S = 0.4  # on a machine that does much else; 0.05 s where it does not
GIVE_UP_S = 3.0  # when the peer calls after all
SIZE = 2


@contextlib.contextmanager
def handled(handler):
    """SIGUSR1 has this handler, and comes after SIGNAL_AFTER_S. Gives the list of when it was sent."""
    sent = []

    def send():
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(SIGNAL_AFTER_S, send)
    timer.start()
    try:
        yield sent
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def interrupt(number, frame):
    raise KeyboardInterrupt


class Ranks:
    """Rank 0 is the test's own thread, the main one; what the others do runs beside it."""

    def __init__(self, body, size=SIZE, **options):
        self.outcomes = [None] * size
        self.late = threading.Event()  # the test is over: who only waits for that goes on
        store = holmes_comm.LocalStore()
        name = f"signals{time.monotonic_ns()}"

        def make(rank):
            mine = dict(options)
            if "clusters" in mine:
                mine["cluster"] = mine.pop("clusters")[rank]
            return holmes_comm.init(store, rank, size, name=name, timeout_s=30.0, connect_timeout_s=20.0, **mine)

        def run(rank):
            try:
                comm = make(rank)
                comm.barrier()
                body(comm, self.late)
            except Exception as error:
                self.outcomes[rank] = error

        self.threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(1, size)]
        for thread in self.threads:
            thread.start()
        self.comm = make(0)
        self.comm.barrier()

    def end(self):
        self.late.set()
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive(), "a peer hangs"


def wait_for_late(call):
    """The peer waits for a message, so that it hears of an abort; rank 0 waits for its `call`, which comes late."""

    def body(comm, late):
        message = comm.recv(np.zeros(1), 0, 77, async_op=True)
        late.wait(GIVE_UP_S)
        if not late.is_set():
            call(comm)
        message.wait()

    return body


MUCH = np.ones(1 << 22)  # made before the signal: on a busy machine that takes as long
CALLS = {
    "all_reduce": lambda comm: comm.all_reduce(np.ones(2)),
    "all_reduce of much": lambda comm: comm.all_reduce(MUCH),
    "barrier": lambda comm: comm.barrier(),
    "recv": lambda comm: comm.recv(np.ones(2), 1) if comm.rank == 0 else comm.send(np.ones(2), 0),
    "wait": lambda comm: comm.all_reduce(np.ones(2), async_op=True).wait(),
    "wait with a timeout": lambda comm: comm.all_reduce(np.ones(2), async_op=True).wait(20.0),
    "wait_stream": lambda comm: comm.all_reduce(np.ones(2), async_op=True).wait_stream(),
    "split": lambda comm: comm.split(0),
}


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("name", CALLS)
def test_what_a_handler_raises_ends_the_call_and_peers_hear_who_it_was(name, transport):
    ranks = Ranks(wait_for_late(CALLS[name]), transport=transport)
    with handled(interrupt) as sent, pytest.raises(KeyboardInterrupt):
        CALLS[name](ranks.comm)
    took_s = time.monotonic() - sent[0]
    assert took_s < PROMPT_S
    assert ranks.comm.is_dead
    ranks.end()
    error = ranks.outcomes[1]
    assert isinstance(error, AbortedError)
    assert "rank 0 (host" in str(error)
    assert "interrupted by KeyboardInterrupt" in str(error)
    with pytest.raises(AbortedError, match="interrupted by KeyboardInterrupt"):
        ranks.comm.barrier()


def test_an_operation_over_clusters_is_interrupted():
    def call(comm):
        comm.all_reduce(np.ones(1 << 18))

    ranks = Ranks(wait_for_late(call), size=4, clusters=["a", "a", "b", "b"], transport="tcp", hierarchical_min_bytes=0)
    with handled(interrupt) as sent, pytest.raises(KeyboardInterrupt):
        call(ranks.comm)
    assert time.monotonic() - sent[0] < PROMPT_S
    ranks.end()
    for error in ranks.outcomes[1:]:
        assert isinstance(error, AbortedError)
        assert "interrupted by KeyboardInterrupt" in str(error)


@pytest.mark.parametrize("name", ["all_reduce", "recv", "wait"])
def test_a_handler_that_raises_nothing_runs_at_once_and_the_wait_goes_on(name):
    ran = []
    ranks = Ranks(lambda comm, late: (late.wait(2 * SIGNAL_AFTER_S), CALLS[name](comm)))
    with handled(lambda number, frame: ran.append(time.monotonic())) as sent:
        CALLS[name](ranks.comm)
    assert len(ran) == 1
    assert ran[0] - sent[0] < PROMPT_S
    assert time.monotonic() - sent[0] >= SIGNAL_AFTER_S / 2
    ranks.end()
    assert ranks.outcomes[1] is None
    assert not ranks.comm.is_dead


def test_a_handler_may_use_the_communicator():
    ranks = Ranks(
        lambda comm, late: (late.wait(3 * SIGNAL_AFTER_S), comm.send(np.ones(2), 0), comm.send(np.ones(2), 0, 5))
    )
    got = np.zeros(2)

    def handler(number, frame):
        ranks.comm.recv(got, 1, 5)

    values = np.zeros(2)
    with handled(handler):
        ranks.comm.recv(values, 1)
    assert values.tolist() == got.tolist() == [1, 1]
    ranks.end()
    assert ranks.outcomes[1] is None


def test_a_transfer_that_never_sleeps_is_interrupted():
    """Much over shared memory: the caller moves bytes all the time."""
    values = np.ones(1 << 28, np.uint8)

    def body(comm, late):
        mine = np.ones(1 << 28, np.uint8)
        while True:
            comm.all_reduce(mine)

    ranks = Ranks(body, transport="shm")

    def call():
        while True:
            ranks.comm.all_reduce(values)

    with handled(interrupt) as sent, pytest.raises(KeyboardInterrupt):
        call()
    assert time.monotonic() - sent[0] < PROMPT_S
    ranks.end()
    assert isinstance(ranks.outcomes[1], AbortedError)


def test_a_set_up_that_waits_for_a_rank_is_interrupted():
    store = holmes_comm.TcpStore("127.0.0.1", 0, is_server=True, timeout_s=20.0)
    with handled(interrupt) as sent, pytest.raises(KeyboardInterrupt):
        holmes_comm.init(store, 0, 2, name="lonely", transport="tcp", connect_timeout_s=GIVE_UP_S)
    assert time.monotonic() - sent[0] < PROMPT_S
    assert store.wait is not None
    store.set("after", b"1")  # the store's client is usable still
    assert bytes(store.get("after")) == b"1"
