"""Flight records as files: every rank's on failure, on a signal, and when somebody asks for them in the folder."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from paths import WORKERS

import holmes_comm
from holmes.tools.debug import Cause, ask_processes, diagnose, read_folder
from holmes_comm import _C

WORKER = WORKERS / "hang_worker.py"
SIZE = 3
PATIENCE_S = 20.0


def until(is_there: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_there() and time.monotonic() < end:
        time.sleep(0.05)


def test_every_rank_dumps_on_failure_on_a_signal_and_when_asked(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    server = holmes_comm.TcpStore("127.0.0.1", 0, is_server=True)
    settings = {"HOLMES_FLIGHT_RECORDER_DIR": str(folder), "HOLMES_FLIGHT_RECORDER_SIGNAL": "USR1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(server.port), str(rank), str(SIZE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **settings, "RANK": str(rank), "HOLMES_HOSTNAME": f"node{rank}"},
        )
        for rank in range(SIZE)
    ]

    def say(line: str) -> None:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()

    def reasons() -> list[str]:
        return [record.reason for record in read_folder(folder).records] if folder.is_dir() else []

    def hangs() -> list[Cause]:
        return diagnose(ask_processes([process.pid for process in processes]).records)

    try:
        # Ranks 0 and 2 wait for the slow one: nothing fails. A signal makes rank 0 write.
        say("slow_rank")
        # (Before it has a communicator the signal would end it.)
        until(lambda: any(f.operation == "all_reduce #2" and len(f.waiting) == 2 for f in hangs()))
        processes[0].send_signal(signal.SIGUSR1)
        until(lambda: reasons() == ["signal"])
        assert reasons() == ["signal"]
        # Somebody asks for all, the slow one's too.
        command = subprocess.run(
            [sys.executable, "-m", "holmes", "debug", "--json", "-", "--ask", "--wait-s", "3", str(folder)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert command.returncode == 1, command.stderr
        (finding,) = json.loads(command.stdout)["jobs"][0]["findings"]
        assert (finding["culprits"], finding["operation"]) == ([1], "all_reduce #2")
        # The test's abort is a failure on every rank, whoever hears of it how.
        say("end")
        until(lambda: all(reason.startswith("failure: ") for reason in reasons()))
        assert len(reasons()) == SIZE
        assert all(reason.startswith("failure: ") for reason in reasons())
        say("wrong_root")
        until(lambda: [f.operation for f in diagnose(read_folder(folder).records)] == ["broadcast #1"])
        (finding,) = diagnose(read_folder(folder).records)
        assert (finding.kind, finding.culprits) == ("mismatch", (1,))
        assert all(oct(path.stat().st_mode & 0o777) == "0o600" for path in folder.glob("*.json"))
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_folder_that_hangs_does_not_hold_back_the_error(tmp_path: Path) -> None:
    worker = WORKERS / "hung_folder_worker.py"
    settings = {"HOLMES_FLIGHT_RECORDER_DIR": str(tmp_path)}
    command = [sys.executable, str(worker), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **settings}, timeout=60)
    first_s, second_s = map(float, done.stdout.split())
    # The deadline is one second, the folder gets half of one, once; the record itself up to 0.1.
    assert first_s < 2.5, done.stderr
    assert second_s < 2.0, done.stderr
    assert "did not answer" in done.stderr


WAITING = """
import threading, time, numpy, holmes_comm
store = holmes_comm.LocalStore()
def wait(rank):
    holmes_comm.init(store, rank, 2, name="waiting").recv(numpy.zeros(4), 1 - rank)
for rank in range(2):
    threading.Thread(target=wait, args=(rank,), daemon=True).start()
time.sleep(60)
"""


def test_questions_that_mean_other_processes_do_not_keep_the_next_one_waiting() -> None:
    """Whoever asks for another process hangs up at once; a record takes 0.3 s where threads hang."""
    process = subprocess.Popen([sys.executable, "-c", WAITING])
    try:
        until(lambda: [len(record.views) for record in ask_processes([process.pid]).records] == [2])
        (path,) = Path(_C.debug_socket_folder()).glob(f"{process.pid}-*.sock")
        for _ in range(8):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as unasked:
                unasked.connect(str(path))
        began_s = time.monotonic()
        answers = ask_processes([process.pid])
        assert [record.pid for record in answers.records] == [process.pid]
        assert time.monotonic() - began_s < 1.5
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:  # as `nc -U PATH < /dev/null`
            asker.settimeout(10)
            asker.connect(str(path))
            asker.shutdown(socket.SHUT_WR)
            assert asker.recv(1) == b"{"
    finally:
        process.kill()
        process.wait()
