"""`holmes bench`: sizes, expected results, statistics, and the whole command with Gloo beside it."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time

import numpy as np
import pytest

import holmes_comm
from holmes.tools.bench import OPERATIONS, Case, Control, Peer, Settings, measure, parse_bytes
from holmes.tools.bench.launch import find_mpirun
from holmes.tools.bench.operations import DTYPES, REDUCTIONS
from holmes.tools.bench.peer_mpi import MPI_PEERS, transport_parameters


@pytest.mark.parametrize(
    ("text", "expected"), [("8", 8), ("64K", 65536), ("1.5M", 1572864), ("1GiB", 1 << 30), ("2kb", 2048)]
)
def test_parse_bytes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "M", "-1", "8Q", "1 2"])
def test_parse_bytes_names_what_is_wrong(text):
    with pytest.raises(ValueError, match="is not a number of bytes"):
        parse_bytes(text)


def test_sizes_are_geometric_and_end_at_the_end():
    settings = Settings(("all_reduce",), begin_bytes=8, end_bytes=100, factor=2)
    assert settings.sizes_bytes() == [8, 16, 32, 64]
    assert Settings(("all_reduce",), begin_bytes=8, end_bytes=8).sizes_bytes() == [8]
    assert Settings(("all_reduce",), sizes=(1000, 8)).sizes_bytes() == [1000, 8]


def test_settings_travel_as_json():
    settings = Settings(("all_reduce", "barrier"), nics=("class:infiniband", "eth1"), peers=())
    assert Settings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"operations": ("all_rduce",)}, "all_rduce.*known are all_reduce"),
        ({"dtype": "float8"}, "float8.*float16"),
        ({"begin_bytes": 0}, "0 < begin"),
        ({"sizes": (8, 0)}, "above 0"),
        ({"factor": 1.0}, "greater than 1"),
        ({"rounds": 0}, "at least one round"),
        ({"peers": (), "holmes": False}, "nothing to measure"),
        ({"peers": ("nccl",)}, "nccl.*known are gloo"),
        ({"peers": ("openmpi-tcp", "openmpi-shm")}, "starts once in a process"),
        ({"dtype": "int8", "op": "avg"}, "avg of int8"),
        ({"op": "bxor"}, "bxor of float32"),
    ],
)
def test_wrong_settings_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(Settings(("all_reduce",)), **change)


@pytest.mark.parametrize("name", OPERATIONS)
def test_bus_factors_are_those_of_nccl_tests(name):
    expected = {"all_reduce": 1.5, "reduce_scatter": 0.75, "all_gather": 0.75, "all_to_all": 0.75, "ping_pong": 2}
    expected |= {"gather": 0.75, "scatter": 0.75, "gatherv": 0.75, "scatterv": 0.75}
    expected |= {"all_gatherv": 0.75, "all_to_allv": 0.75}
    assert OPERATIONS[name].bus_factor(4) == expected.get(name, 1.0)


def simulate(cases, name, op):
    """Fills every rank's output as the operation is defined; shares nothing with what `Case` expects."""
    buffers = [case.make_buffers() for case in cases]
    dtype, n = cases[0].dtype, len(cases)
    inputs = [dtype.decode(source) for source, _ in buffers]
    if dtype.kind == "bool":
        inputs = [values.astype(bool) for values in inputs]
    total = REDUCTIONS[op](np.stack(inputs)) if cases[0].operation.reduces else None
    for rank, (_, output) in enumerate(buffers):
        part = len(output) // n
        if name == "all_reduce" or (name == "reduce" and rank == 0):
            output[:] = dtype.encode(total)
        elif name == "reduce_scatter":
            output[:] = dtype.encode(total[rank * len(output) : (rank + 1) * len(output)])
        elif name in ("all_gather", "all_gatherv"):
            output[:] = dtype.encode(np.concatenate(inputs))
        elif name == "all_to_allv":
            least = len(output) * 2 // (n * (n + 1))
            starts = [[least * sum((j + k) % n + 1 for k in range(rank)) for rank in range(n + 1)] for j in range(n)]
            output[:] = dtype.encode(
                np.concatenate([v[s[rank] : s[rank + 1]] for v, s in zip(inputs, starts, strict=True)])
            )
        elif name == "all_to_all":
            output[:] = dtype.encode(np.concatenate([v[rank * part : (rank + 1) * part] for v in inputs]))
        elif name == "broadcast":
            output[:] = dtype.encode(inputs[0])
        elif name in ("gather", "gatherv") and rank == 0:
            output[:] = dtype.encode(np.concatenate(inputs))
        elif name == "scatter":
            output[:] = dtype.encode(inputs[0][rank * len(output) : (rank + 1) * len(output)])
        elif name == "scatterv":
            first = len(output) * rank // 2  # 1 + 2 + ... + rank of the least parts, of which this rank has rank + 1
            output[:] = dtype.encode(inputs[0][first : first + len(output)])
        elif name in ("send_recv", "batch"):
            output[:] = dtype.encode(inputs[rank - 1])
        elif name == "send" and rank == 1:
            output[:] = dtype.encode(inputs[0])
        elif name == "ping_pong" and rank < 2:
            output[:] = dtype.encode(inputs[1 - rank])
    return [output for _, output in buffers]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in OPERATIONS if OPERATIONS[name].has_data])
@pytest.mark.parametrize(("ranks", "size_bytes"), [(1, 40), (3, 8), (4, 30000)])
def test_wrong_elements_counts_exactly_what_is_wrong(name, dtype, ranks, size_bytes):
    ops = ["sum", "max"] if OPERATIONS[name].reduces else ["sum"]
    if ranks < OPERATIONS[name].least_ranks:
        pytest.skip(f"{name} needs {OPERATIONS[name].least_ranks} ranks")
    for op in ops + (["avg"] if OPERATIONS[name].reduces and DTYPES[dtype].kind == "float" else []):
        cases = [Case(OPERATIONS[name], size_bytes, DTYPES[dtype], op, rank, ranks) for rank in range(ranks)]
        outputs = simulate(cases, name, op)
        for case, output in zip(cases, outputs, strict=True):
            assert case.wrong_elements(output) == 0
        to = 1 if name == "send" else 0
        outputs[to][-1] = ~outputs[to][-1] if dtype == "bool" else outputs[to][-1] + 2  # of bfloat16: bits
        assert cases[to].wrong_elements(outputs[to]) == 1


class SleepingPeer(Peer):
    """Does the all-reduce right or wrong, in a known time."""

    def __init__(self, name, delay_s, wrong):
        self.name, self.delay_s, self.wrong = name, delay_s, wrong

    def setup(self, context):
        pass

    def prepare(self, case, source, output):
        expected = case._expected()
        expected[: self.wrong] += 1
        calls = iter([expected])
        event = threading.Event()

        def call():
            output[:] = next(calls, source)
            event.wait(self.delay_s)

        return call

    def teardown(self):
        pass


def test_measure_compares_peers_and_counts_errors():
    settings = Settings(("all_reduce",), rounds=3, seconds=0.2, warmup=1)
    store = holmes_comm.LocalStore()
    results = {}

    def run(rank):
        peers = [SleepingPeer("fast", 0.005, 0), SleepingPeer("slow", 0.02, 3)]
        case = Case(OPERATIONS["all_reduce"], 400, DTYPES["float32"], "sum", rank, 2)
        results[rank] = measure(case, peers, Control(store, rank, 2), settings, ["slow"])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(2):
        fast, slow = results[rank]
        assert (fast.wrong_elements, slow.wrong_elements) == (0, 6)
        assert len(fast.round_times_s) == 3
        assert len(fast.singles_s) >= 6
        assert 0.005 <= fast.p50_s <= fast.p99_s
        assert slow.ratios == {}
        assert 1.5 < fast.ratios["slow"] < 8
        assert fast.algorithm_gb_per_s == pytest.approx(400 / fast.time_s / 1e9)
        assert fast.cpu_s > 0
        assert fast.gb_per_core_s == pytest.approx(400 * 2 * fast.calls / fast.cpu_s / 1e9)
    # Every rank holds the same samples: iterations were agreed and the slowest rank counts.
    assert np.array_equal(results[0][0].singles_s, results[1][0].singles_s)


def bench(*arguments, env=None):
    return subprocess.run(
        [sys.executable, "-m", "holmes", "bench", *arguments], capture_output=True, text=True, timeout=150, env=env
    )


@pytest.mark.parametrize("through", ["api", "torch"])
def test_bench_with_gloo_beside(tmp_path, through):
    pytest.importorskip("torch")
    path = tmp_path / "result.json"
    sizes = ["-b", "1000", "-e", "64K", "-f", "65", "--seconds", "0.02", "--rounds", "2"]
    run = bench(*sizes, "--ranks", "2", "--through", through, "--json", str(path))
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(path.read_text())
    assert {row["operation"] for row in result["rows"]} == set(OPERATIONS)
    assert {row["peer"] for row in result["rows"]} == {"holmes", "gloo"}
    for row in result["rows"]:
        assert row["wrong_elements"] == 0
        assert 0 < row["p50_us"] <= row["p99_us"]
        has_gloo = row["operation"] not in ("all_gatherv", "gatherv", "scatterv")  # it has equal parts only
        assert set(row["ratios"]) == ({"gloo"} if has_gloo else set()) - {row["peer"]}
        assert 0 < row["cores"] < 64
        assert row["foreign_cores"] >= 0
    assert result["command"].startswith("holmes bench -b 1000")
    assert {"processor", "cores", "memory_gib"} <= result["hardware"].keys()
    assert {"python", "holmes-comm", "torch"} <= result["versions"].keys()


@pytest.mark.parametrize("peer", [peer for peer in MPI_PEERS if peer != "ucx-rdma"])  # which needs an HCA
def test_bench_with_open_mpi_beside(tmp_path, peer):
    pytest.importorskip("mpi4py", reason="needs mpi4py")
    if find_mpirun() is None:
        pytest.skip("needs Open MPI's mpirun")
    path = tmp_path / "result.json"
    sizes = ["-b", "1000", "-e", "64K", "-f", "65", "--seconds", "0.02", "--rounds", "2"]
    run = bench(*sizes, "--ranks", "3", "--peers", peer, "--json", str(path))
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(path.read_text())
    assert {row["operation"] for row in result["rows"] if row["peer"] == peer} == set(OPERATIONS)
    assert all(row["wrong_elements"] == 0 for row in result["rows"])
    facts = result["peers"][peer]
    assert facts["library"].startswith("Open MPI v")
    assert facts["parameters"]["OMPI_MCA_pml"] == ("ucx" if peer.startswith("ucx") else "ob1")


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("openmpi-tcp", 4, {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": "eth0"}),
        ("openmpi-shm", 5, {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "sm,self"}),
        (
            "ucx-rdma",
            5,
            {
                "OMPI_MCA_pml": "ucx",
                "OMPI_MCA_pml_ucx_tls": "any",
                "OMPI_MCA_pml_ucx_devices": "any",
                "UCX_TLS": "rc,self",
            },
        ),
    ],
)
def test_open_mpi_is_kept_to_one_transport_and_interface(name, version, expected):
    assert transport_parameters(name, version, {"GLOO_SOCKET_IFNAME": "eth0"}) == expected


def test_ucx_chooses_where_the_interface_is_loopback():
    of_loopback = transport_parameters("ucx-tcp", 5, {"GLOO_SOCKET_IFNAME": "lo"})
    assert of_loopback["UCX_TLS"] == "tcp,self"
    assert "UCX_NET_DEVICES" not in of_loopback
    assert transport_parameters("ucx-tcp", 5, {"GLOO_SOCKET_IFNAME": "eth0"})["UCX_NET_DEVICES"] == "eth0"


def test_open_mpi_refuses_ranks_that_mpirun_did_not_start():
    pytest.importorskip("mpi4py", reason="needs mpi4py")
    if find_mpirun() is None:
        pytest.skip("needs Open MPI")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMIX_"))}
    store = holmes_comm.TcpStore("127.0.0.1", 0, is_server=True)
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    place["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    arguments = ["all_reduce", "-b", "8", "-e", "8", "--no-holmes", "--peers", "openmpi-tcp"]
    run = bench(*arguments, env={**environment, **place})
    assert run.returncode == 1
    assert "rank 0: openmpi-tcp: mpirun did not start this process" in run.stderr


def test_missing_mpirun_is_said():
    if shutil.which("mpirun", path=sysconfig.get_path("scripts")) is not None:
        pytest.skip("this environment has its own mpirun")
    run = bench("all_reduce", "-b", "8", "-e", "8", "--peers", "openmpi-tcp", env={**os.environ, "PATH": "/nowhere"})
    assert run.returncode == 1
    assert "no mpirun on PATH; install Open MPI" in run.stderr


def test_bench_without_torch_on_named_nic_and_shared_memory(tmp_path):
    path = tmp_path / "result.json"
    sizes = ["-b", "4K", "-e", "4K", "--seconds", "0.02", "--rounds", "1", "--peers", "none", "--ranks", "3"]
    run = bench("all_reduce", *sizes, "--transport", "tcp", "--nics", "lo", "--json", str(path))
    assert run.returncode == 0, run.stdout + run.stderr
    (row,) = json.loads(path.read_text())["rows"]
    assert row["peer"] == "holmes[lo]"
    assert json.loads(path.read_text())["peers"]["holmes[lo]"]["paths"] == [{"transport": "tcp", "interface": "lo"}]
    assert bench("all_reduce", *sizes, "--transport", "shm").returncode == 0


def test_bench_failure_of_set_up_is_reported_and_ends():
    run = bench("all_reduce", "-b", "8", "-e", "8", "--ranks", "3", "--peers", "none", "--nics", "no_such_nic")
    assert run.returncode == 1
    (sentence,) = run.stderr.splitlines()  # not one for each rank
    assert sentence.startswith("holmes bench: rank 0: holmes[no_such_nic]: ")
    run = bench("all_rduce")
    assert run.returncode == 2
    assert "all_rduce" in run.stderr


def test_plot_draws_every_operation_and_peer(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "result.png"
    sizes = ["-b", "1K", "-e", "4K", "--seconds", "0.02", "--rounds", "1", "--peers", "none", "--ranks", "2"]
    run = bench("all_reduce", "barrier", *sizes, "--plot", str(path))
    assert run.returncode == 0, run.stdout + run.stderr
    assert path.read_bytes().startswith(b"\x89PNG")


needs_namespaces = pytest.mark.skipif(
    subprocess.run(["unshare", "-Urn", "true"], capture_output=True).returncode != 0,
    reason="needs unprivileged user namespaces",
)


@needs_namespaces
def test_bench_on_emulated_nodes_with_their_congestion_control(tmp_path):
    path = tmp_path / "result.json"
    sizes = ["-b", "64K", "-e", "64K", "--seconds", "0.02", "--rounds", "1"]
    nodes = ["--testbed", "unlimited-pair", "--nproc-per-node", "2", "--congestion-control", "reno"]
    operations = ["all_reduce", "broadcast", "reduce"]  # two ranks share memory, the others do not
    run = bench(*operations, *sizes, *nodes, "--peers", "none", "--json", str(path))
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(path.read_text())
    assert result["ranks"] == 4
    assert [row["wrong_elements"] for row in result["rows"]] == [0, 0, 0]


@needs_namespaces
def test_open_mpi_on_emulated_nodes_uses_their_links(tmp_path):
    mpi4py = pytest.importorskip("mpi4py", reason="needs mpi4py")
    mpirun = find_mpirun()
    if mpirun is None:
        pytest.skip("needs Open MPI's mpirun")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout
    if "(Open MPI) 4" not in version:
        pytest.skip(f"needs Open MPI 4 (mpi4py {mpi4py.__version__} is there), found {version.splitlines()[:1]}")
    path = tmp_path / "result.json"
    sizes = ["-b", "4M", "-e", "4M", "--seconds", "0.2", "--rounds", "1"]
    run = bench("ping_pong", *sizes, "--testbed", "pair", "--peers", "openmpi-tcp", "--json", str(path))
    assert run.returncode == 0, run.stdout + run.stderr
    for row in json.loads(path.read_text())["rows"]:
        assert row["wrong_elements"] == 0
        assert row["bus_gb_per_s"] < 0.13  # 1 Gbit/s: past the link would be faster


def test_ctrl_c_leaves_what_was_measured_in_the_file(tmp_path):
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", "holmes", "bench", "all_reduce", "--ranks", "2", "--peers", "none"]
    options = ["--sizes", "1K,2K,4K,8K,16K,32K,64K", "--seconds", "0.5", "--rounds", "1", "--json", str(path)]
    run = subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    assert run.stdout is not None
    while run.stdout.readline().split()[:1] != ["2048"]:
        assert run.poll() is None
    os.killpg(run.pid, signal.SIGINT)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "Traceback" not in said, said
    sizes = [row["size_bytes"] for row in json.loads(path.read_text())["rows"]]
    assert sizes[:2] == [1024, 2048]
    assert len(sizes) < 7


_SLOW_MATPLOTLIB = """
import sys, time

class Slow:
    def find_spec(name, path=None, target=None):
        if name == "matplotlib":
            time.sleep(12)

sys.meta_path.insert(0, Slow)
"""


def test_sigterm_to_the_command_alone_leaves_what_was_measured(tmp_path):
    """As a batch system sends it. The picture is drawn at the end only, and its library takes 12 s to load."""
    pytest.importorskip("matplotlib", reason="draws")
    path, picture = tmp_path / "result.json", tmp_path / "picture.svg"
    (tmp_path / "sitecustomize.py").write_text(_SLOW_MATPLOTLIB)
    slow = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-m", "holmes", "bench", "all_reduce", "--ranks", "2", "--peers", "none"]
    command += ["--sizes", "1K,2K,4K,8K,16K,32K,64K", "--seconds", "2", "--rounds", "1"]
    command += ["--json", str(path), "--plot", str(picture)]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=slow)
    try:
        give_up_s = time.monotonic() + 120
        while not path.exists():
            assert run.poll() is None
            assert time.monotonic() < give_up_s
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        _, said = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in said, said
    sizes = [row["size_bytes"] for row in json.loads(path.read_text())["rows"]]
    assert 0 < len(sizes) < 7
    assert picture.exists()
