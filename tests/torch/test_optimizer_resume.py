"""A node lost in mid-step: named on every other one within the deadline; the remaining cluster continues the curve."""

import json
import signal
import subprocess
import sys

import pytest
from paths import WORKERS

torch = pytest.importorskip("torch")

from resume_worker import CHECKPOINT_EVERY, SETTINGS, TIMEOUT_S  # noqa: E402
from single_process import single_process_losses  # noqa: E402

from holmes.lab.testbed import Testbed  # noqa: E402
from holmes.lab.testbed.launch import rank_environment  # noqa: E402

WORKER = WORKERS / "resume_worker.py"
STEPS, KILLED_STEP, VICTIM = 12, 6, 3

needs_namespaces = pytest.mark.skipif(
    subprocess.run(["unshare", "-Urnm", "true"], capture_output=True, check=False).returncode != 0,
    reason="this machine forbids unprivileged user namespaces (unshare -Urnm true fails)",
)


def said(lines):
    return [json.loads(line.removeprefix("SAYS ")) for line in lines if line.startswith("SAYS ")]


def losses_of(lines):
    return [entry["loss"] for entry in said(lines) if "loss" in entry]


@needs_namespaces
def test_the_remaining_cluster_continues_after_a_node_died(tmp_path):
    """Four nodes of two clusters train data-parallel; b1 dies; a0 and a1 go on from the last checkpoint."""
    command = [sys.executable, str(WORKER), str(tmp_path), str(STEPS)]
    expected = single_process_losses(SETTINGS, STEPS)
    with Testbed("two-clusters").session() as session:
        job = session.launch([*command, str(VICTIM), str(KILLED_STEP)])
        result = job.wait(100, grace_s=TIMEOUT_S + 5)
        assert job.processes[VICTIM].returncode == -signal.SIGKILL, result.outputs
        dying = said(result.outputs[VICTIM])[-1]
        assert dying["sent"] > 0
        for rank in range(VICTIM):
            assert job.processes[rank].returncode == 1, result.outputs[rank]
            last = said(result.outputs[rank])[-1]
            assert (last["peer"], last["host"], last["nic"]) == (VICTIM, "b1", "eth0"), last
            assert all(word in last["message"] for word in (f"rank {VICTIM}", "b1", "eth0")), last["message"]
            assert last["failed_s"] - dying["killed_s"] < TIMEOUT_S
            torch.testing.assert_close(losses_of(result.outputs[rank]), expected[:KILLED_STEP], rtol=1e-4, atol=0)

        places = [("a0", 0), ("a1", 0)]
        processes = [
            session.spawn(
                node, [*command, "-1", "0"], {"OMP_NUM_THREADS": "1", **rank_environment(session.spec, places, rank)}
            )
            for rank, (node, _) in enumerate(places)
        ]
        for process in processes:
            assert process.wait(100) == 0, process.lines
            losses = losses_of(process.lines)
            torch.testing.assert_close(losses, expected[CHECKPOINT_EVERY:], rtol=1e-4, atol=0)
