"""`holmes doctor` as a job on the real testbed, with planted faults, and alone."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from namespaces import child_env, needs_namespaces

from holmes.lab.testbed import Testbed, TestbedSession

DOCTOR = [sys.executable, "-m", "holmes", "doctor", "--timeout-s", "1"]


def diagnosis(session: TestbedSession, *options: str, **environment: str) -> tuple[dict[str, Any], int]:
    """What rank 0 printed with --json, and the job's exit code."""
    result = session.launch([*DOCTOR, "--json", "-", *options], nproc_per_node=1, env=environment).wait(120)
    assert not result.timed_out
    said = [line for line in result.outputs[0] if not line.startswith("[holmes ")]  # without warnings
    return json.loads("\n".join(said)), result.returncode


def places(found: dict[str, Any], *severities: str) -> set[tuple[str, str, str]]:
    return {(f["check"], f["host"], f["nic"]) for f in found["findings"] if f["severity"] in severities}


@needs_namespaces
def test_sound_clusters_and_then_planted_faults() -> None:
    with Testbed("two-clusters").session() as session:
        found, code = diagnosis(session)
        assert (code, places(found, "error", "warning")) == (0, set())
        assert found["clusters"] == ["cluster 0: a0, a1 (infiniband)", "cluster 1: b0, b1 (roce_v2)"]

        # Warnings only: another MTU (as the interface says it), a second NIC in a subnet, a variable that overrides.
        session.exec("a0", ["sh", "-c", "echo 9000 > $0/class/net/ib0/mtu", "/run/holmes/nodes/a0/sys"])
        session.exec("b0", ["ip", "address", "del", "10.11.0.1/16", "dev", "roce0"])
        session.exec("b0", ["ip", "address", "add", "10.12.9.9/16", "dev", "roce0"])
        found, code = diagnosis(session, NCCL_IB_DISABLE="1", HOLMES_NCIS="fastest")
        warned = places(found, "warning")
        assert ("mtu", "a1", "ib0") in warned or ("mtu", "a0", "ib0") in warned
        assert {check for check, host, nic in warned if host == "b0"} >= {"arp", "wrong egress"}
        assert [f["problem"] for f in found["findings"] if "HOLMES_NCIS" in f["problem"]]
        assert [f["problem"] for f in found["findings"] if "NCCL_IB_DISABLE=1" in f["problem"]]


@needs_namespaces
def test_duplicate_address_and_a_host_name_that_means_loopback() -> None:
    with Testbed("two-clusters").session() as session:
        session.exec("a1", ["ip", "address", "del", "10.10.0.2/16", "dev", "ib0"])
        session.exec("a1", ["ip", "address", "add", "10.10.0.1/16", "dev", "ib0"])
        change = "hosts=$(sed 's/^.* b1 .*$/127.0.1.1 b1/' /run/holmes/hosts); echo \"$hosts\" > /run/holmes/hosts"
        session.exec(None, ["sh", "-c", change])
        session.exec("a0", ["sh", "-c", "getent hosts b1 | grep -q 127.0.1.1"])
        found, code = diagnosis(session)
    assert code == 1
    assert {("duplicate address", "a0", "ib0"), ("duplicate address", "a1", "ib0")} <= places(found, "error")
    assert ("host name", "b1", "") in places(found, "error", "warning")


@needs_namespaces
def test_a_firewall_that_drops_is_told_from_a_wire_that_is_cut() -> None:
    with Testbed("one-cluster").session() as session:
        # No netfilter in a user's namespace everywhere: TCP's answers are dropped by a routing rule, ARP still works.
        session.exec("a1", ["ip", "rule", "add", "to", "10.10.0.0/16", "ipproto", "tcp", "blackhole"])
        found, code = diagnosis(session)
        assert code == 1
        assert ("firewall", "a1", "ib0") in places(found, "error")
        assert {host for _, host, _ in places(found, "error", "warning")} == {"a1"}


@needs_namespaces
def test_wrong_class_and_a_nic_on_another_wire() -> None:
    with Testbed("wrong-class").session() as session:
        found, code = diagnosis(session)
        assert code == 1
        assert {("class", "says-roce", "ib0"), ("unreachable", "cut-off", "ib0")} <= places(found, "error")
        assert not {host for _, host, _ in places(found, "error")} - {"says-roce", "cut-off"}


@needs_namespaces
def test_a_rank_that_does_not_come_is_named() -> None:
    leave = 'test "$RANK" = 2 && exec sleep 40; exec "$@"'
    with Testbed("two-clusters").session() as session:
        command = ["sh", "-c", leave, "sh", *DOCTOR, "--join-timeout-s", "20"]
        result = session.launch(command).wait(80, grace_s=10)
    assert result.returncode == 2
    assert "of 4 ranks, 2 did not come within 20 s" in "\n".join(result.outputs[0])


def test_alone() -> None:
    environment = {name: value for name, value in child_env().items() if name not in ("RANK", "WORLD_SIZE")}
    result = subprocess.run([*DOCTOR, "--json", "-"], capture_output=True, text=True, env=environment, check=False)
    found = json.loads(result.stdout)
    assert result.returncode == found["exit_code"]
    assert "MTU" in found["skipped"]
    assert "descriptors" in found["checked"]
