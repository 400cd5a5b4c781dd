"""`holmes demo --ablation`: its plans, its switches on real ranks, its table."""

import copy
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from test_demo import TINY, launch_on_loopback, quiet, recorded
from topologies import two_clusters
from torch import nn

from holmes.lab.demo.ablation import (
    ROWS,
    Ablation,
    Measured,
    adapted,
    megatron_like,
    without_adapting,
    without_nic_choice,
)
from holmes.lab.demo.ablation_table import checks_of, print_ablation, rows_of, write_ablation
from holmes.lab.demo.comparison import largest_difference
from holmes.lab.demo.device import slow_down
from holmes.lab.demo.runs import Run, launch_here
from holmes.lab.demo.settings import Settings
from holmes.planning.plan import Plan, plan_for

SETTINGS = Settings()


def plan() -> Plan:
    return plan_for(two_clusters(), model_layers=8, pipeline=2, layers_per_stage=[5, 3])


def test_each_row_lacks_what_it_says() -> None:
    whole = plan()
    assert [whole.group_of("dp", rank).nic_class for rank in (0, 2)] == ["infiniband", "roce_v2"]
    one_nic = without_nic_choice(whole)
    assert [one_nic.group_of("dp", rank).nic_class for rank in range(4)] == ["ethernet"] * 4
    assert one_nic.layers_per_stage == (5, 3)
    assert without_adapting(whole).layers_per_stage == (4, 4)
    assert without_adapting(whole).networks == whole.networks
    stock = megatron_like(dataclasses.replace(whole, order=(2, 3, 0, 1)))
    assert (stock.order, stock.layers_per_stage) == ((0, 1, 2, 3), (4, 4))
    assert stock.group_of("dp", 0).nic_class == "ethernet"
    with pytest.raises(ValueError, match=r"none of the networks \[.*\] joins all hosts"):
        without_nic_choice(dataclasses.replace(whole, networks=whole.networks[:2]))


def profile(busy_s: tuple[float, float], steps: int = 5) -> Run:
    reports = [
        {"rank": rank, "step": step, "loss": None, "step_s": 1.0, "busy_s": busy_s[rank // 2] * (1 + rank % 2 / 100)}
        for rank in range(4)
        for step in range(steps)
    ]
    return Run("profile", "profile", "", "", 4, steps=reports)


def test_layers_follow_the_speeds_that_a_run_showed() -> None:
    even = without_adapting(plan())
    found = adapted(even, SETTINGS, 100, profile((0.2, 0.35)))
    assert found.layers_per_stage == (5, 3)
    assert "[4, 4] -> [5, 3]" in found.reasons[-1]
    assert adapted(even, SETTINGS, 100, profile((0.2, 0.2))) == even
    with pytest.raises(ValueError, match="no step after 2 of warm-up"):
        adapted(even, SETTINGS, 100, profile((0.1, 0.2), steps=2))


def test_slow_compute_waits_after_each_pass_and_changes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    plain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    slow = copy.deepcopy(plain)
    slow_down(slow, 3.0)
    slow_down(plain, 1.0)
    inputs = torch.randn(8, 64, requires_grad=True)
    for module in (plain, slow):
        module(inputs).sum().backward()
    assert len(waits) == 4  # forward and backward of two layers
    assert min(waits) > 0
    for one, other in zip(plain.parameters(), slow.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"slowdown=0.5 must be at least 1"):
        slow_down(plain, 0.5)


def test_without_overlap_and_slowed_down_the_losses_are_the_same() -> None:
    settings = dataclasses.replace(TINY, steps=3)
    single = Run("single", "single", "holmes.lab.demo.train_single", "none", ranks=1)
    single.execute(settings, launch_here, lambda done: None)
    ours = Run("holmes", "Holmes", "holmes.lab.demo.train_holmes", "gloo", ranks=4)
    switched = dataclasses.replace(settings, overlap=False, slowdown={"": 1.5})  # no node has a name here
    ours.execute(switched, launch_on_loopback, lambda done: None)
    assert largest_difference(ours, single) < 1e-4
    assert all(0 < report["busy_s"] < report["step_s"] for report in ours.steps)


def ablation(step_s: dict[str, float], losses: list[float]) -> Ablation:
    def run(name: str, factor: float) -> Run:
        return recorded(name, losses, step_s[name] * factor)

    plans = {row.name: row.change(plan()) for row in ROWS}
    rows = tuple(
        Measured(row, plans[row.name], [run(row.name, f) for f in (1.0, 1.1, 0.9)], [0.1, 0.0, 0.1]) for row in ROWS
    )
    return Ablation(SETTINGS, recorded("single", [4.0, 3.0], 0.1), rows)


def test_the_table_says_what_is_met_and_what_is_missed(tmp_path: Path) -> None:
    step_s = {
        "holmes": 0.2, "no_nic_choice": 0.8, "no_overlap": 0.25, "megatron": 1.0, "one_cluster": 0.19,
        "holmes_slow": 0.3, "no_adapting": 0.36,
    }  # fmt: skip
    found = ablation(step_s, [4.0, 3.0])
    rows = rows_of(found)
    checks = checks_of(rows)
    assert len(checks) == 6
    assert all(check.passed for check in checks), checks
    assert {row["name"]: round(row["times_reference"], 3) for row in rows}["no_adapting"] == 1.2
    print_ablation(quiet(), rows, checks)
    write_ablation(tmp_path, found, rows, checks)
    assert json.loads((tmp_path / "ablation.json").read_text())["rows"][3]["step_s"] == 1.0
    assert "| without overlap | 5 + 3 | 250 ms |" in (tmp_path / "ablation.md").read_text()
    assert (tmp_path / "ablation.png").read_bytes().startswith(b"\x89PNG")

    def missed(changed: dict[str, float], losses: list[float]) -> list[Any]:
        checks = checks_of(rows_of(ablation({**step_s, **changed}, losses)))
        return [(check.claim.split()[0], check.measured.split()[0]) for check in checks if not check.passed]

    assert missed({"megatron": 0.27}, [4.0, 3.0]) == [("Holmes", "1.35x,")]
    assert missed({"one_cluster": 0.16}, [4.0, 3.0]) == [("Holmes", "+25.0%")]
    assert missed({"no_adapting": 0.29}, [4.0, 3.0]) == [("without", "0.97x")]
    for row in (alike := rows_of(found)):
        row["layers_per_stage"] = [4, 4]  # nothing was adapted, so nothing was shown
    assert "both have layers [4, 4]" in next(check.measured for check in checks_of(alike) if not check.passed)
    assert missed({}, [4.0, 3.1]) == [("losses", "largest")]
