"""Every command and Python snippet of README.md and docs/, as printed; and why some cannot run here.

A new one fails the test of its kind until it has its line in one of the tables.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from namespaces import needs_namespaces
from paths import ROOT
from topologies import topology_of

pytest.importorskip("torch", reason="needs torch: most of what is printed trains")

from holmes.lab.testbed import Testbed
from holmes.planning.plan import plan_for

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DONE = "the snippet ran"
LIMIT_S = 280  # of a command: longer is a hang, even on a slow machine

# --- Python ---

MODEL = "import torch\nmodel = torch.nn.Linear(4, 4)\n"
STEP = "model(torch.ones(2, 4)).sum().backward()\nassert next(model.parameters()).grad is not None\n"
JOB = "import torch, torch.distributed as dist, holmes, holmes_comm\ndist.init_process_group('holmes')\n"
GROUPS = JOB + "plan = holmes.make_plan(model_layers=4, pipeline=2)\ngroups = holmes.process_groups(plan)\n"
ALONE = """
import numpy, holmes, holmes_comm
store, rank, size = holmes_comm.LocalStore(), 0, 1
array, gradient = numpy.ones(4, numpy.float32), numpy.ones(64, numpy.float32)
"""
CLUSTERS = """
import os, numpy, holmes_comm
comm = holmes_comm.init(cluster=os.environ["HOLMES_HOSTNAME"][0], hierarchical_min_bytes=64)
gradient = numpy.ones(4096, numpy.float32)
"""
PLANNING = """
import holmes
from holmes import Topology
from holmes.planning.model.presets import load_model
topology = Topology.load("topology.yaml")
"""
OPTIMIZER = """
import torch.distributed.checkpoint as dcp
from pathlib import Path
data_parallel_group, steps, folder = groups.dp, 10, "saved"
batches = [(torch.ones(2, 4), torch.zeros(2, 4))] * 3
def loss_of(found, wanted): return (found - wanted).square().mean()
"""
OBSERVED = """
from holmes.planning.partition import Replanner, transformer_layers, Transformer, PartitionProblem, Stage, Link
from holmes.planning.partition import best_partition
layers = transformer_layers(Transformer(8, 64, 4), micro_batch=1, flops_per_s=1e12)
problem = PartitionProblem(layers=layers, stages=(Stage(), Stage()), links=(Link(25, 2e-5),), micro_batches=8)
best = best_partition(problem)
stage_s = [1.0, 1.0]
"""
TESTBED, HERE, TORCHRUN = "two-clusters", "here", "torchrun"
#: Words that only this snippet of this page has; where it runs; what stands before it and after it in a program.
SNIPPETS = {
    ("README.md", "NicSelection(nic_class=nics)"): (TESTBED, MODEL, STEP),
    ("README.md", "holmes.make_plan"): (TESTBED, "", ""),
    ("README.md", "holmes.DistributedOptimizer"): (TESTBED, GROUPS + MODEL, ""),
    # Its groups are those of 256 ranks.
    ("groups.md", "holmes.check(plan, topology)"): (HERE, PLANNING + "holmes.process_groups = lambda plan: plan\n", ""),
    ("groups.md", '{"tp": [[0, 1], [2, 3]]'): (HERE, PLANNING, ""),
    ("hierarchy.md", 'cluster="a"'): (HERE, ALONE, ""),
    ("hierarchy.md", "Compression"): (TESTBED, CLUSTERS, ""),
    ("integrations.md", "planned_nics(plan)"): (
        TESTBED,
        GROUPS + "from holmes.training.integrations import planned_nics\ndef train(): dist.new_group()\n",
        "",
    ),
    ("integrations.md", "device_mesh(plan)"): (
        TESTBED,
        GROUPS + MODEL + "from torch.distributed.fsdp import fully_shard\n"
        "from holmes.training.integrations import device_mesh\n",
        "",
    ),
    ("optimizer.md", "last_report.summary()"): (TESTBED, GROUPS + MODEL + OPTIMIZER, ""),
    ("partition.md", "best_partition(problem)"): (HERE, PLANNING, "assert best.layers_per_stage == (17, 13)\n"),
    ("partition.md", "replanner.observe"): (HERE, OBSERVED, ""),
    ("launchers.md", "set_environment()"): (TORCHRUN, "", "dist.destroy_process_group()\n"),
    ("upstream.md", "two parameters, one gradient"): (TORCHRUN, "", ""),
    ("upstream.md", "Checkpointed(nn.Linear)"): (TORCHRUN, "import sys\nsys.argv[1:] = ['eval']\n", ""),
    # Over Holmes, whose groups end the block: the sum is there.
    ("upstream.md", "nothing happens, and nothing is raised"): (
        TORCHRUN,
        JOB + "x, peer = torch.ones(2), 1 - dist.get_rank()\n",
        "assert x.tolist() == [2, 2]\ndist.destroy_process_group()\n",
    ),
}
#: Those that do not run here, and why.
NO_SNIPPETS = {
    ("groups.md", 'data_shares="speed"'): "needs ranks of different speed; tests/torch/test_uneven_shares.py trains so",
    ("integrations.md", "start_in_plan_order"): "sets RANK by a plan of its own job; tests have one",
    ("integrations.md", "initialize_megatron"): "needs megatron-core; tests/trainers/test_megatron.py runs it",
    ("integrations.md", "deepspeed_pipeline_module"): "needs deepspeed; tests/trainers/test_deepspeed.py runs it",
    ("integrations.md", "torchtitan_parallelism"): "needs torchtitan; tests/trainers/test_torchtitan.py runs it",
    ("integrations.md", "torchft import ProcessGroupHolmes"): "needs torchft; tests/trainers/test_torchft.py runs it",
    ("optimizer.md", "last_checkpoint"): "ends when a peer is lost; tests/torch/test_optimizer_resume.py kills one",
    ("pipeline.md", "pipeline_stages"): "needs a model in parts; tests/differential/test_pipeline_steps.py has them",
    ("plan.md", "found.reasons()"): "searches for minutes; tests/unit/test_search.py has smaller ones",
    ("rails.md", "max_rails=2"): "names NICs of the reader's machine; tests/testbed/test_rails.py runs it on its own",
    ("rdma.md", "transport"): "needs an RDMA port; tests/rdma/test_rdma.py has some, in user-mode Linux",
    ("tutorial.md", "make_plan"): "test_the_tutorial below runs the page in order",
    ("tutorial.md", "os.kill"): "as above",
    ("tutorial.md", "time.sleep"): "as above",
    ("upstream.md", "use_local_synchronization"): "waits for ever, which is what it shows",
    ("recovery.md", "run_elastic"): "its model is left out; examples/elastic_gpt.py is a whole one, and runs below",
}


def snippets() -> list[tuple[str, str]]:
    """(page, text) of every Python snippet."""
    return [
        (page.name, text)
        for page in PAGES
        for text in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    ]


def snippet_of(page: str, words: str) -> str:
    (found,) = [text for name, text in snippets() if name == page and words in text]
    return found


def test_every_snippet_is_in_a_table() -> None:
    known = {snippet_of(*place) for place in [*SNIPPETS, *NO_SNIPPETS]}
    assert len(known) == len(SNIPPETS) + len(NO_SNIPPETS)
    assert [place for place in snippets() if place[1] not in known] == []


@pytest.mark.parametrize("place", SNIPPETS, ids=lambda place: ": ".join(place))
@needs_namespaces
def test_a_snippet_runs_as_printed(place: tuple[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, before, after = SNIPPETS[place]
    program = folder / "snippet.py"
    program.write_text(before + snippet_of(*place) + after + f"print({DONE!r})\n")
    monkeypatch.chdir(folder)
    if where == TESTBED:
        result = Testbed(where).run([sys.executable, str(program)], timeout_s=LIMIT_S)
        assert result.returncode == 0, result.outputs
        assert all(DONE in lines for lines in result.outputs.values()), result.outputs
        return
    command = [sys.executable, str(program)]
    if where == TORCHRUN:
        command = ["torchrun", "--nproc-per-node", "2", str(program)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment(folder), timeout=LIMIT_S)
    assert run.returncode == 0, run.stderr
    assert DONE in run.stdout or where == TORCHRUN  # one of torch's own failures ends the process


# --- commands ---

#: Programs that a printed command begins with, after variables.
PROGRAM = re.compile(r"    ((?:[A-Z_]+=\S+ )*(?:holmes|torchrun|python3?|make|pip|srun|mpirun|mpiexec\S*|kubectl) .*)")
QUICK = "--seconds 0.02 --rounds 1"
#: A printed command without its comment -> what is replaced in it, and what is added so that it ends in seconds.
COMMANDS: dict[str, tuple[dict[str, str], str]] = {
    "holmes nics": ({}, ""),
    "holmes topology": ({}, ""),
    "holmes topology topology.yaml --matrix": ({}, ""),
    "holmes report report.html": ({}, ""),
    "holmes doctor": ({}, ""),
    "holmes report report.html --topology topology.yaml --plan plan.yaml --bench eth.json": (
        {"eth.json": str(ROOT / "benchmarks" / "results" / "link-2.json")},
        "",
    ),
    "holmes stress": ({"holmes stress": "torchrun --nproc-per-node 2 --no-python holmes stress"}, "--seconds 1"),
    "holmes testbed run -- CMD": ({"CMD": "true"}, ""),
    "holmes testbed run -s far-clusters -- CMD": ({"CMD": "true"}, ""),
    "holmes testbed run -s far-clusters --changes changes.yaml -- CMD": ({"CMD": "true"}, ""),
    "holmes testbed specs": ({}, ""),
    "holmes testbed show far-clusters": ({}, ""),
    "holmes bench": ({}, f"--sizes 1K {QUICK} --ranks 2"),
    "holmes env": ({}, ""),
    "torchrun --nproc-per-node 2 examples/any_launcher.py": ({"examples": f"{ROOT}/examples"}, ""),
    "holmes plan check plan.yaml --topology topology.yaml": ({}, ""),
    "holmes plan show plan.yaml --rank 5": ({}, ""),
    "holmes plan explain plan.yaml": ({"plan.yaml": "searched.yaml"}, ""),
    "holmes plan export plan.yaml --to megatron": ({}, ""),
    "holmes plan export plan.yaml --to megatron --output job": ({}, ""),
    "holmes plan --topology topology.yaml --model llama-3-70b --global-batch 1024 --output plan.yaml": (
        {"plan.yaml": "new.yaml"},
        "--tensor 8 --pipeline 4 --micro-batch 1 --recomputation full --schedule 1f1b --simulated 1",
    ),
    "holmes testbed run -s two-clusters -- holmes doctor": ({}, ""),
    "holmes testbed run -s two-clusters --nproc-per-node 2 -- holmes stress --seconds 20": ({"20": "1"}, ""),
    "torchrun --nproc-per-node 4 --no-python holmes stress": ({}, "--seconds 1"),
    "holmes bench compute --hidden 256 --heads 4 --sequence 32 --vocabulary 103 --micro-batch 2 --ranks 1,2,4 "
    "--json compute.json": ({}, QUICK),
    "holmes bench ping_pong send_recv --nics eth0 --through torch --peers none --json eth.json": (
        {"eth0": "lo"},
        f"--sizes 1K {QUICK} --ranks 2",
    ),
}
_LAUNCHER = "needs its launcher; tests/launchers/test_launchers.py runs it (make test-launchers)"
#: In this order, in one folder; the last two in two terminals.
TUTORIAL = [
    "holmes testbed show two-clusters",
    "holmes testbed run -- holmes doctor",
    "holmes testbed run -- holmes topology --save topology.yaml",
    "holmes bench all_reduce --testbed pair --sizes 1K,1M --peers none",
    "holmes bench all_reduce --testbed two-clusters --sizes 1M --nics class:ethernet --peers none",
    "holmes plan --topology topology.yaml --model gpt-3.6b --gpu A100-80GB --global-batch 64 --output plan.yaml",
    "holmes plan show plan.yaml",
    "holmes plan check plan.yaml --topology topology.yaml",
    "holmes testbed run -- python train.py",
    "holmes testbed run -- python dies.py",
    "holmes testbed run --timeout-s 60 -- python hangs.py",
    "holmes debug",
]
_ELIDED = "what follows is left out in print"
_HOSTS = "needs a cluster of hosts"
_MINUTES = "takes minutes"
_KERNEL = "needs a kernel with Soft-RoCE; tests/rdma/test_testbed_rdma.py runs it"
#: The beginning of a printed command that does not run here, and why.
NO_COMMANDS = {
    "make demo": f"{_MINUTES}; CI and tests/testbed/test_demo.py run the demo",
    "make test": "runs this test",
    "make stress-address": f"{_MINUTES}; make stress, with an engine that is built with the sanitizer",
    "make wheels": f"{_MINUTES}; it tries itself what it has made",
    "make release": f"{_MINUTES}; as make wheels",
    "holmes build-torch": f"{_MINUTES}; make wheels runs it",
    "pip install": f"{_MINUTES} and changes the environment; tests/unit/test_install.py looks at what is installed",
    "holmes stress --testbed": f"{_MINUTES}; make stress, and tests/testbed/test_stress_faults.py with fewer",
    "holmes testbed check": "fails on a busy machine; tests/testbed/test_lines.py runs it",
    "holmes demo --testbed two-clusters-rdma": _KERNEL,
    "holmes testbed run -s two-clusters-rdma": _KERNEL,
    "holmes top": "watches a running job; tests/multirank/test_top.py has some",
    "holmes debug": "asks running processes; tests/multirank/test_debug.py has some that hang",
    "holmes store --listen": "serves until it is ended; the test of the elastic example below has one",
    "holmes plan --topology T ...": _ELIDED,
    "holmes plan --for megatron ...": _ELIDED,
    "holmes simulate plan.yaml ...": _ELIDED,
    "holmes plan export plan.yaml --to megatron | deepspeed": "names a choice; test_export.py takes each",
    "holmes simulate plan.yaml --topology topology.yaml --rates rates.yaml --model gpt-7.5b \\": "goes on in the next "
    "line; tests/unit/test_simulate_plan.py runs it",
    "holmes simulate plan.yaml --topology topology.yaml --rates rates.yaml --schedule best": "needs rates of its own; "
    "tests/unit/test_simulate_distance.py runs it",
    "holmes simulate calibrate": "needs rates measured on InfiniBand; tests/unit/test_bench_compute.py runs it",
    "holmes bench all_reduce --nics class:infiniband": "needs an InfiniBand port; tests/testbed have emulated ones",
    "torchrun --nnodes 16": _HOSTS,
    "torchrun --nnodes 2": _HOSTS,
    "srun": _LAUNCHER,
    "mpirun": _LAUNCHER,
    "mpiexec": _LAUNCHER,
    "python examples/ray_train.py": _LAUNCHER,
    "kubectl": "needs a Kubernetes cluster; tests/launchers/test_manifests.py checks what is applied",
    "python3 -m venv": "makes an environment; tools/make_wheels.py does as the tutorial says",
    **dict.fromkeys(TUTORIAL, "test_the_tutorial below runs the page in order"),
    "torchrun ... pretrain_gpt.py": _ELIDED,
    "HOLMES_METRICS_PORT=9400 torchrun ...": _ELIDED,
    "HOLMES_STORE=head:29400 srun": _ELIDED,
}


def commands() -> list[str]:
    """Every printed command, without its comment."""
    lines = [line for page in PAGES for line in page.read_text().splitlines()]
    found = [match[1] for line in lines if (match := PROGRAM.fullmatch(line))]
    return list(dict.fromkeys(re.split(r"\s+# ", command)[0].strip() for command in found))


def test_every_command_is_in_a_table() -> None:
    printed = commands()
    assert [command for command in COMMANDS if command not in printed] == []
    unused = [start for start in NO_COMMANDS if not any(command.startswith(start) for command in printed)]
    assert unused == []
    reasons = tuple(NO_COMMANDS)
    assert [each for each in printed if each not in COMMANDS and not each.startswith(reasons)] == []


@needs_namespaces
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_as_printed(command: str, folder: Path) -> None:
    replaced, more = COMMANDS[command]
    for word, other in replaced.items():
        command = command.replace(word, other)
    run = subprocess.run(
        shlex.split(f"{command} {more}"),
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment(folder),
        timeout=LIMIT_S,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Traceback" not in run.stderr


# --- the tutorial, from its second step on ---


@needs_namespaces
@pytest.mark.timeout(600)  # fifteen commands
def test_the_tutorial(folder: Path) -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text()
    printed = [
        re.split(r"\s+# ", match[1])[0].strip() for line in page.splitlines() if (match := PROGRAM.fullmatch(line))
    ]
    assert [command for command in printed if command.startswith("holmes")] == ["holmes nics", *TUTORIAL]
    for name, text in re.findall(r"Save as `(\w+\.py)`:\n\n```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        (folder / name).write_text(text)
    (folder / "topology.yaml").unlink()
    (folder / "plan.yaml").unlink()
    env = environment(folder)
    quick = {"holmes bench": QUICK}

    def run(command: str) -> subprocess.CompletedProcess[str]:
        more = next((words for start, words in quick.items() if command.startswith(start)), "")
        words = shlex.split(f"{command} {more}")
        return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S)

    *before, dies, hangs, debug = TUTORIAL
    said = {command: run(command) for command in before}
    failed = {command: done.stdout + done.stderr for command, done in said.items() if done.returncode != 0}
    assert not failed
    trained = said["holmes testbed run -- python train.py"].stdout
    for network in ("infiniband 10.10.0.0/16", "roce 10.11.0.0/16"):
        assert trained.count(f"data parallel: {network} at 1 Gbit/s") == 2, trained
    lost = run(dies)
    assert lost.returncode != 0
    for words in ("rank 2 (host b0", "is lost", "during all_reduce #51"):
        assert words in lost.stdout + lost.stderr
    with subprocess.Popen(
        shlex.split(hangs), cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as job:
        try:
            deadline = time.monotonic() + 40
            found = run(debug)
            # At first rank 2 is on its way there, at another line.
            there = ("has not entered all_reduce #51", "hangs.py:7")
            while not all(words in found.stdout for words in there) and time.monotonic() < deadline:
                time.sleep(1)
                found = run(debug)
        finally:
            job.terminate()
    assert re.search(r"rank 2 .*has not entered all_reduce #51", found.stdout), found.stdout
    assert "hangs.py:7" in found.stdout


# --- the elastic example, as examples/README.md prints it ---


@pytest.fixture
def store(folder: Path) -> Iterator[str]:
    """`holmes store` on this machine: its address."""
    command = ["holmes", "store", "--listen", "127.0.0.1", "--port", "0"]
    serving = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(folder))
    assert serving.stdout is not None
    yield f"127.0.0.1:{serving.stdout.readline().split()[-1]}"
    serving.terminate()
    serving.wait(20)


@pytest.mark.parametrize("launcher", ["", "torchrun --nproc-per-node 2"])
def test_the_elastic_example_runs_alone_and_under_torchrun(launcher: str, store: str, folder: Path) -> None:
    program = launcher or sys.executable
    command = f"{program} {ROOT}/examples/elastic_gpt.py --checkpoints {folder}/run --steps 3 --every 2"
    env = environment(folder) | {"HOLMES_STORE": store}
    run = subprocess.run(shlex.split(command), capture_output=True, text=True, env=env, timeout=LIMIT_S)
    assert run.returncode == 0, run.stderr
    assert f'"step": 2, "ranks": {2 if launcher else 1}' in re.sub(r'"(loss|generation)": [^,]+, ', "", run.stdout)


@needs_namespaces
def test_the_elastic_example_runs_under_holmes_launcher(folder: Path) -> None:
    with Testbed("two-clusters").session() as session:
        address = str(session.spec.nodes[0].nics[-1].address.ip)
        env = environment(folder)
        serving = session.spawn("a0", ["holmes", "store", "--listen", address, "--port", "29400"], env)
        serving.wait_for_line("serving", 30)
        options = ["--checkpoints", str(folder / "run"), "--steps", "3", "--every", "2"]
        program = [sys.executable, str(ROOT / "examples" / "elastic_gpt.py"), *options]
        result = session.launch(program, env=env | {"HOLMES_STORE": f"{address}:29400"}).wait(100)
        serving.kill()
    assert result.returncode == 0, result.outputs
    assert any('"step": 2' in line and '"ranks": 4' in line for line in result.outputs[0]), result.outputs


# --- where they run ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the commands name: machines, a plan, a plan that the search made; and the programs on PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, module in (("holmes", "holmes"), ("torchrun", "torch.distributed.run")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (programs / name).chmod(0o755)
    (tmp_path / "changes.yaml").write_text("changes: [{at_s: 0, link: eth/a, delay_ms: 80}]")
    topology = topology_of([[8] * 16, [8] * 16])
    topology = replace(topology, hosts=tuple(replace(host, gpu="A100-80GB") for host in topology.hosts))
    topology.save(tmp_path / "topology.yaml")
    sizes = {"layers": 48, "hidden": 64, "heads": 4, "sequence": 16, "vocabulary": 64}
    plan = plan_for(topology, model_layers=48, pipeline=2, micro_batch=1, global_batch=256, model=sizes)
    plan.save(tmp_path / "plan.yaml")
    replace(plan, reasons=("a reason",)).save(tmp_path / "searched.yaml")
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    """This process's, with the programs of `folder` first, and no launcher's variables."""
    kept = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), kept.get("PATH", "")])
    python_path = os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))
    return {**kept, "PATH": path, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
