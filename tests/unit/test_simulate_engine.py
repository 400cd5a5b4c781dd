"""The event engine: shared links, overlap, conservation, determinism."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest

from holmes.planning.simulate import Boundary, Route, Stage, Step, chrome_trace, draw, save_trace, simulate
from holmes.planning.simulate.engine import Engine, fair_rates


def both_ways(link: str) -> Route:
    return Route({f"{link} out": 1.0, f"{link} in": 1.0})


def data_parallel_step(*, overlap: bool, reduce_bytes: float = 4.0, sharded: bool = True) -> Step:
    """One stage, 2 micro-batches of 1 s + 2 s, one second for each byte."""
    gather_bytes = reduce_bytes if sharded else 0.0
    stage = Stage(1.0, 2.0, data_route=both_ways("nic"), reduce_bytes=reduce_bytes, gather_bytes=gather_bytes)
    links = {"nic out": 1.0, "nic in": 1.0}
    return Step((stage,), (), links, 2, overlap_reduce=overlap, overlap_gather=overlap, bucket_bytes=1.0)


def random_step(seed: int) -> Step:
    """A step with unequal stages and links that everything shares."""
    pick = random.Random(seed)
    stages, chunks = pick.choice([2, 3, 4]), 1
    schedule = pick.choice(["gpipe", "1f1b", "interleaved", "zb-h1"])
    if schedule == "interleaved":
        chunks = 2
    links = {f"host {i} {way}": pick.uniform(0.5, 2.0) for i in range(stages) for way in ("out", "in")}
    made = tuple(
        Stage(
            pick.uniform(0.5, 1.5),
            pick.uniform(1.0, 3.0),
            data_route=both_ways(f"host {i}"),
            reduce_bytes=pick.uniform(0.0, 4.0),
            gather_bytes=pick.uniform(0.0, 4.0),
            optimizer_s=pick.uniform(0.0, 0.2),
        )
        for i in range(stages)
    )
    pairs = [(i, (i + 1) % stages) for i in range(stages if chunks > 1 else stages - 1)]
    boundaries = tuple(
        Boundary(
            Route({f"host {a} out": 2.0, f"host {b} in": 2.0}, 0.01),
            Route({f"host {b} out": 2.0, f"host {a} in": 2.0}, 0.01),
            pick.uniform(0.0, 0.5),
        )
        for a, b in pairs
    )
    overlap = pick.random() < 0.5
    return Step(
        made,
        boundaries,
        links,
        stages * pick.choice([1, 2, 3]),
        schedule,
        chunks,
        overlap_reduce=overlap,
        overlap_gather=overlap,
        bucket_bytes=0.5,
        embedding=dataclasses.replace(boundaries[0], size_bytes=0.3),
    )


def test_two_transfers_share_a_link() -> None:
    engine = Engine({"a": 10.0})
    engine.transfer("long", "p2p", 30.0, {"a": 1.0}, [])
    engine.transfer("short", "p2p", 10.0, {"a": 1.0}, [])
    tasks = engine.run()
    assert tasks["short"].end_s == pytest.approx(2.0)  # half of the link each
    assert tasks["long"].end_s == pytest.approx(4.0)  # then all of it
    assert engine.link_busy_s["a"] == pytest.approx(4.0)


def test_a_channel_is_serial_and_latency_counts() -> None:
    engine = Engine({"a": 10.0})
    for name in ("first", "second"):
        engine.transfer(name, "reduce", 10.0, {"a": 1.0}, [], latency_s=0.5, channel="bucket")
    assert engine.run()["second"].end_s == pytest.approx(3.0)


def test_eight_ranks_of_a_host_get_an_eighth_each() -> None:
    engine = Engine({"nic": 8.0})
    engine.transfer("send", "p2p", 3.0, {"nic": 8.0}, [])
    assert engine.run()["send"].end_s == pytest.approx(3.0)


def test_max_min_fair() -> None:
    # The long flow is held by its tightest link; what it leaves of the other link goes to whoever can use it.
    usage = {"long": {"a": 1.0, "b": 1.0}, "a only": {"a": 1.0}, "b 1": {"b": 1.0}, "b 2": {"b": 1.0}}
    rates = fair_rates(usage, {"a": 1.0, "b": 0.9})
    assert rates == pytest.approx({"long": 0.3, "b 1": 0.3, "b 2": 0.3, "a only": 0.7})


@pytest.mark.parametrize("seed", range(50))
def test_fair_rates_fill_links_and_never_overfill(seed: int) -> None:
    pick = random.Random(seed)
    links = {f"l{i}": pick.uniform(0.1, 10.0) for i in range(5)}
    usage = {i: {link: pick.choice([1.0, 2.0, 8.0]) for link in pick.sample(sorted(links), 2)} for i in range(8)}
    rates = fair_rates(usage, links)
    load = {link: sum(rates[i] * flow.get(link, 0.0) for i, flow in usage.items()) for link in links}
    assert all(load[link] <= capacity * (1 + 1e-9) for link, capacity in links.items())
    for i, flow in usage.items():  # each flow crosses a full link on which nobody has more than it has
        assert any(
            load[link] >= links[link] * (1 - 1e-9)
            and rates[i] >= max(rates[j] for j, other in usage.items() if link in other) * (1 - 1e-9)
            for link in flow
        )


def test_without_overlap_communication_adds_up() -> None:
    result = simulate(data_parallel_step(overlap=False))
    assert result.step_s == pytest.approx(4 + 6 + 4)
    assert result.exposed_s == pytest.approx({"p2p": 0.0, "gather": 4.0, "reduce": 4.0, "embedding": 0.0})


def test_overlap_hides_communication_behind_the_last_backward_and_the_first_forward() -> None:
    result = simulate(data_parallel_step(overlap=True))
    # Gather: 4 buckets of 1 s, each before a quarter of the forward, of which the last is 0.25 s. Reduce: the first
    # bucket is there after a quarter of the backward of 2 s, then 4 s of transfers.
    assert result.step_s == pytest.approx(4 + 0.25 + 3 + 0.5 + 4)


def test_all_reduce_costs_what_its_halves_cost() -> None:
    halves = simulate(data_parallel_step(overlap=False))
    whole = simulate(data_parallel_step(overlap=False, reduce_bytes=8.0, sharded=False))
    assert whole.step_s == pytest.approx(halves.step_s)


@pytest.mark.parametrize("seed", range(40))
def test_busy_and_idle_add_up_to_the_step(seed: int) -> None:
    step = random_step(seed)
    result = simulate(step)
    for device, stage in zip(result.devices, step.stages, strict=True):
        assert device.busy_s + device.bubble_s + sum(device.exposed_s.values()) == pytest.approx(result.step_s)
        work_s = step.micro_batches * (stage.forward_s + stage.backward_s) + stage.optimizer_s
        assert device.busy_s == pytest.approx(work_s)
    assert sum(result.critical_s.values()) == pytest.approx(result.step_s)
    assert all(0 <= share <= 1 + 1e-9 for share in result.link_busy_share.values())


@pytest.mark.parametrize("seed", range(5))
def test_equal_input_gives_equal_output(seed: int) -> None:
    assert simulate(random_step(seed)) == simulate(random_step(seed))


@pytest.mark.parametrize("seed", range(20))
def test_faster_links_never_hurt(seed: int) -> None:
    step = random_step(seed)
    free = dataclasses.replace(step, links=dict.fromkeys(step.links, 1e12))
    assert simulate(free).step_s <= simulate(step).step_s


def test_timeline_holds_every_task(tmp_path: Path) -> None:
    result = simulate(random_step(1))
    save_trace(result, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace == chrome_trace(result)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == len(result.tasks)
    assert max(span["ts"] + span["dur"] for span in spans) == pytest.approx(result.step_s * 1e6)
    pytest.importorskip("matplotlib")
    draw(result, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 1000


def test_a_trace_holds_transfers_that_take_no_time() -> None:
    """Inside a host: no link, no latency."""
    result = simulate(Step((Stage(1.0, 2.0, reduce_bytes=4.0),), (), {}, 1, bucket_bytes=1.0))
    names = [event["args"]["name"] for event in chrome_trace(result)["traceEvents"] if event["ph"] == "M"]
    assert names == ["stage 0", "stage 0 data parallel"]


def test_wrong_tasks_are_named() -> None:
    engine = Engine({"a": 1.0})
    with pytest.raises(ValueError, match="uses link 'b'"):
        engine.transfer("x", "p2p", 1.0, {"b": 1.0}, [])
    engine.compute("first", "forward", "d", 1.0, ["second"])
    engine.compute("second", "forward", "d", 1.0, [])
    with pytest.raises(ValueError, match="wait for each other"):
        engine.run()
    with pytest.raises(ValueError, match="above 0"):
        Engine({"a": 0.0})


def test_what_shares_no_link_is_shared_out_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred stages' transfers: hardly a mix of them comes twice, and all rates anew for each took hours in all."""
    looked_at = []

    def counted(usage, *others):
        looked_at.append(len(usage))
        return fair_rates(usage, *others)

    monkeypatch.setattr("holmes.planning.simulate.engine.fair_rates", counted)
    pick = random.Random(1)
    engine = Engine({f"apart {i}": 2.0 for i in range(50)})
    ends = {}
    for i in range(50):
        before, end_s = (), 0.0
        for turn in range(10):
            sizes = pick.uniform(1, 2), pick.uniform(3, 4)
            for half, size in enumerate(sizes):  # two share the link until the smaller one has ended
                engine.transfer(("send", i, turn, half), "p2p", size, {f"apart {i}": 1.0}, after=before)
            before = tuple(("send", i, turn, half) for half in range(2))
            end_s += sum(sizes) / 2.0
        ends[i] = end_s
    engine.run()
    assert {i: engine.tasks[("send", i, 9, 1)].end_s for i in range(50)} == pytest.approx(ends)
    assert engine.link_busy_s == pytest.approx({f"apart {i}": end_s for i, end_s in ends.items()})
    assert sum(looked_at) <= 50 * (1 + 2)
