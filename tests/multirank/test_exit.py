"""The interpreter ends while daemon threads are in calls: the process ends in order, not by SIGABRT."""

import signal
import subprocess
import sys

import pytest
from paths import WORKERS

RUNS = 4  # each of them aborted before threads were held


def start(script, *arguments):
    command = [sys.executable, str(WORKERS / script), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def check(process):
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, f"exit status {process.returncode}:\n{output}"


@pytest.mark.parametrize("call", ["barrier", "all_reduce", "recv"])
def test_threads_in_a_communicator(call):
    for _ in range(RUNS):
        check(start("exit_direct.py", call))


def test_threads_in_torch_distributed(tmp_path):
    pytest.importorskip("torch")
    for number in range(RUNS):
        ranks = [start("exit_torch.py", rank, tmp_path / f"store{number}") for rank in range(2)]
        for process in ranks:
            check(process)


FIRST_CALL = """
import builtins, sys, threading, time
import numpy
import holmes_comm
communicator = holmes_comm.init(holmes_comm.LocalStore(), 0, 1)
plain_import, is_looking = builtins.__import__, threading.Event()
def slow_import(name, *rest):
    if name.startswith("numpy"):
        is_looking.set()
        time.sleep(0.3)
    return plain_import(name, *rest)
builtins.__import__ = slow_import
threading.Thread(target=communicator.all_reduce, args=(numpy.ones(10),), daemon=True).start()
is_looking.wait(0.2)
class Lingers:  # in sys.modules: while the interpreter ends
    def __del__(self, sleep=time.sleep):
        sleep(0.6)
sys.modules["lingers"] = Lingers()
"""


def test_the_interpreter_ends_in_the_first_call():
    ended = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


TERMINATES = """
import ctypes, threading
from holmes_comm import _C
library = ctypes.CDLL("libstdc++.so.6")
def name_and_end():
    ctypes.CDLL(None).prctl(15, b"the-culprit", 0, 0, 0)  # PR_SET_NAME
    library._ZSt9terminatev()
thread = threading.Thread(target=name_and_end)
thread.start()
thread.join()
"""


def test_a_process_that_terminates_says_in_which_thread_and_where():
    ended = subprocess.run([sys.executable, "-c", TERMINATES], capture_output=True, text=True, timeout=60)
    assert ended.returncode == -signal.SIGABRT
    assert "holmes: std::terminate in thread 'the-culprit' (no exception); its stack:" in ended.stderr
    assert "libstdc++" in ended.stderr  # of the C++ stack
    assert "in name_and_end" in ended.stderr  # of Python's, by PYTHONFAULTHANDLER
