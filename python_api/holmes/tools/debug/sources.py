"""Where flight records come from: running processes of this user, and files in a folder."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from holmes.tools.debug.record import ProcessRecord

__all__ = ["Answers", "Silent", "ask_folder", "ask_processes", "read_folder", "testbed_runtime_folder"]

_ANSWER_S = 3.0  # a process takes 0.6 s at most where its threads hang
_ROUNDS = 3  # of looking for processes that have started meanwhile
_CREDENTIALS = struct.Struct("3i")  # SO_PEERCRED: pid, uid, gid


@dataclass(frozen=True)
class Silent:
    """A process that has no record: it was asked and did not answer, or others were asked.

    Attributes:
        name_pid: its number where it runs (in its own PID namespace), as in the others' records.
        host: as it calls itself, shortened; empty where unknown.
        state: "stopped" (SIGSTOP, a debugger), "busy" (it runs but does not answer), "unasked".
    """

    name_pid: int
    host: str
    state: str


@dataclass(frozen=True)
class Answers:
    """Records, processes that kept silent, and what could not be read."""

    records: tuple[ProcessRecord, ...]
    silent: tuple[Silent, ...] = ()
    notes: tuple[str, ...] = ()


def ask_processes(pids: Collection[int] = (), *, testbed_only: bool = False) -> Answers:
    """Asks this user's processes on this machine, those of a testbed included, all at once. Local.

    `pids`: only these, as they are numbered here; a process that has no communicator is not found.
    """
    found: dict[Path, ProcessRecord | Silent] = {}
    notes: dict[Path, str] = {}

    def ask(path: Path) -> None:
        try:
            if answer := _ask(path, pids):
                found[path] = answer
        except (OSError, ValueError) as error:
            notes[path] = f"{path}: {error}"

    for _ in range(_ROUNDS):  # one that starts while others are asked is in their records: it would pass for ended
        unasked = _sockets() - found.keys() - notes.keys()
        threads = {path: threading.Thread(target=ask, args=(path,), daemon=True) for path in unasked}
        for thread in threads.values():
            thread.start()
        for path, thread in threads.items():
            thread.join(_ANSWER_S + 1)
            if thread.is_alive():  # this machine is busy, too
                found[path] = _unheard(path, "busy")
    answers = [found[path] for path in sorted(found)]
    records = tuple(answer for answer in answers if isinstance(answer, ProcessRecord))
    if testbed_only:
        records = tuple(record for record in records if record.is_testbed)
    return Answers(records, tuple(answer for answer in answers if isinstance(answer, Silent)), tuple(notes.values()))


def read_folder(folder: Path) -> Answers:
    """Reads the files that processes wrote there (HOLMES_FLIGHT_RECORDER_DIR). Raises OSError where there is none."""
    records, notes = [], []
    for path in sorted(entry for entry in folder.iterdir() if entry.suffix == ".json"):
        try:
            records.append(ProcessRecord.from_dict(json.loads(path.read_text())))
        except (OSError, ValueError) as error:
            notes.append(f"{path}: {error}")
        except (AttributeError, KeyError, TypeError, RecursionError) as error:
            notes.append(f"{path}: not as a flight record is written ({type(error).__name__}: {error})")
    return Answers(tuple(records), (), tuple(notes))


def ask_folder(folder: Path, wait_s: float) -> Answers:
    """Asks all processes that have this dump folder, on whatever host, and reads what is there after `wait_s`.

    They look once a second. Raises OSError where the folder cannot be written.
    """
    (folder / "request").touch(mode=0o600)
    asked_s = time.time()
    time.sleep(wait_s)
    answers = read_folder(folder)
    old = [record for record in answers.records if record.taken_s < asked_s - wait_s]
    notes = [f"{record.host}, process {record.pid}, has not answered; its record is old" for record in old]
    return Answers(answers.records, (), (*answers.notes, *notes))


def testbed_runtime_folder() -> Path:
    """XDG_RUNTIME_DIR of this user's testbeds. There everybody is "root", whose own folder may be the real root's."""
    outer = own = os.geteuid()
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        inside, outside, count = map(int, line.split())
        if inside <= own < inside + count:
            outer = outside + own - inside
    return Path(f"/tmp/holmes-testbed-{outer}")


def _folders() -> list[Path]:
    """Of this user, outside and in a testbed."""
    from holmes_comm import _C

    own = Path(_C.debug_socket_folder())
    candidates = dict.fromkeys([own, Path(f"/tmp/holmes-{os.geteuid()}"), testbed_runtime_folder() / "holmes"])
    return [folder for folder in candidates if folder.is_dir() and os.access(folder, os.R_OK | os.X_OK)]


def _sockets() -> set[Path]:
    return {path for folder in _folders() for path in folder.glob("*.sock")}


def _unheard(path: Path, state: str) -> Silent:
    number, _, rest = path.stem.partition("-")
    return Silent(int(number), rest.rpartition("-")[0], state)


def _ask(path: Path, pids: Collection[int]) -> ProcessRecord | Silent | None:
    number = path.stem.partition("-")[0]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return None  # left behind by a process that was killed
        except BlockingIOError:  # it has taken none of many questions; its number elsewhere (in a testbed) is not known
            return _unheard(path, "stopped" if _is_stopped(int(number)) else "busy")
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid = _CREDENTIALS.unpack(raw)[0]
        if pids and pid not in pids:
            return _unheard(path, "unasked")
        if _is_stopped(pid):
            return _unheard(path, "stopped")
        chunks = []
        try:
            while chunk := connection.recv(1 << 16):
                chunks.append(chunk)
        except TimeoutError:
            return _unheard(path, "stopped" if _is_stopped(pid) else "busy")
    return ProcessRecord.from_dict(json.loads(b"".join(chunks))) if chunks else None


def _is_stopped(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in ("T", "t")
