"""Groups of Holmes on one stock NCCL, over Holmes as NCCL's network plugin: NICs per communicator without an image."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_gpu
import pytest
import torch
from namespaces import child_env, needs_namespaces
from paths import ROOT, WORKERS

import holmes_comm
from holmes.lab.testbed import Testbed

pytestmark = pytest.mark.skipif(
    fake_gpu.find("fake_cuda") is None,
    reason="needs the fake NCCL: configure the build with -DHOLMES_TESTS=ON (`make test-cpp` does)",
)

WORKER = str(WORKERS / "nccl_plugin_worker.py")
NEW = 23203
# Slow, so that the networks set the pace and not the processor, which others use too.
SPEC = """
networks:
  one: {class: ethernet, rate_gbps: 0.1}
  two: {class: ethernet, rate_gbps: 0.1}
clusters:
  a:
    nodes: 2
    nics:
      - {name: e0, network: one}
      - {name: e1, network: two}
"""
PAYLOAD_BYTES = 2_000_000  # of one operation in the worker, which makes three


def environment(version: int = NEW) -> dict[str, str]:
    return {**fake_gpu.environment(version), "NCCL_NET_PLUGIN": "holmes", "HOLMES_SHM": "0"}


def outcomes_on_one_host(case: str, *ranks: dict[str, str | None]) -> list[Any]:
    """What each rank prints, a process with these variables more or (None) fewer; to NCCL each is a host of its own."""
    server = holmes_comm.TcpStore("127.0.0.1", 0, is_server=True)
    processes = []
    for rank, changes in enumerate(ranks):
        own = {"NCCL_HOSTID": str(rank), "HOLMES_HOSTNAME": "abc"[rank], **changes}
        base = environment(int(own.pop("NCCL_OF", None) or NEW))
        variables = {name: value for name, value in {**base, **own}.items() if value is not None}
        command = [sys.executable, WORKER, case, str(rank), str(len(ranks)), str(server.port)]
        processes.append(subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    outputs = [process.communicate(timeout=100) for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    return [json.loads(out) for out, _ in outputs]


def outcomes_on_two_nodes(case: str, folder: Path, lost: str = "", **variables: str) -> tuple[list[Any], list[str]]:
    """What each rank prints, and all their lines. lost: an interface that goes down at the 20th operation."""
    spec = folder / "spec.yaml"
    spec.write_text(SPEC)
    with Testbed(spec).session() as session:
        job = session.launch([sys.executable, WORKER, case], env=environment() | variables)
        if lost:
            job.processes[0].wait_for_line("operation 20", 60.0)
            session.set_link("a1", lost, up=False)
        result = job.wait(100.0)
    lines = [line for lines in result.outputs.values() for line in lines]
    return [json.loads(line) for line in lines if line.startswith("{")], lines


def check_only(sent: dict[str, int], nic: str) -> None:
    """That the bytes of the worker's operations left over this interface, and nearly nothing over the other."""
    other = {"e0": "e1", "e1": "e0"}[nic]
    assert sent[nic] > 2 * PAYLOAD_BYTES, sent
    assert sent[other] < PAYLOAD_BYTES / 20, sent


def check_two_nics(outcomes: list[Any], lines: list[str]) -> None:
    """That both ranks' results are right, and each group was on its interface with the stock library."""
    assert len(outcomes) == 2, lines
    for outcome in outcomes:
        assert outcome["right"]
        for nic in ("e0", "e1"):
            check_only(outcome[nic], nic)
            description = outcome[f"{nic} is"]
            assert ", stock library " in description, description
            assert f", Holmes as NCCL's plugin over {nic} (" in description, description


@needs_namespaces
def test_two_groups_on_two_nics_with_one_library(tmp_path: Path) -> None:
    check_two_nics(*outcomes_on_two_nodes("two_nics", tmp_path))


@needs_namespaces
@pytest.mark.skipif(fake_gpu.find_module("fake_torch_cuda") is None, reason="needs the fake torch device")
@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch without CUDA: the fake takes its place")
def test_process_groups_on_two_nics_with_one_library(tmp_path: Path) -> None:
    check_two_nics(*outcomes_on_two_nodes("torch", tmp_path, HOLMES_NCCL_NET="holmes"))


@needs_namespaces
def test_one_group_is_striped_over_both(tmp_path: Path) -> None:
    outcomes, lines = outcomes_on_two_nodes("rails", tmp_path)
    assert len(outcomes) == 2, lines
    for outcome in outcomes:
        assert outcome["right"]
        assert "plugin over e0, e1 (" in outcome["description"]
        assert min(outcome["sent"].values()) > PAYLOAD_BYTES / 2, outcome


@needs_namespaces
def test_a_group_on_two_nics_survives_one(tmp_path: Path) -> None:
    outcomes, lines = outcomes_on_two_nodes("rail_lost", tmp_path, lost="e1")
    assert len(outcomes) == 2, lines
    for outcome in outcomes:
        assert outcome["right"]
        assert outcome["longest_s"] < 10, outcome


@needs_namespaces
def test_what_is_split_off_keeps_its_nic(tmp_path: Path) -> None:
    outcomes, lines = outcomes_on_two_nodes("split", tmp_path)
    assert len(outcomes) == 2, lines
    for outcome in outcomes:
        assert outcome["right"]
        check_only(outcome["sent"], "e1")
        assert "plugin over e1" in outcome["description"]
        assert "split from" not in outcome["description"]  # NCCL would not tell the plugin whose part it is


@needs_namespaces
def test_a_killed_peer_is_named_by_rank_host_and_nic(tmp_path: Path) -> None:
    (outcome,), _ = outcomes_on_two_nodes("killed", tmp_path)
    assert outcome["error"] == "PeerLostError", outcome
    assert outcome["seconds"] < 10
    assert "rank 1 (host a1)" in outcome["message"], outcome
    assert "e1" in outcome["message"], outcome


def test_shrunk_group_is_made_anew() -> None:
    outcomes = outcomes_on_one_host("shrink", {}, {}, {})
    assert all(outcome["right"] for outcome in outcomes), outcomes
    assert all("shrunk from" not in outcome["description"] for outcome in outcomes[:2]), outcomes


@pytest.mark.parametrize("named", ["holmes", "other,holmes", "libnccl-net-holmes.so", "path"])
@pytest.mark.parametrize("version", [22803, 23007, NEW])
def test_the_stock_library_serves(version: int, named: str) -> None:
    if named == "path":
        named = str(Path(holmes_comm.__file__).parent / "lib" / "libnccl-net-holmes.so")
    for outcome in outcomes_on_one_host("plain", *[{"NCCL_OF": str(version), "NCCL_NET_PLUGIN": named}] * 2):
        assert outcome["right"], outcome
        assert "stock library" in outcome["description"]
        assert "Holmes as NCCL's plugin over lo" in outcome["description"]


@pytest.mark.parametrize("case", ["image", "any_nic", "variables"])
def test_where_it_is_asked_for_otherwise(case: str) -> None:
    changes = {"image": {"NCCL_NET_PLUGIN": None}, "variables": {"HOLMES_NCCL_NET": "holmes"}, "any_nic": {}}[case]
    for outcome in outcomes_on_one_host(case, changes, changes):
        assert outcome["right"], outcome
        assert (" image " in outcome["description"]) == (case == "image"), outcome
        assert "Holmes as NCCL's plugin over" in outcome["description"], outcome


def test_nothing_changes_unasked() -> None:
    for outcome in outcomes_on_one_host("variables", {}, {}):
        assert "Socket over lo" in outcome["description"]
        assert " image " in outcome["description"]


@pytest.mark.parametrize("library", [{"NCCL_NET": "Socket"}, {"NCCL_CONF_FILE": "/dev/null"}])
def test_an_image_where_the_site_rules_the_stock_library(library: dict[str, str | None]) -> None:
    for outcome in outcomes_on_one_host("plain", library, library):
        assert outcome["right"], outcome
        assert " image " in outcome["description"], outcome


REFUSALS = {
    "not set": ({"NCCL_NET_PLUGIN": None}, "NCCL_NET_PLUGIN is not set to the plugin that net='holmes'"),
    "none": ({"NCCL_NET_PLUGIN": "none"}, "NCCL_NET_PLUGIN=none does not name the plugin that net='holmes'"),
    "another": ({"NCCL_NET_PLUGIN": "aws-ofi, holmes"}, "export NCCL_NET_PLUGIN=aws-ofi, holmes,holmes before"),
    "old": ({"NCCL_OF": "22707"}, "NCCL 2.27.7 does not tell a network plugin which communicator it serves"),
    "transport": ({"HOLMES_TRANSPORT": "pigeon"}, "cannot carry the communicator: "),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_one_rank_lacks_is_said_on_all(refusal: str) -> None:
    changes, sentence = REFUSALS[refusal]
    for outcome in outcomes_on_one_host("plain", {}, changes):
        assert outcome["error"] == "UsageError", outcome
        assert outcome["message"].startswith("rank 1 on host b: "), outcome
        assert sentence in outcome["message"], outcome


def test_a_rank_without_the_plugin_is_named_on_all(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "holmes_comm", tmp_path / "holmes_comm", symlinks=True)
    (tmp_path / "holmes_comm" / "lib" / "libnccl-net-holmes.so").unlink()
    path = f"{tmp_path}:{child_env()['PYTHONPATH']}"
    for outcome in outcomes_on_one_host("plain", {}, {"PYTHONPATH": path}):
        assert outcome["error"] == "UsageError", outcome
        wanted = "rank 1 on host b: NCCL's network plugin of Holmes cannot be loaded: "
        assert outcome["message"].startswith(wanted), outcome
        assert "install Holmes whole" in outcome["message"]


def test_a_variable_that_comes_too_late() -> None:
    outcomes = outcomes_on_one_host("late", *[{"NCCL_NET_PLUGIN": None, "NCCL_SOCKET_IFNAME": "lo"}] * 2)
    assert all("stock library" in outcome["description"] for outcome in outcomes), outcomes
    # Who is late to it is told that the other has left.
    assert {outcome["error"] for outcome in outcomes} <= {"CommunicatorError", "AbortedError"}, outcomes
    told = [outcome["message"] for outcome in outcomes if outcome["error"] == "CommunicatorError"]
    assert told, outcomes
    for message in told:
        assert "Failed to initialize any NET plugin" in message, message
        assert "set it before the process starts" in message, message


def test_an_nccl_that_tells_the_plugin_another_id() -> None:
    outcomes = outcomes_on_one_host("plain", *[{"FAKE_NCCL_FAULT": "other_hash@1"}] * 2)
    assert outcomes[0]["error"] in ("AbortedError", "CommunicatorError"), outcomes
    assert outcomes[1]["error"] == "CommunicatorError", outcomes
    assert "NCCL 2.32.3 did not bring its communicator to the network plugin" in outcomes[1]["message"], outcomes


def test_ranks_that_differ_in_the_setting() -> None:
    for outcome in outcomes_on_one_host("variables", {"HOLMES_NCCL_NET": "holmes"}, {"HOLMES_NCCL_NET": "socket"}):
        assert outcome["error"] == "UsageError", outcome
        wanted = "Holmes as plugin: rank 0 (host a); sockets: rank 1 (host b); give all of them the same NcclSettings"
        assert wanted in outcome["message"], outcome


def test_variables_that_contradict_it() -> None:
    for outcome in outcomes_on_one_host("contradiction", {}, {}):
        assert outcome["error"] == "UsageError", outcome
        assert "nccl_variables has NCCL_NET, which net='holmes' (HOLMES_NCCL_NET) decides" in outcome["message"]


def test_wrong_words() -> None:
    for outcome in outcomes_on_one_host("variables", *[{"HOLMES_NCCL_NET": "homes"}] * 2):
        assert outcome["error"] == "UsageError", outcome
        assert "HOLMES_NCCL_NET='homes' is not allowed: it must be socket or holmes" in outcome["message"]


def test_a_rendezvous_that_rank_0_cannot_open_is_told_on_all() -> None:
    for outcome in outcomes_on_one_host("no_rendezvous", {}, {}):
        assert outcome["error"] == "CommunicatorError", outcome
        assert outcome["message"].startswith("rank 0 on host a: NCCL cannot open a rendezvous: "), outcome
        assert "no socket interface found" in outcome["message"]


def test_set_ups_that_fail_leave_nothing_open() -> None:
    for outcome in outcomes_on_one_host("failing", {}, {}):
        before, after = outcome["open"]
        assert after <= before + 2, outcome
        assert outcome["right"]


def test_a_hundred_communicators_leave_nothing_open() -> None:
    for outcome in outcomes_on_one_host("churn", {}, {}):
        before, after = outcome["open"]
        assert after <= before + 2, outcome
