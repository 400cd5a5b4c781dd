"""Jobs to steps, and the calibration of their free numbers."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from paths import BENCHMARKS

from holmes.planning.simulate import (
    Framework,
    Job,
    LinkRate,
    Place,
    Rates,
    Transformer,
    fit_link,
    link_from_bench,
    links_from_bench,
    make_step,
    simulate,
    solve_increasing,
)

GPT_3_6B = Transformer(layers=30, hidden=3072, heads=32, sequence=2048, vocabulary=51200)


def job(nic: str = "roce", framework: Framework | None = None, tensor: int = 1, hosts: int = 2) -> Job:
    places = tuple(Place(f"stage {i}", hosts, 8, nic, "ethernet") for i in range(2))
    return Job(GPT_3_6B, (15, 15), places, framework or Framework(), micro_batch=4, global_batch=768, tensor=tensor)


def rates(**gbps: float) -> Rates:
    return Rates(
        200.0, {"roce": LinkRate(100.0), "ethernet": LinkRate(25.0)} | {k: LinkRate(v) for k, v in gbps.items()}
    )


def test_formulas_are_the_papers() -> None:
    s, h, layers, words = 2048, 3072, 30, 51200
    flops = 96 * s * layers * h**2 * (1 + s / (6 * h) + words / (16 * layers * h))
    assert GPT_3_6B.flops_per_sample() == pytest.approx(flops)
    parameters = 12 * layers * h**2 * (1 + 13 / (12 * h) + (words + s) / (12 * layers * h))
    assert GPT_3_6B.parameters == pytest.approx(parameters)
    # what is published: 197 TFLOPS on 32 GPUs at 99.23 samples/s
    assert GPT_3_6B.flops_per_sample() == pytest.approx(197e12 * 32 / 99.23, rel=0.01)


def test_stages_add_up_to_the_model() -> None:
    layers = (11, 9, 10)
    times = rates().times(GPT_3_6B, micro_batch=1, tensor=1, recomputation="full")
    total_s = sum(times.stage(layers, i).total_s for i in range(3))
    assert total_s * 200e12 == pytest.approx(GPT_3_6B.flops_per_sample())
    held = sum(GPT_3_6B.stage_parameters(layers, i) for i in range(3))
    assert held == pytest.approx(GPT_3_6B.parameters + GPT_3_6B.head_parameters)  # the last stage's copy


def test_bytes_on_a_hosts_nic() -> None:
    this = job()
    result = simulate(make_step(this, rates()))
    stage_bytes = 2 * GPT_3_6B.stage_parameters((15, 15), 0)
    assert result.link_bytes["stage 0 roce out"] == pytest.approx(2 * 15 / 16 * stage_bytes)
    activations = 12 * 8 * (4 * 2048 * 3072 * 2)  # micro-batches, ranks of a host, bytes of one
    assert result.link_bytes["stage 0 ethernet out"] == pytest.approx(activations + 8 * 2 * GPT_3_6B.head_parameters)


def test_a_group_inside_a_host_uses_no_nic() -> None:
    result = simulate(make_step(job(hosts=1), rates()))
    assert "stage 0 roce out" not in result.link_bytes
    assert result.exposed_s["reduce"] == 0


def test_what_helps_helps() -> None:
    def speed(**options: object) -> float:
        this = job(framework=Framework(**options))  # type: ignore[arg-type]
        return simulate(make_step(this, rates())).samples_per_s(this.global_batch)

    plain = speed(synchronization="sharded")
    assert speed(synchronization="all_reduce") == pytest.approx(plain, rel=0.02)
    assert speed(synchronization="all_reduce_sharded") < plain
    assert speed(synchronization="sharded", overlap_reduce=True, overlap_gather=True) > plain
    assert speed(synchronization="sharded", tied_embedding=False) > plain


def test_data_parallelism_slows_down_the_pipeline_on_one_nic() -> None:
    apart = simulate(make_step(job("roce"), rates(roce=25.0)))
    together = simulate(make_step(job("ethernet"), rates()))
    assert together.step_s >= apart.step_s


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zb-h1", 1)])
@pytest.mark.parametrize("overlap", [False, True])
def test_every_schedule_moves_and_computes_the_same(schedule: str, chunks: int, overlap: bool) -> None:
    framework = Framework("sharded", overlap_reduce=overlap, overlap_gather=overlap)
    this = dataclasses.replace(job(framework=framework), schedule=schedule, chunks=chunks)
    step = make_step(this, rates())
    result, plain = simulate(step), simulate(make_step(job(framework=framework), rates()))
    for device, reference in zip(result.devices, plain.devices, strict=True):
        assert device.busy_s == pytest.approx(reference.busy_s)
    assert result.link_bytes["stage 1 roce in"] == pytest.approx(plain.link_bytes["stage 1 roce in"])
    # activations cross to the next stage for each chunk, and from the last stage back to the first between chunks
    embedding_bytes = 8 * 2 * GPT_3_6B.head_parameters
    once = plain.link_bytes["stage 0 ethernet out"] - embedding_bytes
    gradients_back = once * (chunks - 1)
    assert result.link_bytes["stage 0 ethernet out"] == pytest.approx(once * chunks + gradients_back + embedding_bytes)


def test_calibration_finds_known_numbers() -> None:
    known = rates(roce=61.0)
    this = job()
    target = simulate(make_step(this, known)).samples_per_s(this.global_batch)
    found = solve_increasing(
        lambda gbps: simulate(make_step(this, rates(roce=gbps))).samples_per_s(this.global_batch),
        target, 1.0, 800.0, "roce rate",
    )  # fmt: skip
    assert found == pytest.approx(61.0, rel=1e-6)
    with pytest.raises(ValueError, match="no roce rate between 1 and 800"):
        solve_increasing(lambda gbps: gbps, 1000.0, 1.0, 800.0, "roce rate")


def test_fit_recovers_latency_and_rate_from_noisy_times() -> None:
    noise = np.random.default_rng(7).normal(1.0, 0.02, size=20)
    sizes = [float(2**i) for i in range(8, 28)]
    times = [(20e-6 + size / 0.125e9) * factor for size, factor in zip(sizes, noise, strict=True)]
    found = fit_link(sizes, times)
    assert found.gbps == pytest.approx(1.0, rel=0.03)
    assert found.latency_s == pytest.approx(20e-6, rel=0.05)


def test_links_from_a_bench_file(tmp_path: Path) -> None:
    ranks, share = (
        4,
        {"ping_pong": 2.0, "send_recv": 1.0, "reduce_scatter": 3 / 4, "all_gather": 3 / 4, "all_reduce": 6 / 4},
    )
    messages = {"ping_pong": 2, "send_recv": 1, "reduce_scatter": 3, "all_gather": 3, "all_reduce": 6}
    rows = [
        {
            "operation": op,
            "peer": peer,
            "size_bytes": size,
            "time_us": 1e6 * (messages[op] * 1e-4 + size * share[op] / rate),
        }
        for op in share
        for peer, rate in (("holmes[class:roce]", 1.25e8), ("holmes[eth0]", 1.25e7))
        for size in (1024, 65536, 2**20, 2**26)
    ]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"ranks": ranks, "rows": rows}))
    found = links_from_bench(path)
    assert found["holmes[class:roce]"].gbps == pytest.approx(1.0)
    assert found["holmes[eth0]"].gbps == pytest.approx(0.1)
    assert found["holmes[eth0]"].latency_s == pytest.approx(1e-4)
    assert link_from_bench(path, "holmes[eth0]") == found["holmes[eth0]"]
    with pytest.raises(ValueError, match="2 selections of holmes"):
        link_from_bench(path)
    with pytest.raises(ValueError, match="no rows of broadcast"):
        links_from_bench(path, ["broadcast"])


def test_links_from_a_real_bench_file() -> None:
    path = BENCHMARKS / "results" / "link-2.json"
    link = link_from_bench(path)
    assert 0.85 < link.gbps < 1.0  # a testbed link of 1 Gbit/s, of which TCP can carry 0.95


def test_rates_are_a_file(tmp_path: Path) -> None:
    for name in ("rates.yaml", "rates.json"):
        rates().save(tmp_path / name)
        assert Rates.load(tmp_path / name) == rates()
    with pytest.raises(ValueError, match="no rate for 'infiniband'; there are rates for roce, ethernet"):
        make_step(job("infiniband"), rates())
    with pytest.raises(ValueError, match="gbps=0"):
        LinkRate(0)


@pytest.mark.parametrize("number", ["5e-5", "5.0e-5", '"5e-5"'])
def test_rates_read_numbers_as_topologies_do(number: str, tmp_path: Path) -> None:
    file = tmp_path / "rates.yaml"
    file.write_text(
        f"kind: holmes rates\nversion: 1\ncompute_tflops: 2e2\n"
        f'links: {{ethernet: {{gbps: "21", latency_s: {number}}}}}\n'
    )
    assert Rates.load(file) == Rates(200.0, {"ethernet": LinkRate(21.0, 5e-5)})


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"compute_tflops": "fast"}, "compute_tflops is 'fast'; it must be a number above 0"),
        ({"links": 7}, "links is 7; it must be a mapping"),
        ({"links": {"ethernet": 7}}, "links.ethernet is 7; it must be a mapping with keys of gbps, latency_s"),
        ({"links": {"ethernet": {"gbs": 7}}}, "links.ethernet has an unknown key 'gbs'; did you mean 'gbps'"),
        ({"links": {"ethernet": {}}}, "links.ethernet.gbps is missing; it must be a number above 0"),
        ({"links": {"ethernet": {"gbps": 1, "latency_s": -1}}}, "latency_s is -1; it must be a number of 0 or more"),
        ({"link": {}}, "the file has an unknown key 'link'; did you mean 'links'"),
        ({"cores": {"two": 2}}, "cores.two: numbers of ranks must be whole"),
        ({"cores": {2: "x"}}, "cores.2 is 'x'; it must be a number above 0"),
        ({"measured": {"hidden": 8}}, "measured.times is None; it must be a mapping with keys of embedding, layer"),
    ],
)
def test_wrong_rates_are_named(entries: dict, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Rates.from_dict({"kind": "holmes rates", "version": 1, "compute_tflops": 1.0, **entries})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers_per_stage": (15, 14)}, "must sum to 30"),
        ({"schedule": "interleaved", "chunks": 99}, "chunks=99 of a stage need a layer each, but a stage has 15"),
        ({"global_batch": 700}, "= 64; the nearest is 704"),
        ({"tensor": 3}, "tensor=3 must divide the 8 ranks"),
        ({"layers_per_stage": (10, 10, 10)}, "3 stages need as many places"),
    ],
)
def test_wrong_jobs_name_the_fix(changes: dict, words: str) -> None:
    base = job()
    fields = {name: getattr(base, name) for name in base.__dataclass_fields__} | changes
    with pytest.raises(ValueError, match=words):
        Job(**fields)
