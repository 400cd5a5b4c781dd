"""What needs no framework: exports as text, the order in which ranks start, the command line."""

import json
import os
import re
import shlex
import subprocess
import sys

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
)


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


def test_no_framework_is_imported_before_it_is_needed():
    code = (
        "import sys, holmes.training.integrations; "
        "print([name for name in ('torch', 'megatron', 'deepspeed', 'torchtitan') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
