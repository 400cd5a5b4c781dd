"""A signal while the main thread waits in torch.distributed: what its handler raises ends the wait."""

import os
import signal
import threading
import time

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch_ranks import init, run_ranks  # noqa: E402

SIGNAL_AFTER_S = 0.5
PROMPT_S = 1.0  # two processes, on a machine that does much else; 0.05 s where it does not


def _interrupted(rank, size, store, call):
    init(store, rank, size)
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    calls = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "wait": lambda: dist.all_reduce(tensor, async_op=True).wait(),
        "recv": lambda: dist.recv(tensor, 1 - rank),
        "barrier": dist.barrier,
    }
    if rank == 0:
        started_s = time.monotonic()
        try:
            dist.recv(torch.ones(1), 1, tag=7)
        except Exception as error:
            return type(error).__name__, str(error), time.monotonic() - started_s
        return "nothing", "", 0.0
    sent = []

    def send():
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(SIGNAL_AFTER_S, send).start()
    try:
        calls[call]()
    except KeyboardInterrupt:
        return "KeyboardInterrupt", "", time.monotonic() - sent[0]
    return "nothing", "", 0.0


@pytest.mark.parametrize("call", ["all_reduce", "wait", "recv", "barrier"])
def test_ctrl_c_ends_a_wait_and_the_peer_hears_whose_it_was(call):
    peer, own = run_ranks(_interrupted, 2, call)
    assert own[0] == "KeyboardInterrupt"
    assert own[2] < PROMPT_S
    error, message, waited_s = peer
    assert error == "AbortedError"
    assert "rank 1 (host" in message
    assert "interrupted by KeyboardInterrupt" in message
    assert waited_s < 20
