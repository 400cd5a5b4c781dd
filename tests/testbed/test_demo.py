"""The demo: equal losses over any backend on loopback, its report, and the whole command on the testbed."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from namespaces import child_env, needs_namespaces
from ports import free_port
from rich.console import Console
from running import processes_with
from topologies import two_clusters
from torch_ranks import run_module

from holmes.lab.demo.comparison import check_runs, largest_difference, traffic_rows
from holmes.lab.demo.run_demo import planned_settings, run_demo
from holmes.lab.demo.runs import Run, RunFailed, launch_here
from holmes.lab.demo.settings import Settings, choose_device
from holmes.planning.plan import Plan, plan_for

TINY = Settings(layers=3, width=32, heads=2, sequence=16, global_batch=8, steps=6)
TIMEOUT_S = 100
SHUFFLE = 7  # places the ranks on nodes b1, a1, a0, b0


def launch_on_loopback(command: Sequence[str], env: Mapping[str, str], on_line: Callable[[str], None]) -> int:
    """Four ranks as processes of this machine."""
    python, option, module, *arguments = command
    assert (python, option) == (sys.executable, "-m")
    port = free_port()
    job = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [{**os.environ, **job, **env, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(4)]
    return run_module(module, arguments, ranks, on_line, TIMEOUT_S)


def quiet() -> Console:
    return Console(file=open(os.devnull, "w"), width=120)


def test_all_three_runs_reach_the_same_losses_over_any_backend(tmp_path: Path) -> None:
    """Over Holmes: test_demo_on_the_testbed."""
    checks = run_demo(TINY, tmp_path, quiet(), backend="gloo", launch=launch_on_loopback, ethernet=None)
    losses = [check for check in checks if "losses" in check.claim]
    assert len(losses) == 2
    assert all(check.passed for check in losses), losses
    result = json.loads((tmp_path / "result.json").read_text())
    assert [len(run["losses"]) for run in result["runs"]] == [6, 6, 6]
    assert result["runs"][0]["losses"][-1] < result["runs"][0]["losses"][0]
    assert Plan.from_dict(result["runs"][2]["plan"]).layers_per_stage == (2, 1)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_when_the_demo_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    steps = random.randrange(10**8, 10**9)
    demo = subprocess.Popen(
        [sys.executable, "-m", "holmes", "demo", "--steps", str(steps), "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=child_env(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's is ignored
    )
    with demo:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not processes_with(f'"steps": {steps},') and demo.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert demo.poll() is None, demo.communicate()
        demo.send_signal(number)
        output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 128 + number, output
    assert "Traceback" not in output
    assert processes_with(f'"steps": {steps},') == []


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for device, told in (("cuda", "torch finds none; use --device cpu"), ("tpu", "known are cpu and cuda")):
        if device == choose_device():
            continue
        refused = subprocess.run(
            [sys.executable, "-m", "holmes", "demo", "--device", device, "--out", str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert refused.returncode == 2
        assert told in " ".join(refused.stderr.split())


def test_a_failing_rank_ends_the_demo_with_its_output() -> None:
    run = Run("gloo", "DDP over Gloo", "holmes.lab.demo.train_gloo", "gloo", ranks=4)
    settings = Settings(layers=1, width=32, heads=2, sequence=16, global_batch=6, steps=1)
    with pytest.raises(
        RunFailed, match=r"(?s)'DDP over Gloo' ended with exit code 1.*global_batch=6 does not divide by 4"
    ):
        run.execute(settings, launch_on_loopback, lambda done: None)


def recorded(name: str, losses: list[float], step_s: float, **end: Any) -> Run:
    steps = [{"rank": 0, "step": i, "loss": loss, "step_s": step_s} for i, loss in enumerate(losses)]
    ends = [{"rank": 0, "node": "", "interfaces": {}, "hcas": [], "groups": [], "spans": [], **end}]
    return Run(name, name, "", "", 1, steps=steps, ends=ends)


PLAN = {
    "networks": [{"nic_class": "infiniband", "nics": {"ib0": "0"}}, {"nic_class": "ethernet", "nics": {"eth0": "0"}}]
}


def checks_of(traffic: dict[tuple[str, str], int], kernel: dict[str, int], losses: list[float]) -> dict[str, bool]:
    groups = [{"group": group, "nic": nic, "sent_bytes": sent} for (group, nic), sent in traffic.items()]
    ours = recorded("holmes", losses, 0.1, groups=groups, interfaces=kernel, plan=PLAN)
    checks = check_runs(TINY, recorded("single", [4.0, 3.0], 0.1), recorded("gloo", [4.0, 3.0], 0.5), ours)
    return {check.claim: check.passed for check in checks}


def test_checks_pass_on_a_good_run_and_fail_on_each_fault() -> None:
    good: dict[str, Any] = {
        "traffic": {("dp", "ib0"): 10**8, ("pp", "eth0"): 10**6},
        "kernel": {"ib0": 10**8 + 10**6, "eth0": 10**6 + 10**5},
        "losses": [4.0, 3.0001],
    }
    faults: list[tuple[str, dict[str, Any]]] = [
        ("losses", {"losses": [4.0, 3.001]}),
        ("data-parallel", {"traffic": {**good["traffic"], ("dp", "eth0"): 2 * 10**6}}),
        ("data-parallel", {"kernel": {**good["kernel"], "ib0": 10**6}}),
        ("Ethernet", {"kernel": {**good["kernel"], "eth0": 2 * 10**6}}),
    ]
    assert all(checks_of(**good).values())
    for word, fault in faults:
        failed = [claim for claim, passed in checks_of(**{**good, **fault}).items() if not passed]
        assert len(failed) == 1, fault
        assert word in failed[0]


def test_what_hcas_sent_is_checked_and_shown() -> None:
    """Their interface is not Ethernet that something leaked onto; too few packets are bytes that went elsewhere."""
    plan = {"networks": [{"nic_class": "roce_v2", "nics": {"rxe0:1": "0"}}]}
    groups = [
        {"group": group, "nic": nic, "sent_bytes": n}
        for group, nic, n in (("dp", "rxe0:1", 10**8), ("pp", "eth0", 10**6))
    ]
    for packets, is_right in ((25000, True), (20000, False)):
        hcas = [{"port": "rxe0:1", "interface": "roce0", "packets": packets}]
        kernel = {"roce0": 11 * 10**7, "eth0": 10**6 + 10**5}
        ours = recorded("holmes", [4.0], 0.1, groups=groups, interfaces=kernel, hcas=hcas, plan=plan)
        checks = check_runs(TINY, recorded("single", [4.0], 0.1), recorded("gloo", [4.0], 0.5), ours)
        failed = [check.claim for check in checks if not check.passed]
        assert failed == ([] if is_right else ["holmes: the HCAs sent the data-parallel bytes"])
        rows = traffic_rows(TINY, [dataclasses.replace(ours, ranks=4)])
        (row,) = (row for row in rows if row["counted_by"] == "HCA")
        assert (row["nic"], row["packets_per_step"]) == ("rxe0:1", packets / TINY.steps)


def test_runs_of_different_length_are_not_compared() -> None:
    with pytest.raises(ValueError, match="run 'a' reported 1 steps, 'b' 2"):
        largest_difference(recorded("a", [1.0], 0.1), recorded("b", [1.0, 1.0], 0.1))


@pytest.mark.timeout(400)
def test_demo_on_the_testbed(tmp_path: Path) -> None:
    """Few steps: the claims of the losses and the byte paths hold; the speed-up is the full demo's to show."""
    command = [sys.executable, "-m", "holmes", "demo", "--steps", "4", "--out", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=380)
    if ended.returncode == 2 and "namespace" in ended.stderr:
        pytest.skip(ended.stderr.strip())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert [check["passed"] for check in result["checks"] if check["required"]] == [True] * 4
    clusters = Plan.from_dict(result["runs"][2]["plan"]).clusters
    assert [(c.hosts, c.nic_class) for c in clusters] == [(("a0", "a1"), "infiniband"), (("b0", "b1"), "roce_v2")]


def test_ranks_in_any_order_over_the_nodes() -> None:
    """Group rank = stage although torch would sort ranks: pipeline group [3, 2] has the second stage on rank 2."""
    from holmes.lab.testbed import Testbed, TestbedError

    def launch(command: Sequence[str], env: Mapping[str, str], on_line: Callable[[str], None]) -> int:
        try:
            with Testbed("two-clusters").session() as session:
                job = session.launch(command, env=env, on_line=lambda r, n, line: on_line(line), shuffle_seed=SHUFFLE)
                return job.wait(TIMEOUT_S).returncode
        except TestbedError as error:
            pytest.skip(str(error))

    single = Run("single", "single", "holmes.lab.demo.train_single", "none", ranks=1)
    ours = Run("holmes", "Holmes", "holmes.lab.demo.train_holmes", "holmes", ranks=4)
    single.execute(TINY, launch_here, lambda done: None)
    ours.execute(TINY, launch, lambda done: None)
    plan = Plan.from_dict(ours.plan() or {})
    assert [group.ranks for group in plan.groups("pp")] == [(0, 1), (3, 2)]
    assert {c.ranks: c.nic_class for c in plan.clusters} == {(0, 3): "roce_v2", (1, 2): "infiniband"}
    assert largest_difference(ours, single) < 1e-4


def test_a_saved_plan_drives_the_demo(tmp_path: Path) -> None:
    plan = plan_for(two_clusters(), model_layers=3, pipeline=2, layers_per_stage=[1, 2])
    plan.save(tmp_path / "plan.yaml")
    settings = planned_settings(tmp_path / "plan.yaml", steps=2)
    assert (settings.layers, settings.pipeline, settings.steps) == (3, 2, 2)
    ours = Run("holmes", "Holmes", "holmes.lab.demo.train_holmes", "gloo", ranks=4)
    ours.execute(dataclasses.replace(TINY, plan=settings.plan), launch_on_loopback, lambda done: None)
    assert Plan.from_dict(ours.plan() or {}) == plan
    plan_for(two_clusters(ranks_per_host=2), model_layers=3, pipeline=2).save(tmp_path / "plan.yaml")
    with pytest.raises(ValueError, match=r"is a plan for 8 ranks with tensor=1, .* the demo has 4 ranks"):
        planned_settings(tmp_path / "plan.yaml", steps=2)
