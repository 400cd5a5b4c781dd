"""A plan through the simulator, from Python and from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from paths import BENCHMARKS
from topologies import two_clusters
from typer.testing import CliRunner

from holmes.planning.plan import plan_for
from holmes.planning.simulate import Framework, LinkRate, Place, Rates, Transformer, job_of_plan, make_step
from holmes.tools.cli import load

RATES = Rates(
    100.0, {name: LinkRate(gbps) for name, gbps in (("infiniband", 200.0), ("roce_v2", 100.0), ("ethernet", 25.0))}
)
SHAPE = Transformer(layers=12, hidden=1024, heads=16, sequence=512, vocabulary=32000)


def test_places_are_the_plans_groups() -> None:
    topology = two_clusters(ranks_per_host=4)
    plan = plan_for(topology, model_layers=12, pipeline=2, tensor=2)
    job = job_of_plan(plan, topology, SHAPE, Framework(), micro_batch=1, global_batch=32)
    assert job.places == (
        Place("n0", 2, 4, "infiniband", "ethernet", cluster="cluster 0", cluster_nic="infiniband"),
        Place("n2", 2, 4, "roce_v2", "ethernet", cluster="cluster 1", cluster_nic="roce_v2"),
    )
    assert (job.tensor, job.data, job.micro_batches, job.gpus) == (2, 4, 8, 16)


def test_stages_of_one_cluster_send_over_its_nics() -> None:
    topology = two_clusters(ranks_per_host=4)
    plan = plan_for(topology, model_layers=12, pipeline=4, tensor=2)
    job = job_of_plan(plan, topology, SHAPE, Framework(), micro_batch=1, global_batch=32)
    assert [job.places[i].nic_to(job.places[i + 1]) for i in range(3)] == ["infiniband", "ethernet", "roce_v2"]
    routes = [boundary.forward_route.usage for boundary in make_step(job, RATES).boundaries]
    assert [sorted(name.split()[1] for name in route) for route in routes] == [
        ["infiniband"] * 2,
        ["ethernet"] * 2,
        ["roce_v2"] * 2,
    ]


def test_command_line(tmp_path: Path) -> None:
    topology = two_clusters(ranks_per_host=4)
    topology.save(tmp_path / "topology.yaml")
    plan_for(topology, model_layers=12, pipeline=2).save(tmp_path / "plan.yaml")
    RATES.save(tmp_path / "rates.yaml")
    options = {"--topology": "topology.yaml", "--rates": "rates.yaml", "--trace": "trace.json"}
    arguments = [str(tmp_path / "plan.yaml"), *(part for k, v in options.items() for part in (k, str(tmp_path / v)))]
    without = CliRunner().invoke(load("tools.cli.simulate:simulate"), [*arguments, "--global-batch", "64"])
    assert without.exit_code == 2
    assert "the plan does not say its model" in without.output
    (tmp_path / "model.yaml").write_text("layers: 12\nhidden: 1024\nheads: 16\nsequence: 512\n")
    arguments += ["--model", str(tmp_path / "model.yaml"), "--global-batch", "64"]
    result = CliRunner().invoke(load("tools.cli.simulate:simulate"), arguments)
    assert result.exit_code == 0, result.output
    assert "TFLOP/s per GPU" in result.output
    assert "bottleneck link: " in result.output
    assert (tmp_path / "trace.json").exists()
    bench = BENCHMARKS / "results" / "link-2.json"
    slow = CliRunner().invoke(load("tools.cli.simulate:simulate"), [*arguments, "--bench", f"ethernet={bench}"])
    assert slow.exit_code == 0, slow.output
    assert slow.output != result.output
    wrong = CliRunner().invoke(
        load("tools.cli.simulate:simulate"), [*arguments, "--schedule", "interleaved", "--chunks", "0"]
    )
    assert wrong.exit_code == 2
    assert "chunks=0" in wrong.output


def test_a_nic_without_a_rate_is_named() -> None:
    with pytest.raises(ValueError, match="no rate for 'roce_v1'; there are rates for infiniband, roce_v2, ethernet"):
        RATES.link("roce_v1")
