"""The search: what it finds, that memory and sizes hold, and what it says where nothing fits."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from exhaustive_search import every_candidate, random_case, stated_losses, topology
from rich.console import Console
from typer.testing import CliRunner

from holmes.cluster.topology import Topology
from holmes.planning.model.gpt import Transformer
from holmes.planning.model.gpus import gpu_named
from holmes.planning.model.presets import PRESETS, load_model
from holmes.planning.plan import Plan
from holmes.planning.plan.proof import check
from holmes.planning.schedule import TRAINERS, fits_rounds
from holmes.planning.search import Assumptions, Wanted, machines_of, search
from holmes.planning.search.estimate import estimate
from holmes.planning.search.layout import Layout
from holmes.planning.search.reasons import SHOWN
from holmes.tools.cli.plan import app
from holmes.tools.cli.plan_search import print_search
from holmes.training.integrations.export import export_plan

GPT = load_model("gpt-3.6b")


def test_presets_have_the_published_sizes() -> None:
    for name, model in PRESETS.items():
        billions = float(name.split("-")[-1].removesuffix("b"))
        assert model.parameters == pytest.approx(billions * 1e9, rel=0.04), name


def test_the_best_is_the_fastest_and_its_plan_holds(tmp_path: Path) -> None:
    found = search(topology(), GPT, 128, simulated=6)
    steps = [candidate.step_s for candidate in found.candidates]
    assert steps == sorted(steps)
    assert len({candidate.choice for candidate in found.candidates}) == len(steps) >= 6
    for candidate in found.candidates:
        assert sum(candidate.layers_per_stage) == GPT.layers
        assert candidate.memory_bytes <= candidate.memory_limit_bytes
    plan = found.plan()
    assert check(plan, found.topology).holds
    assert (plan.global_batch, plan.micro_batch) == (128, found.best.choice.micro_batch)
    assert plan.recomputation == found.best.choice.recomputation
    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == plan
    assert search(topology(), GPT, 128, simulated=6).plan() == plan


def test_an_error_about_memory_says_where_the_stages_are() -> None:
    with pytest.raises(ValueError, match=r"GPUs for each stage \(stages 0-1 in cluster 0, 2-3 in cluster 1\)$"):
        search(topology(), load_model("gpt-1008b"), 16, wanted=Wanted(pipeline=4, tensor=4))


def test_the_estimate_is_near_the_simulation() -> None:
    found = search(topology(), GPT, 128, simulated=8)
    for candidate in found.candidates:
        guess = estimate(Layout.of(found.machines, GPT, candidate.choice, 128))
        assert guess.step_s == pytest.approx(candidate.step_s, rel=0.2), candidate.choice.text()


def test_slower_gpus_get_fewer_layers() -> None:
    found = search(topology(gpu="V100-32GB"), GPT, 256, wanted=Wanted(pipeline=2, schedule="1f1b"))
    best = found.best
    fast = found.machines.clusters[best.choice.order[0]].tflops
    slow = found.machines.clusters[best.choice.order[1]].tflops
    first, second = best.layers_per_stage
    assert (first > second) == (fast > slow)
    assert max(first, second) / min(first, second) == pytest.approx(312 / 125, rel=0.35)  # and the head


def test_what_is_wanted_is_kept() -> None:
    wanted = Wanted(tensor=2, pipeline=4, micro_batch=2, schedule="interleaved", chunks=2, recomputation="full")
    choice = search(topology(), GPT, 256, wanted=wanted, simulated=2).best.choice
    assert (choice.tensor, choice.pipeline, choice.micro_batch) == (2, 4, 2)
    assert (choice.schedule, choice.chunks, choice.recomputation) == ("interleaved", 2, "full")


def test_very_many_micro_batches_take_proportionally_longer() -> None:
    wanted = Wanted(tensor=1, pipeline=2, micro_batch=1, schedule="1f1b", recomputation="none")
    step_s = [search(topology(), GPT, batch, wanted=wanted, simulated=1).best.step_s for batch in (2**16, 2**17, 2**18)]
    assert (step_s[2] - step_s[1]) / (step_s[1] - step_s[0]) == pytest.approx(2, rel=1e-3)


def test_memory_that_cannot_fit_names_stage_bytes_and_fix() -> None:
    with pytest.raises(ValueError, match=r"none of \d+ choices fits into memory.*over by [\d,]+ bytes.*more memory"):
        search(topology(), load_model("gpt3-175b"), 64)


@pytest.mark.parametrize(
    ("layers", "ranks", "gib", "wanted"),
    [
        (4, 4, 0.8311424325933673, Wanted(tensor=1, schedule="interleaved", recomputation="selective")),
        (6, 4, 0.611426482600349, Wanted(2, 2, None, "interleaved", 2, "selective")),
        (8, 2, 1.285642557284811, Wanted(1, 2, None, "interleaved", None, "full")),
    ],
)
def test_what_only_the_estimate_finds_too_large_is_found(layers: int, ranks: int, gib: float, wanted: Wanted) -> None:
    ports = [{"name": "eth0", "nic_class": "ethernet", "subnet": "wan", "speed_gbps": 25}]
    hosts = {"count": 2, "name": "a{}", "ranks_per_host": ranks, "gpu_tflops": 100, "gpu_memory_gib": gib}
    machines = Topology.from_dict({"kind": "holmes topology", "version": 2, "hosts": [hosts | {"ports": ports}]})
    model = Transformer(layers, hidden=1024, heads=16, sequence=512, vocabulary=50000)
    assumptions = Assumptions(reserve_gib=0)
    best = search(machines, model, 16, wanted=wanted, simulated=1, assumptions=assumptions).best
    assert sum(best.layers_per_stage) == layers
    assert best.memory_bytes <= best.memory_limit_bytes


def test_a_shared_bottleneck_between_clusters_slows_down_the_pipeline() -> None:
    plain = topology()
    link = {"clusters": ["cluster 0", "cluster 1"], "fabric": "ethernet all", "gbps": 22.0, "latency_s": 1e-5}
    link |= {"pairs": 2, "aggregate_gbps": 1.0}
    narrow = Topology.from_dict({**plain.to_dict(), "links": [link]})
    assert machines_of(narrow, Assumptions()).host_gbps("cluster 1", "cluster 0", hosts=2) == 0.5
    wanted = Wanted(pipeline=2, micro_batch=1, tensor=1)
    slow, fast = (search(each, GPT, 256, wanted=wanted, simulated=2).best.step_s for each in (narrow, plain))
    assert slow > 1.5 * fast


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"global_batch": 7, "wanted": Wanted(tensor=1, pipeline=2)},
            r"global_batch=7 must be a multiple of .* the nearest is global_batch=",
        ),
        (
            {"global_batch": 37, "wanted": Wanted(tensor=1, pipeline=2, micro_batch=1, schedule="interleaved")},
            r"interleaved, a number of micro-batches that the stages divide; the nearest is global_batch=32$",
        ),
        (
            {"global_batch": 40, "wanted": Wanted(tensor=1, pipeline=2, micro_batch=1, schedule="zb-h1")},
            r"with zb-h1, a number of micro-batches that its whole rounds .* the nearest is global_batch=32$",
        ),
        (
            {"global_batch": 8, "wanted": Wanted(tensor=1, pipeline=2, schedule="1f1b", trainer="torchtitan")},
            r"with 1f1b in torchtitan, at least as many micro-batches as stages; the nearest is global_batch=16$",
        ),
        ({"wanted": Wanted(pipeline=64)}, "pipeline=64 does not fit: 30 layers cannot fill 64 pipeline stages"),
        ({"wanted": Wanted(tensor=3)}, r"tensor=3 must divide heads=32 .*those that do: \[1, 2, 4\]"),
        ({"assumptions": Assumptions(reserve_gib=90)}, "reserve_gib=90 leaves nothing of the 80 GiB"),
        ({"simulated": 0}, "simulated=0 must be at least 1"),
    ],
)
def test_wrong_input_names_the_fix(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        search(topology(), GPT, **({"global_batch": 256} | arguments))


def test_an_absurd_number_of_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="layers=99999999 of a transformer must be at most 2000"):
        dataclasses.replace(GPT, layers=99_999_999)


def test_unknown_names_say_the_nearest() -> None:
    with pytest.raises(ValueError, match="model 'lama-3-8b' is unknown; the nearest is 'llama-3-8b'"):
        load_model("lama-3-8b")
    with pytest.raises(ValueError, match="GPU 'H10' is unknown; the nearest is"):
        search(topology(gpu="H10"), GPT, 256)
    with pytest.raises(ValueError, match="GPU 'H10' is unknown; the nearest is"):
        Assumptions(gpu="H10")  # also where every host names its own
    assert gpu_named("NVIDIA A100-SXM4-80GB").memory_gib == 80
    hosts = [dataclasses.replace(host, gpu=None) for host in topology().hosts]
    bare = dataclasses.replace(topology(), hosts=tuple(hosts))
    with pytest.raises(ValueError, match=r"host a0 .* does not say its GPU's gpu_tflops and gpu_memory_gib"):
        search(bare, GPT, 256)
    assert search(bare, GPT, 256, assumptions=Assumptions(gpu="A100-80GB"), simulated=1).best.step_s > 0


def test_a_model_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("layers: 12\nhidden: 768\nheads: 12\nsequence: 1024\nvocabulary: 50257\n")
    assert load_model(str(path)).parameters == pytest.approx(124.4e6, rel=0.01)  # GPT-2
    path.write_text("layers: 12\nhiden: 768\nheads: 12\n")
    with pytest.raises(ValueError, match="no field 'hiden'; the nearest is 'hidden'"):
        load_model(str(path))


def test_the_command_saves_and_explains(tmp_path: Path) -> None:
    topology().save(tmp_path / "topology.yaml")
    arguments = ["--topology", str(tmp_path / "topology.yaml"), "--model", "gpt-3.6b", "--global-batch"]
    saved = tmp_path / "plan.yaml"
    done = CliRunner().invoke(app, [*arguments, "256", "--simulated", "3", "-o", str(saved)])
    assert done.exit_code == 0, done.output
    explained = CliRunner().invoke(app, ["explain", str(saved)])
    assert explained.exit_code == 0, explained.output
    for words in ("runner-up, step +", "the best with another", "assumed: GPUs reach", "bubble", "GiB on stage"):
        assert words in explained.output
    failed = CliRunner().invoke(app, [*arguments, "7", "--tensor", "1", "--pipeline", "2"])
    assert failed.exit_code == 2
    assert "the nearest is global_batch=" in failed.output


def test_rows_that_differ_in_the_order_of_clusters_only_say_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One GPU a host, where the order matters little: else two rows look the same but for the step."""
    found = search(*random_case(3), simulated=4)
    anyhow = [dataclasses.replace(candidate.choice, order=()) for candidate in found.candidates[:SHOWN]]
    assert len(set(anyhow)) < len(anyhow)
    monkeypatch.setenv("COLUMNS", "80")
    print_search(Console(), found)
    lines = capsys.readouterr().out.splitlines()
    rows = [line.strip("│").split("│") for line in lines if line.startswith("│")]
    header = [name.strip() for name in lines[2].strip("┃").split("┃")]
    ways = [tuple(row[header.index(name)] for name in header if name not in _MEASURED) for row in rows]
    assert len(set(ways)) == len(ways) == SHOWN
    assert "order A: cluster 0 > cluster 1" in lines
    assert "…" not in "".join(lines)
    assert max(map(len, lines)) <= 80


_MEASURED = ("step", "slower", "bubble", "exposed", "mem")


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_plan_for_a_trainer_is_exported_with_what_it_assumes(trainer: str) -> None:
    plan = search(topology(), GPT, 128, wanted=Wanted(trainer=trainer, recomputation="full"), simulated=2).plan()
    text = export_plan(plan, trainer)
    told = {
        "megatron": ["--use-distributed-optimizer", "--recompute-granularity full --recompute-method uniform"],
        "flagscale": ["use_distributed_optimizer: true", "recompute_granularity: full"],
        "deepspeed": ['"activation_checkpoint_interval": 1', '"zero_optimization": {\n      "stage": 1'],
        "torchtitan": ['"activation_checkpoint": {\n    "mode": "full"'],
    }
    assert [words for words in told[trainer] if words not in text] == []
    assert ("--sequence-parallel" in text) == (trainer == "megatron" and plan.tensor > 1)


def test_a_trainer_limits_the_search() -> None:
    found = search(topology(), GPT, 128, wanted=Wanted(trainer="deepspeed"), simulated=2)
    assert {choice.schedule for choice, _ in found.estimates} == {"1f1b"}
    assert {choice.recomputation for choice, _ in found.estimates} == {"none", "full"}
    with pytest.raises(ValueError, match="recomputation='selective' is nothing that DeepSpeed's pipeline has"):
        Wanted(trainer="deepspeed", recomputation="selective")


def test_torchs_1f1b_has_as_many_micro_batches_as_stages() -> None:
    def stages_that_wait(trainer: str | None) -> list[str]:
        found = search(topology(), GPT, 16, wanted=Wanted(trainer=trainer), simulated=1)
        every = [choice for choice, _ in found.estimates]
        count = {choice: 16 // (choice.data * choice.micro_batch) for choice in every}
        assert all(fits_rounds(choice.schedule, choice.pipeline, count[choice]) for choice in every)
        return [choice.text() for choice in every if choice.schedule == "1f1b" and count[choice] < choice.pipeline]

    assert stages_that_wait("torchtitan") == []
    assert stages_that_wait("megatron")
    assert stages_that_wait(None)


@pytest.mark.parametrize("seed", range(4))  # of those of benchmarks/exhaustive_search.py
def test_nothing_is_faster_and_every_stated_loss_is_that_of_the_best(seed: int) -> None:
    """Against all choices, simulated: the best, and the best with each other value of each decision."""
    machines, model, batch = random_case(seed)
    found = search(machines, model, batch)
    every = every_candidate(found, model, batch)
    least_s = min(candidate.step_s for candidate in every)
    assert found.best.step_s <= 1.01 * least_s
    stated = stated_losses(found)
    assert stated
    for name, value, share in stated:
        own_s = min(one.step_s for one in every if str(getattr(one.choice, name)) == value)
        assert found.best.step_s * (1 + share) <= 1.012 * own_s, (name, value, own_s)


def test_what_is_pinned_finds_nothing_better() -> None:
    """One GPU a host on slow links, where estimates err most."""
    slow = topology(gbps=1).to_dict()
    for host in slow["hosts"]:
        host["ranks_per_host"] = 1
        for number, rate in enumerate((1, 0.1)):
            host["ports"][number]["speed_gbps"] = rate
    machines = Topology.from_dict(slow)
    found = search(machines, GPT, 64)
    (line,) = [line for line in found.reasons() if line.startswith("micro-batch ")]
    for micro_batch in (1, 2, 4, 8):
        pinned = search(machines, GPT, 64, wanted=Wanted(micro_batch=micro_batch))
        assert found.best.step_s <= pinned.best.step_s, micro_batch
        if stated := re.search(rf"[:,] {micro_batch} \+([\d.]+) %", line):
            told_s = found.best.step_s * (1 + float(stated[1]) / 100)
            assert told_s == pytest.approx(pinned.best.step_s, rel=0.01), micro_batch
