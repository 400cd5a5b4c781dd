"""What communicators cost and do in their process: idle ones, I/O threads and their processors, forked children."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from namespaces import needs_namespaces
from process_pair import run_pair
from ranks import run_communicators

TRANSPORTS = ["tcp", "auto"]
IDLE_CPU_S = 0.02


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_idle_communicators_cost_nothing(transport: str, tmp_path: Path) -> None:
    # Where no `holmes debug` of another test asks who they are.
    said = run_pair("idle", transport, XDG_RUNTIME_DIR=str(tmp_path))
    assert len(said) == 2
    for rank in said:
        assert rank["cpu_s"] < IDLE_CPU_S, rank
        assert any("holmes-io-" in name for name in rank["wake_ups"]), rank
        assert not any(rank["wake_ups"].values()), rank


def test_number_and_processors_of_the_io_threads() -> None:
    cpu = max(os.sched_getaffinity(0))
    for rank in run_pair("pinned", "tcp", HOLMES_IO_THREADS="3", HOLMES_IO_CPUS=str(cpu)):
        assert rank["io_threads"] == {f"holmes-io-{number}": [cpu] for number in range(3)}
        assert rank["own"] == sorted(os.sched_getaffinity(0))
    for rank in run_pair("pinned", "tcp"):
        assert rank["io_threads"] == {"holmes-io-0": rank["own"]}


def test_processors_that_do_not_exist_are_refused() -> None:
    program = (
        "import holmes_comm\n"
        "try:\n"
        "    holmes_comm.init(holmes_comm.LocalStore(), 0, 1)\n"
        "except holmes_comm.UsageError as error:\n"
        "    print(error)\n"
    )
    for variable, value, rule in [
        ("HOLMES_IO_CPUS", "0-1023", "may not run on"),
        ("HOLMES_IO_CPUS", "3-1", "processors as"),
        ("HOLMES_IO_THREADS", "0", "a whole number from 1 to 64"),
    ]:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {variable: value},
        )
        assert f"{variable}='{value}'" in done.stdout, done
        assert rule in done.stdout
        assert "unset it" in done.stdout


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_forked_child_neither_uses_nor_keeps_the_communicator(transport: str) -> None:
    said = run_pair("forked", transport)
    child = next(line for line in said if "child" in line)
    try:
        os.kill(child["child"], 0)  # it lives
        assert len(child["refused"]) == 3, child
        assert all("belongs to the process that made it" in text for text in child["refused"])
        assert child["dead"]
        survivor = next(line for line in said if line.get("rank") == 0)
        assert "rank 1 (host" in survivor["message"]
        # Before the child's end.
        assert survivor["seconds"] < 10
    finally:
        os.kill(child["child"], signal.SIGKILL)


FORK_WITH_A_STORE = """
import os, sys, threading
import holmes_comm
store = holmes_comm.TcpStore("127.0.0.1", 0, True)
child = os.fork()
if child == 0:
    for number in range(200):
        store.set(f"child {number}", str(number).encode())
    # What a new thread gets may be what the server's had: the child must not take it for that.
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    sys.exit(0)
for number in range(200):
    store.set(f"parent {number}", str(-number).encode())
assert os.waitpid(child, 0)[1] == 0
assert [store.get(f"child {number}") for number in range(200)] == [str(number).encode() for number in range(200)]
assert [store.get(f"parent {number}") for number in range(200)] == [str(-number).encode() for number in range(200)]
print("both")
"""


def test_a_forked_child_uses_and_drops_its_parents_store() -> None:
    run = subprocess.run(
        [sys.executable, "-c", FORK_WITH_A_STORE], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "both\n", "")


WITHOUT_STANDARD_DESCRIPTORS = """
import os, threading
import numpy as np
import holmes_comm
os.closerange(0, 3)
store = holmes_comm.TcpStore("127.0.0.1", 0, is_server=True)
right = []
def run(rank):
    comm = holmes_comm.init(store, rank, 2, transport="tcp", name="closed", timeout_s=20.0, connect_timeout_s=20.0)
    for _ in range(20):
        for descriptor in (1, 2):
            os.write(descriptor, b"what a library prints")
        data = np.ones(1000)
        comm.all_reduce(data)
        right.append(bool((data == 2).all()))
threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
os._exit(0 if right == [True] * 40 else 1)
"""


def test_what_is_printed_where_nothing_is_open_goes_into_no_stream() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT_STANDARD_DESCRIPTORS], timeout=60, check=False)
    assert run.returncode == 0


WITHOUT_PROC = """
import threading
import numpy as np
import holmes_comm
store = holmes_comm.TcpStore("127.0.0.1", 0, is_server=True)
def run(rank):
    comm = holmes_comm.init(store, rank, 3, name="no proc", timeout_s=20.0, connect_timeout_s=20.0)
    data = np.ones(3)
    comm.all_reduce(data)
    print(f"{data.tolist()}\\n", end="")  # one write: lines of threads do not mix
threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


@needs_namespaces
def test_ranks_of_one_host_meet_where_proc_is_hidden() -> None:
    hidden = ["unshare", "-Urm", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
    run = subprocess.run(
        [*hidden, sys.executable, "-c", WITHOUT_PROC], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.stdout == "[3.0, 3.0, 3.0]\n" * 3, run.stderr


def _in_new_network(*command: str) -> subprocess.CompletedProcess[str]:
    """The command in a network namespace of its own, in which nothing is up."""
    return subprocess.run(["unshare", "-Urn", *command], capture_output=True, text=True, timeout=60, check=False)


@needs_namespaces
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_loopback_device_that_is_down_is_named(host: str) -> None:
    code = f"import holmes_comm; holmes_comm.TcpStore({host!r}, 0, is_server=True, timeout_s=0.2)"
    run = _in_new_network(sys.executable, "-c", code)
    assert "Network is unreachable" in run.stderr
    assert "the loopback device of this network namespace is down: ip link set lo up" in run.stderr


_A_NIC_AND_NO_LOOPBACK = """
set -e
ip link add nic0 type veth peer name nic1
ip address add 10.9.0.1/24 dev nic0
ip link set nic0 up
ip link set nic1 up
"$0" -c "$1"
"""

_STORE_AT_OWN_ADDRESS = """
import time
import holmes_comm
begin = time.monotonic()
try:
    holmes_comm.TcpStore("10.9.0.1", 0, is_server=True, timeout_s=30.0)
except holmes_comm.UnreachableError as error:
    print(error, "after", time.monotonic() - begin)
"""

_SOCKETS_AT_OWN_ADDRESS = """
import threading
import holmes_comm
store = holmes_comm.LocalStore()
def run(rank):
    try:
        holmes_comm.init(store, rank, 2, transport="tcp", name="own", connect_timeout_s=2.0)
    except holmes_comm.UnreachableError as error:
        print(error)
threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
"""


@needs_namespaces
@pytest.mark.parametrize("program", [_STORE_AT_OWN_ADDRESS, _SOCKETS_AT_OWN_ADDRESS], ids=["store", "sockets"])
def test_a_loopback_device_that_is_down_is_named_for_a_hosts_own_address(program: str) -> None:
    run = _in_new_network("sh", "-c", _A_NIC_AND_NO_LOOPBACK, sys.executable, program)
    assert run.returncode == 0, run.stderr
    assert "no answer" in run.stdout
    assert ", as the loopback device of this network namespace is down: ip link set lo up; check" in run.stdout
    if program == _STORE_AT_OWN_ADDRESS:
        assert float(run.stdout.split()[-1]) < 15


SMALL_FILES_ONLY = """
import resource, threading
import holmes_comm
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))
store = holmes_comm.LocalStore()
def run(rank):
    try:
        holmes_comm.init(store, rank, 2, transport="shm", name="small", connect_timeout_s=20.0)
    except holmes_comm.SystemError as error:
        print(error)
threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def test_a_limit_of_file_sizes_is_named() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SMALL_FILES_ONLY], capture_output=True, text=True, timeout=60, check=False
    )
    assert "this process may make files of 65536 bytes, those in memory too (ulimit -f), raise that" in run.stdout


END_IN_MID_OPERATION = """
import numpy as np
import holmes_comm
store = holmes_comm.LocalStore()
import threading
comms = [None, None]
def make(rank):
    comms[rank] = holmes_comm.init(
        store, rank, 2, transport="{transport}", name="ends", timeout_s=20.0, connect_timeout_s=20.0
    )
threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
for _ in range(50):  # under way when the interpreter ends: nobody has waited, nobody receives
    comms[0].send(np.ones(1_000_000, "float32"), 1, async_op=True)
    comms[0].all_reduce(np.ones(100_000, "float32"), async_op=True)
    comms[1].recv(memoryview(bytearray(4)).cast("f"), 0, tag=7, async_op=True)
print("end", flush=True)
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_interpreter_may_end_in_mid_operation(transport: str) -> None:
    program = END_IN_MID_OPERATION.format(transport=transport)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "end\n"), ended.stderr
    assert not ended.stderr


def test_what_an_engine_thread_let_go_of_is_freed() -> None:
    """Arrays of operations that ended in an I/O thread, which never takes the interpreter lock."""

    def body(comm):
        arrays = [np.ones(200_000, "float32") for _ in range(8)]
        gone = [weakref.ref(array) for array in arrays]
        works = [comm.all_reduce(array, async_op=True) for array in arrays]
        for work in works:
            while not work.is_completed():
                time.sleep(0.001)
        del arrays, works, work
        return gone

    for gone in run_communicators(2, body):
        deadline = time.monotonic() + 10
        while any(ref() is not None for ref in gone) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any(ref() is not None for ref in gone)


ODD_BYTES = """
import os
import holmes_comm
os.environb[b"{variable}"] = b"a\\xffb"
try:
    holmes_comm.init(holmes_comm.LocalStore(), 0, 1)
    print("taken")
except holmes_comm.UsageError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("HOLMES_HOSTNAME", "taken"),
        ("HOLMES_FLIGHT_RECORDER_DIR", "taken"),
        ("HOLMES_SECRET_FILE", r"HOLMES_SECRET_FILE"),
        ("HOLMES_TLS", r"HOLMES_TLS='a\xffb' is not allowed"),
        ("HOLMES_SPIN_US", r"HOLMES_SPIN_US='a\xffb' is not allowed"),
        ("HOLMES_LOG", r"HOLMES_LOG='a\xffb' is not allowed"),
        ("HOLMES_NICS", r"HOLMES_NICS='a\xffb' is not allowed: it must be UTF-8"),
        ("HOLMES_CLUSTER", r"HOLMES_CLUSTER='a\xffb' is not allowed: it must be UTF-8"),
        ("HOLMES_CLUSTER_NICS", "taken"),
    ],
)
def test_what_is_no_text_is_named_or_taken(variable: str, words: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", ODD_BYTES.format(variable=variable)],
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert words in run.stdout, run


ODD_HOST = """
import os, socket, threading
import numpy as np
import holmes_comm
socket.sethostname(b"h\\xff\\xc3\\xb6")
store = holmes_comm.LocalStore()
def run(rank):
    comm = holmes_comm.init(store, rank, 2, transport="tcp", name="odd", connect_timeout_s=20.0)
    if rank == 0:
        comm.abort("enough")
    try:
        comm.barrier()
    except holmes_comm.AbortedError as error:
        print(ascii(str(error)) + ascii(comm.connections()[0]["host"]) + "\\n", end="")
threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


@needs_namespaces
def test_a_host_may_have_a_name_that_is_no_text() -> None:
    run = subprocess.run(
        ["unshare", "-Uru", sys.executable, "-c", ODD_HOST], capture_output=True, text=True, timeout=60, check=False
    )
    lines = run.stdout.splitlines()
    assert len(lines) == 2, run
    for line in lines:
        assert r"(host h\\xff\xf6)" in line, run
        assert line.endswith(r"'h\\xff\xf6'"), run


NO_THREADS = """
import resource, sys, threading
import holmes_comm
import holmes_comm.communicator, holmes_comm.metrics_server
store, make = holmes_comm.LocalStore(), holmes_comm.TcpStore
limited = threading.Event()
def run(rank):
    limited.wait()
    try:
        holmes_comm.init(store, rank, 2, name="threads", connect_timeout_s=20.0)
    except holmes_comm.HolmesError as error:
        print(f"{error}\\n", end="")
threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2) if sys.argv[1] == "communicator"]
[thread.start() for thread in threads]
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (128 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
limited.set()
[thread.join() for thread in threads]
if not threads:
    try:
        make("127.0.0.1", 0, is_server=True)
    except holmes_comm.HolmesError as error:
        print(error)
"""


@pytest.mark.parametrize(("what", "purpose"), [("communicator", ""), ("store", "serves the store")])
def test_a_thread_that_cannot_be_started_is_told_with_its_limits(what: str, purpose: str) -> None:
    stacks = ["sh", "-c", 'ulimit -S -s 262144 && exec "$@"', "sh"]  # of KiB
    run = subprocess.run(
        [*stacks, sys.executable, "-c", NO_THREADS, what], capture_output=True, text=True, timeout=60, check=False
    )
    assert f"cannot start a thread that {purpose}" in run.stdout, run
    assert "Resource temporarily unavailable (errno 11)" in run.stdout, run
    assert "ulimit -u" in run.stdout, run
    assert "(ulimit -v: unlimited)" not in run.stdout, run


#: Numbers of the system calls epoll_create1 and epoll_ctl.
EPOLL_CALLS = {"x86_64": (291, 233), "aarch64": (20, 21)}

REFUSED_CALL = """
import ctypes, os, struct, sys, threading
import numpy as np
import holmes_comm
def refuse(call, error):  # to this thread, by a filter: load the number; is it this one? then the error; else allow
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, call), (0x06, 0, 0, 0x50000 | error), (0x06, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    told = ctypes.create_string_buffer(struct.pack("HxxxxxxN", len(steps), ctypes.addressof(program)))
    libc = ctypes.CDLL(None)
    if libc.prctl(38, 1, 0, 0, 0) != 0 or libc.prctl(22, 2, told, 0, 0) != 0:
        os._exit(77)
store = holmes_comm.LocalStore()
def run(rank):
    if rank == 1:
        refuse(int(sys.argv[1]), int(sys.argv[2]))
    try:
        comm = holmes_comm.init(store, rank, 3, name="refused", transport=sys.argv[3], connect_timeout_s=20.0)
        comm.all_reduce(np.ones(3), timeout_s=20.0)
    except holmes_comm.HolmesError as error:
        print(f"{type(error).__name__} {error}\\n", end="")
threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


@pytest.mark.skipif(os.uname().machine not in EPOLL_CALLS, reason="the system calls' numbers are of x86_64 and aarch64")
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (0, errno.EMFILE, "cannot make an epoll descriptor: Too many open files (errno 24); this process may open"),
        (1, errno.ENOSPC, "cannot watch a control connection: No space left on device (errno 28); raise the limit"),
    ],
)
def test_what_the_system_refuses_a_rank_is_told_to_all(call: int, error: int, words: str, transport: str) -> None:
    number = EPOLL_CALLS[os.uname().machine][call]
    run = subprocess.run(
        [sys.executable, "-c", REFUSED_CALL, str(number), str(error), transport],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    if run.returncode == 77:
        pytest.skip("needs seccomp, which this container forbids")
    lines = run.stdout.splitlines()
    assert len(lines) == 3, run
    for line in lines:
        assert line.startswith("SystemError rank 1 (host"), run
        assert words in line, run


WAITING_BESIDE_A_THREAD = """
import threading, time
import numpy as np
import holmes_comm
store, rounds = holmes_comm.LocalStore(), 2000
counts = {}
def run(rank):
    comm = holmes_comm.init(store, rank, 2, transport="shm", name="beside")
    data, message = np.ones(1), np.zeros(1)
    for _ in range(rounds):  # none of which may wait for the interpreter to take turns (5 ms)
        comm.barrier()
        comm.all_reduce(data)
        comm.send(data, 1) if rank == 0 else comm.recv(message, 0)
    for name, call in {
        "barrier": comm.barrier,
        "broadcast": lambda: comm.broadcast(data, 0),
        "recv": lambda: comm.recv(message, 0) if rank else comm.send(data, 1),
        "sendrecv": lambda: comm.sendrecv(data, 1 - rank, message, 1 - rank),
        "batch": lambda: comm.batch([("send" if rank == 0 else "recv", data, 1 - rank, 0)], async_op=False),
    }.items():
        if rank == 0:
            end, counts[name] = time.monotonic() + 0.1, 0
            while time.monotonic() < end:
                counts[name] += 1
        call()
begin = time.monotonic()
threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(time.monotonic() - begin, min(counts.values()))
"""


def test_who_waits_keeps_the_interpreter_from_nobody() -> None:
    """A call keeps the interpreter's lock for a microsecond or two, in which another thread of the process waits."""
    run = subprocess.run(
        [sys.executable, "-c", WAITING_BESIDE_A_THREAD], capture_output=True, text=True, timeout=120, check=True
    )
    seconds, least_count = map(float, run.stdout.split())
    assert seconds < 20, "6000 calls of two threads; one each 5 ms would be 30 s"
    assert least_count > 1000, "a tenth of a second beside a rank that waits"
