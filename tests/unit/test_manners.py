"""What Python does with any object: show, compare, copy and pickle it, and look at one that was never made."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import subprocess
import sys

import numpy as np
import pytest
import yaml
from paths import FIXTURES
from topologies import topology_of

import holmes
import holmes_comm
from holmes.lab.fake_sysfs import write_sysfs
from holmes_comm import _C, CommunicatorOptions, Compression, GroupOptions, LocalStore, NicSelection

MACHINES = FIXTURES / "machines"
COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "old pickle": lambda value: pickle.loads(pickle.dumps(value, protocol=2)),
}


@pytest.fixture(scope="module")
def recorded_nics(tmp_path_factory):
    """Of every recorded machine, found anew by each call."""
    roots = []
    for machine in sorted(MACHINES.glob("*.yaml")):
        if machine.stem != "expected":
            root = tmp_path_factory.mktemp(machine.stem) / machine.stem
            roots.append(str(write_sysfs(root, yaml.safe_load(machine.read_text()))))
    return lambda: [nic for root in roots for nic in holmes_comm.discover_nics(root)]


def communicator(name="alone"):
    return holmes_comm.init(LocalStore(), 0, 1, name=name)


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_a_nic_is_that_nic(how, recorded_nics):
    nics = recorded_nics()
    assert len(nics) > 5
    for nic in nics:
        twin = COPIES[how](nic)
        assert twin.to_dict() == nic.to_dict()
        assert twin == nic
        assert hash(twin) == hash(nic)
        assert twin.port_name == nic.port_name


def test_nics_are_equal_where_their_data_are(recorded_nics):
    nics, again = recorded_nics(), recorded_nics()
    assert nics == again
    assert len({*nics, *again}) == len({str(nic.to_dict()) for nic in nics})
    nic = next(nic for nic in nics if len(nic.addresses) > 1)
    assert nic != nic.with_address(nic.addresses[-1].partition("/")[0])
    assert nic != nic.name
    assert nic is not None


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_a_compression_begins_anew(how):
    for codec, kept in (("bf16", False), ("int4", True)):
        options = {"rotation": kept, "error_feedback": kept, "differences": kept}
        twin = COPIES[how](Compression(codec, **options))
        assert twin.codec == codec
        assert all(getattr(twin, name) is kept for name in options)


def in_a_worker(given, answer):
    selection, compression, nic, options = given
    answer.put((selection, compression.codec, nic.name, options))


def test_a_spawned_worker_is_given_all_of_them(recorded_nics):
    options = GroupOptions(nics=NicSelection(names=("lo",)), options=CommunicatorOptions(timeout_s=3))
    given = (options.nics, Compression("bf16"), recorded_nics()[0], options)
    spawn = multiprocessing.get_context("spawn")
    answer = spawn.SimpleQueue()
    worker = spawn.Process(target=in_a_worker, args=(given, answer))
    worker.start()
    assert answer.get() == (options.nics, "bf16", given[2].name, options)
    worker.join(60)
    assert worker.exitcode == 0


def test_what_is_shown_says_what_it_is():
    every = Compression("int8", rotation=True, error_feedback=True, differences=True)
    assert repr(every) == "Compression('int8', rotation=True, error_feedback=True, differences=True)"
    assert repr(Compression("bf16")) == "Compression('bf16')"
    assert repr(LocalStore()) == "<LocalStore>"
    server = holmes_comm.TcpStore("127.0.0.1", 0, True, secret="shown to nobody: 0123456789")
    assert repr(server) == f"<TcpStore at 127.0.0.1:{server.port}, served here>"
    client = holmes_comm.TcpStore("127.0.0.1", server.port, secret="shown to nobody: 0123456789")
    assert repr(client) == f"<TcpStore at 127.0.0.1:{server.port}>"
    assert repr(_C.env_variables()[0]) == f"<EnvVariable {_C.env_variables()[0].name}>"


def test_what_is_shown_of_an_operation():
    group = communicator()
    work = group.all_reduce(np.ones(3), async_op=True)
    work.wait()
    assert repr(work).startswith("<Work completed, ")
    assert repr(work).endswith(" s>")


@pytest.mark.parametrize("make", [communicator, LocalStore, lambda: communicator().barrier(async_op=True)])
def test_what_belongs_to_its_process_says_so_where_it_is_copied(make):
    for how in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"belongs to the process that made it; (make|call|wait)"):
            how(make())


def test_an_object_that_was_never_made_is_refused():
    """It had memory with anything in it, and showing it ended the process."""
    classes = [kind for kind in vars(_C).values() if isinstance(kind, type)]
    assert len(classes) > 15
    program = """
import sys
from holmes_comm import _C
kind = getattr(_C, sys.argv[1])
unmade = kind.__new__(kind)
for name in dir(kind):
    if name.startswith("__") and name not in ("__repr__", "__getstate__", "__copy__"):
        continue
    try:
        value = getattr(unmade, name)
        if name in ("__repr__", "__getstate__", "__copy__", "to_dict", "check", "reset"):
            value()
    except (TypeError, RuntimeError) as error:
        assert str(error), name
class Mine(kind):
    def __init__(self):
        try:
            repr(self)
        except TypeError as error:
            assert "super().__init__" in str(error), error
try:
    Mine()
except TypeError:
    pass
print("still here")
"""
    running = [
        subprocess.Popen([sys.executable, "-c", program, kind.__name__], stdout=-1, stderr=-2, text=True)
        for kind in classes
    ]
    said = {
        kind.__name__: (one.communicate(timeout=120)[0], one.returncode)
        for kind, one in zip(classes, running, strict=True)
    }
    assert {name: (text, code) for name, (text, code) in said.items() if (text, code) != ("still here\n", 0)} == {}


@pytest.mark.parametrize("name", ["quint8", "qint8", "qint32", "quint4x2", "quint2x4"])
def test_shared_memory_has_no_quantized_tensors(name):
    """They lack what torch looks up in each of them, and showing one ended the process."""
    dtype = getattr(pytest.importorskip("torch"), name)
    with pytest.raises(holmes_comm.UsageError, match=r"quantized.*torch\.uint8"):
        holmes_comm.empty(4, dtype)


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_an_error_has_all_that_it_had(how):
    error = holmes_comm.PeerLostError("rank 1 is lost", rank=0, peer=1, host="n1", nic="eth1", system_errno=104)
    error.step = 7
    error.__notes__ = ["in step 7"]  # as add_note does from Python 3.11 on
    twin = COPIES[how](error)
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert vars(twin) == vars(error)


def test_process_groups_are_copied_and_shown():
    """To copy them ended in a recursion."""
    groups = pytest.importorskip("holmes.training.process_groups").ProcessGroups

    class Group:
        def size(self):
            return 4

    mine = groups({"dp": Group()})
    assert copy.copy(mine) == mine
    assert copy.copy(mine).dp is mine.dp
    assert repr(mine) == "<ProcessGroups dp: 4 ranks>"
    with pytest.raises(AttributeError, match="no process group of kind 'pp'; it has dp"):
        _ = mine.pp
    with pytest.raises(AttributeError, match="no attribute '_nothing'"):
        _ = mine._nothing


def test_a_proof_is_true_where_it_holds():
    topology = topology_of([[2, 2], [2, 2]])
    assert holmes.check({"tp": [[0, 1], [2, 3]]}, topology)
    assert not holmes.check({"tp": [[0, 1, 2, 3, 4, 5, 6, 7]]}, topology)


CLOSED = """
import os, holmes_comm
store = holmes_comm.TcpStore("127.0.0.1", 0, True)
os.closerange(3, 256)
try:
    store.set("key", "value")
except holmes_comm.UnreachableError as error:
    assert "Bad file descriptor" in str(error)
    print("refused")
"""


def test_a_program_ends_that_has_closed_all_descriptors():
    """The store's thread slept where nothing wakes it, and the end waited for that thread."""
    ended = subprocess.run([sys.executable, "-c", CLOSED], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "refused\n"), ended.stderr


SUBINTERPRETER = """
import _xxsubinterpreters as interpreters
other = interpreters.create()
for program in ("holmes_comm.LocalStore()", "from holmes_comm import _C", "import holmes_comm.nics"):
    try:
        interpreters.run_string(other, "import holmes_comm; " + program)
    except interpreters.RunFailedError as error:
        assert "in Python's main interpreter only" in str(error), error
        print("refused")
"""


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="needs Python before 3.12: later ones load it, or refuse it")
def test_a_second_interpreter_is_refused():
    """It waited for ever."""
    ended = subprocess.run([sys.executable, "-c", SUBINTERPRETER], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, 3 * "refused\n"), ended.stderr
