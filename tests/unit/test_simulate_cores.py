"""Ranks that share processor cores, measured times, and their calibration."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from holmes import files
from holmes.planning.model.gpt import PartTimes, PassTimes, Transformer
from holmes.planning.simulate import (
    Framework,
    Job,
    LinkRate,
    MeasuredTimes,
    Place,
    Rates,
    compute_from_bench,
    link_from_bench,
    make_step,
    simulate,
)
from holmes.planning.simulate.engine import Engine, fair_rates

MODEL = Transformer(8, 256, 4, 32, 103, tied=False)
TIMES = PartTimes(PassTimes(0.0, 0.0), PassTimes(0.002, 0.004), PassTimes(0.0, 0.0))


def measured_rates(cores: dict[int, float], core_s_per_gb: float = 0.0, gbps: float = 1.0) -> Rates:
    links = {"ethernet": LinkRate(gbps, core_s_per_gb=core_s_per_gb)}
    return Rates(None, links, MeasuredTimes(256, 4, 32, 103, 2, TIMES), cores)


def run_s(ranks: int, rates: Rates, **framework: object) -> float:
    options = {"synchronization": "all_reduce", "recomputation": "none", "element_bytes": 4} | framework
    place = Place("all", ranks, 1, "ethernet", "none")
    job = Job(MODEL, (8,), (place,), Framework(**options), 2, 2 * ranks)  # type: ignore[arg-type]
    return simulate(make_step(job, rates)).step_s


def test_limits_and_weights_of_flows() -> None:
    usage = {"a": {"cpu": 1.0}, "b": {"cpu": 1.0}, "c": {"cpu": 1e-9, "link": 1.0}}
    rates = fair_rates(usage, {"cpu": 1.5, "link": 1e8}, {"c": 1e9}, {"a": 1.0, "b": 1.0})
    assert rates["c"] == pytest.approx(1e8)  # 0.1 core: less than its share, so it gets all that it can use
    assert rates["a"] == rates["b"] == pytest.approx(0.7)
    assert fair_rates(usage, {"cpu": 9.0, "link": 1e8}, {"c": 1e9}, {"a": 1.0, "b": 1.0})["a"] == 1.0


def test_two_cores_take_four_ranks_twice_as_long() -> None:
    alone_s = 8 * 0.006
    assert run_s(1, measured_rates({1: 1, 2: 2, 4: 2})) == pytest.approx(alone_s)
    free = measured_rates({1: 1, 2: 2, 4: 2})
    assert run_s(4, free) - run_s(4, measured_rates({})) == pytest.approx(alone_s)
    worse = measured_rates({1: 1, 2: 2, 4: 1.6})  # oversubscribed cores lose some of their speed
    assert run_s(4, worse) - run_s(4, free) == pytest.approx(alone_s * (4 / 1.6 - 2))


def test_communication_takes_cores_from_computation() -> None:
    cores = {1: 1.0, 2: 2.0, 4: 2.0}
    free, costly = (
        run_s(2, measured_rates(cores, core_s_per_gb, gbps=8.0), overlap_reduce=True, bucket_bytes=1e6)
        for core_s_per_gb in (0.0, 0.8)
    )
    assert costly > 1.1 * free


def test_sharding_the_optimizer_lengthens_the_last_backward_only() -> None:
    plain = measured_rates({})
    assert plain.measured is not None
    measured = dataclasses.replace(plain.measured, sharding_ns_per_parameter=1.0)
    sharded = dataclasses.replace(plain, measured=measured)
    parameters = MODEL.stage_parameters((8,), 0)
    for schedule in ("gpipe", "zb-h1"):
        framework = Framework("sharded", overlap_reduce=True, recomputation="none", bucket_bytes=1e9)
        place = Place("all", 1, 1, "ethernet", "none")
        job = Job(MODEL, (8,), (place,), framework, 2, 6, schedule=schedule)  # three micro-batches
        without, added = (simulate(make_step(job, rates)) for rates in (plain, sharded))
        assert added.step_s - without.step_s == pytest.approx(parameters * 1e-9)
        pairs = zip(added.tasks, without.tasks, strict=True)
        longer = [a.label for a, b in pairs if a.duration_s - b.duration_s > 1e-9]
        assert longer == ["W2" if schedule == "zb-h1" else "B2"]
    unsharded = dataclasses.replace(job, framework=dataclasses.replace(framework, synchronization="all_reduce"))
    assert simulate(make_step(unsharded, sharded)).step_s == simulate(make_step(unsharded, plain)).step_s


def test_own_optimizers_do_not_wait_for_other_stages() -> None:
    for global_norm, together in ((True, True), (False, False)):
        places = (Place("a", 2, 1, "fast", "slow"), Place("b", 2, 1, "slow", "slow"))
        framework = Framework("all_reduce", recomputation="none", global_norm=global_norm)
        links = {"fast": LinkRate(10.0), "slow": LinkRate(0.1)}
        rates = Rates(None, links, MeasuredTimes(256, 4, 32, 103, 2, TIMES, 1.0))
        result = simulate(make_step(Job(MODEL, (4, 4), places, framework, 2, 8), rates))
        starts = [task.start_s for task in result.tasks if task.kind == "optimizer"]
        assert (max(starts) - min(starts) < 1e-9) == together


def test_measured_times_are_of_one_shape_only() -> None:
    rates = measured_rates({})
    full = rates.times(MODEL, 2, 1, "full")
    assert full.layer.backward_s == pytest.approx(0.006)
    with pytest.raises(ValueError, match=r"run `holmes bench compute --hidden 256 .* --micro-batch 4`"):
        rates.times(MODEL, 4, 1, "none")
    with pytest.raises(ValueError, match="either compute_tflops or measured"):
        Rates(None, {})


def test_rates_with_measured_times_are_a_file(tmp_path: Path) -> None:
    rates = measured_rates({1: 1.0, 4: 1.8}, core_s_per_gb=1.0)
    rates.save(tmp_path / "rates.yaml")
    assert Rates.load(tmp_path / "rates.yaml") == rates
    assert "compute_tflops" not in files.load(tmp_path / "rates.yaml")


def test_compute_and_processor_time_from_bench_files(tmp_path: Path) -> None:
    settings = {"hidden": 256, "heads": 4, "sequence": 32, "vocabulary": 103, "micro_batch": 2}
    rows = [
        {"ranks": ranks, "part": part, "forward_us": 1000 * factor, "backward_us": 2000 * factor}
        for ranks, factor in ((1, 1.0), (2, 1.0), (4, 2.5))
        for part in ("embedding", "layer", "head")
    ]
    rows += [{"ranks": ranks, "part": "optimizer", "ns_per_parameter": 0.8} for ranks in (1, 2, 4)]
    path = tmp_path / "compute.json"
    path.write_text(json.dumps({"kind": "holmes bench compute", "version": 1, "settings": settings, "rows": rows}))
    measured, cores = compute_from_bench(path)
    assert measured.times.layer == PassTimes(0.001, 0.002)
    assert cores == pytest.approx({1: 1.0, 2: 2.0, 4: 1.6})
    row = {"operation": "all_reduce", "peer": "gloo", "gb_per_core_s": 0.5}
    bench = [{**row, "size_bytes": size, "time_us": size / 100} for size in (10**6, 10**7)]
    other = tmp_path / "link.json"
    other.write_text(json.dumps({"ranks": 4, "rows": bench}))
    assert link_from_bench(other).core_s_per_gb == pytest.approx(2 / 1.5)  # 1.5 bytes on the wire for each byte
    with pytest.raises(ValueError, match="no file of `holmes bench compute --json`"):
        compute_from_bench(other)


def test_unknown_cores_and_empty_usage_are_errors() -> None:
    engine = Engine({"link": 1.0}, {"cores": {1: 1.0}})
    with pytest.raises(ValueError, match="uses link 'gpu', but there are only cores"):
        engine.compute("a", "forward", "stage 0", 1.0, [], usage={"gpu": 1.0})
    with pytest.raises(ValueError, match="must be above 0"):
        engine.transfer("b", "p2p", 1.0, {"link": 0.0}, [])
    with pytest.raises(ValueError, match="cores of 'cores'"):
        Engine({}, {"cores": {0: 1.0}})
