"""What needs no framework: exports as text, the order in which ranks start, the command line."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import yaml
from plans import make
from typer.testing import CliRunner

from holmes.planning.groups.rank_grid import KINDS
from holmes.planning.plan import Plan
from holmes.tools.cli import plan as cli_plan
from holmes.training.integrations import (
    FORMATS,
    NotExpressible,
    export_plan,
    flagscale_config,
    flagscale_hostfile,
    hosts_in_order,
    renumbered,
    start_in_plan_order,
    torchtitan_module_fqns,
)
from holmes.training.integrations.flagscale import flagscale_overrides
from holmes.training.integrations.launch_files import write_launch_files
from holmes.training.integrations.torchtitan import torchtitan_arguments


def test_renumbered_is_the_same_plan():
    plan = make(tensor=2, pipeline=2, expert=2)
    new = renumbered(plan)
    assert new.order == tuple(range(8))
    for kind in KINDS:
        renamed = [tuple(int(plan.grid.place[rank]) for rank in group.ranks) for group in plan.groups(kind)]
        assert [group.ranks for group in new.groups(kind)] == renamed, kind
        for old, group in zip(plan.groups(kind), new.groups(kind), strict=True):
            nics = {int(plan.grid.place[rank]): names for rank, names in old.nics.items()}
            assert (group.nics, group.reason) == (nics, old.reason)
    assert renumbered(new) == new


def test_every_process_takes_its_place(monkeypatch):
    plan = make(tensor=2, pipeline=2)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    taken = []
    for rank in range(8):
        monkeypatch.setenv("RANK", str(rank))
        new = start_in_plan_order(plan)
        taken.append(int(os.environ["RANK"]))
        assert new.stage_of(taken[-1]) == plan.stage_of(rank)
    assert [taken[rank] for rank in plan.order] == list(range(8))


def test_places_that_cannot_be_taken(monkeypatch):
    plan = make(pipeline=2)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="RANK='' must be a number; start with torchrun"):
        start_in_plan_order(plan)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="RANK=1 of WORLD_SIZE=4 does not fit a plan for 8 ranks"):
        start_in_plan_order(plan)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert start_in_plan_order(plan).order == tuple(range(8))  # rank 0 stays rank 0
    plan = make(pipeline=2, cluster_order=["cluster 1", "cluster 0"])
    with pytest.raises(ValueError, match=rf"rank {plan.order[0]} becomes rank 0, .* start with torchrun"):
        start_in_plan_order(plan)


def test_hosts_started_in_order_number_the_ranks():
    plan = make(tensor=2, pipeline=2)
    assert [host for host, _ in hosts_in_order(plan)] == [host for c in plan.clusters for host in c.hosts]
    assert {ranks for _, ranks in hosts_in_order(plan)} == {2}
    apart = make(hosts=4, ranks_per_host=3, pipeline=2, context=2)  # a context group over two hosts
    with pytest.raises(NotExpressible, match=r"ranks of host n\d stand apart .*start_in_plan_order"):
        hosts_in_order(apart)


def logical_ranks_of_flagscale(config, hostfile):
    """FlagScale's rank mapper, restated: ranks by host file, sorted by device type, then rank; meshes in turn."""
    types = config["hetero"]["hetero_device_types"]
    host_types = [
        re.fullmatch(r"(\S+)\s+slots=(\d+)(?:\s+type=(\S+))?", line).groups() for line in hostfile.splitlines()
    ]
    started = [(host, kind) for host, slots, kind in host_types for _ in range(int(slots))]
    order = sorted(range(len(started)), key=lambda rank: (types.index(started[rank][1]), rank))
    return [started[rank][0] for rank in order]


def test_flagscale_numbers_ranks_as_the_plan_does():
    plan = make(tensor=2, pipeline=4, seed=11, layers_per_stage=[3, 2, 1, 1])
    config = flagscale_config(plan)
    hetero = config["hetero"]
    assert hetero["hetero_pipeline_layer_split"] == [3, 2, 1, 1]
    sizes = iter(hetero["hetero_process_meshes"])
    meshes = list(zip(*[sizes] * 5, strict=True))
    assert meshes == [(2, 1, 1, 1, 2), (2, 1, 1, 1, 2)]  # tp, cp, ep, dp, pp of each cluster
    assert len(hetero["hetero_device_types"]) == len(meshes)
    host_of = {rank: host.name for host in plan.hosts for rank in host.ranks}
    assert logical_ranks_of_flagscale(config, flagscale_hostfile(plan)) == [host_of[rank] for rank in plan.order]


def test_what_flagscale_cannot_be_told():
    with pytest.raises(NotExpressible, match=r"context=2 and expert=2, but FlagScale allows one of them"):
        flagscale_config(make(context=2, expert=2, pipeline=2))
    with pytest.raises(NotExpressible, match=r"'interleaved', but FlagScale has '1f1b'"):
        flagscale_config(make(chunks=2, pipeline=2))
    with pytest.raises(NotExpressible, match=r"has 4 ranks, not a multiple of a stage's 8, .* several clusters"):
        flagscale_config(make(pipeline=1, span_clusters=True))


def test_every_form_is_text_that_its_reader_can_read():
    plan = make(tensor=2, pipeline=2, micro_batch=2, global_batch=16)
    assert set(FORMATS) == {"megatron", "deepspeed", "torchtitan", "flagscale", "json"}
    assert shlex.split(export_plan(plan, "megatron"))[:2] == ["--tensor-model-parallel-size", "2"]
    deepspeed = json.loads(export_plan(plan, "deepspeed"))
    assert deepspeed["transformer_layers"] == [{"first_layer": 0, "layers": 4}, {"first_layer": 4, "layers": 3}]
    assert deepspeed["config"] == {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 16}
    assert json.loads(export_plan(plan, "torchtitan"))["pipeline_parallel_degree"] == 2
    assert yaml.safe_load(export_plan(plan, "flagscale"))["system"] == flagscale_config(plan)
    assert Plan.from_dict(json.loads(export_plan(plan, "json"))) == plan
    with pytest.raises(ValueError, match="cannot export to 'nemo'; it must be one of megatron, "):
        export_plan(plan, "nemo")


def test_command_line(tmp_path):
    file = tmp_path / "plan.yaml"
    make(tensor=2, pipeline=2).save(file)
    run = CliRunner().invoke(cli_plan.app, ["export", str(file), "--to", "megatron"])
    assert run.exit_code == 0, run.output
    assert "--pipeline-model-parallel-layout Et*4|t*3L" in run.stdout
    assert "start hosts in this order: n0 (2 ranks), n1 (2 ranks), n2 (2 ranks), n3 (2 ranks)" in run.stderr
    make(pipeline=2, schedule="zb-h1").save(file)
    run = CliRunner().invoke(cli_plan.app, ["export", str(file), "--to", "deepspeed"])
    assert run.exit_code == 2
    assert "schedule is 'zb-h1'" in run.stderr


@pytest.mark.parametrize("trainer", ["megatron", "deepspeed", "torchtitan", "flagscale"])
def test_a_folder_to_start_from(tmp_path, trainer):
    file, folder = tmp_path / "plan.yaml", tmp_path / "job"
    plan = replace(
        make(tensor=2, pipeline=2, layers_per_stage=[4, 3], micro_batch=2, global_batch=16), recomputation="full"
    )
    plan.save(file)
    run = CliRunner().invoke(cli_plan.app, ["export", str(file), "--to", trainer, "--output", str(folder)])
    assert run.exit_code == 0, run.output
    assert sorted(run.stdout.split()) == sorted(map(str, folder.iterdir()))
    script = folder / "launch.sh"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    lines = (folder / "hostfile").read_text().splitlines()
    assert [line.split()[:2] for line in lines] == [[host, f"slots={ranks}"] for host, ranks in hosts_in_order(plan)]
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    told = {
        "megatron": lambda: texts["arguments.txt"].split() == shlex.split(export_plan(plan, "megatron")),
        "deepspeed": lambda: (
            json.loads(texts["deepspeed.json"]) == json.loads(export_plan(plan, "deepspeed"))["config"]
            and texts["parallelism.json"] == export_plan(plan, "deepspeed")
        ),
        "torchtitan": lambda: texts["arguments.txt"].splitlines() == torchtitan_arguments(renumbered(plan)),
        "flagscale": lambda: texts["arguments.txt"].splitlines() == flagscale_overrides(plan),
    }
    assert told[trainer]()
    assert Plan.load(folder / "plan.yaml") == renumbered(plan)  # as the script numbers ranks


def test_torchtitan_is_told_its_batch_and_recomputation():
    """`--module` and what follows are torchtitan 0.3.0's; a subcommand must stand last."""
    plan = replace(renumbered(make(tensor=2, pipeline=2, micro_batch=2, global_batch=16)), recomputation="full")
    words = torchtitan_arguments(plan)
    assert words[-1] == "activation-checkpoint:full"
    options = dict(pair for pair in pairwise(words) if pair[0].startswith("--"))
    assert options["--parallelism.tensor_parallel_degree"] == "2"
    assert options["--parallelism.pipeline_parallel_microbatch_size"] == "2"
    assert options["--training.local_batch_size"] == "8"  # of each of two replicas; the pipeline splits it
    assert options["--training.global_batch_size"] == "16"
    first = words.index("--parallelism.module_fqns_per_model_part") + 1
    assert [part.split(",") for part in words[first : first + 2]] == torchtitan_module_fqns(plan)
    one = renumbered(make(tensor=2, pipeline=1, span_clusters=True, micro_batch=2, global_batch=16))
    words = torchtitan_arguments(one)
    assert words[words.index("--training.local_batch_size") + 1] == "2"  # accumulated over the others


def test_flagscale_is_told_all_that_heterogeneous_training_needs():
    """Without the current device type its checks fail, and it has no other rendezvous than torchrun's static one."""
    plan = make(tensor=2, pipeline=2, micro_batch=2, global_batch=16)
    hetero = flagscale_config(plan)["hetero"]
    assert hetero["hetero_current_device_type"] in hetero["hetero_device_types"]
    told = dict(word.removeprefix("++").split("=", 1) for word in flagscale_overrides(plan))
    assert told["experiment.runner.rdzv_backend"] == '"static"'
    assert told["train.system.hetero.hetero_process_meshes"] == "[2,1,1,2,1,2,1,1,2,1]"
    assert told["train.model.num_layers"] == "7"
    assert told["train.model.global_batch_size"] == "16"


@pytest.mark.parametrize("node", range(4))
def test_the_script_starts_each_host_with_what_the_plan_says(tmp_path, node):
    plan = make(tensor=2, pipeline=2, micro_batch=2, global_batch=16)
    write_launch_files(plan, "megatron", tmp_path / "job")
    torchrun = tmp_path / "torchrun"
    torchrun.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    torchrun.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NODE_RANK": str(node)}
    command = [tmp_path / "job/launch.sh", "train.py", "--lr", "1e-4 x"]
    words = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    first = hosts_in_order(plan)[0][0]
    start = ["--nnodes", "4", "--node-rank", str(node), "--nproc-per-node", "2", "--master-addr", first]
    own = ["train.py", "--lr", "1e-4 x"]
    assert words == [*start, "--master-port", "29500", *own, *shlex.split(export_plan(plan, "megatron"))]
    lost = subprocess.run(command, env={"PATH": environment["PATH"]}, capture_output=True, text=True)
    assert (lost.returncode, lost.stdout) == (2, "")
    assert "is none of the plan's hosts" in lost.stderr
    assert "set NODE_RANK" in lost.stderr


def test_flagscale_starts_all_hosts_by_the_host_file(tmp_path):
    plan = make(tensor=2, pipeline=2, micro_batch=2, global_batch=16)
    folder = tmp_path / "a job"
    write_launch_files(plan, "flagscale", folder)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    command = [folder / "launch.sh", "run.py", "--config-path", "conf", "--config-name", "train", "action=run"]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    host_file = f"++experiment.runner.hostfile='{folder}/hostfile'"
    assert words == [*map(str, command[1:]), *flagscale_overrides(plan), host_file]
    assert (folder / "hostfile").read_text() == flagscale_hostfile(plan)


def test_a_folder_that_cannot_be_written(tmp_path):
    file = tmp_path / "plan.yaml"
    make(tensor=2, pipeline=2).save(file)
    for to, folder, words in (
        ("megatron", file, "cannot be written"),
        ("megatron", tmp_path / "none/job", "cannot be written"),
        ("json", tmp_path / "job", "cannot start 'json'"),
    ):
        run = CliRunner().invoke(cli_plan.app, ["export", str(file), "--to", to, "--output", str(folder)])
        assert run.exit_code == 2, run.output
        assert words in run.stderr


def test_no_framework_is_imported_before_it_is_needed():
    code = (
        "import sys, holmes.training.integrations; "
        "print([name for name in ('torch', 'megatron', 'deepspeed', 'torchtitan') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
