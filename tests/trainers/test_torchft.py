"""torchft over Holmes: its own tests with our process group in place of Gloo, and DiLoCo over two clusters.

torchft's wheel has its tests. Where they expect Gloo's words for a lost peer or a late one, ours are expected instead.
"""

import json
import sys
from datetime import timedelta

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchft", reason="needs torchft: make test-trainers")
pytest.importorskip("parameterized", reason="needs parameterized, which torchft's tests import: make test-trainers")

import torchft.local_sgd_integ_test as theirs_local_sgd
import torchft.manager_integ_test as theirs_manager
import torchft.process_group_test as theirs
from diloco_task import STEPS, SYNC_EVERY, evaluate, make_model, single_process_loss, sync_rounds
from namespaces import needs_namespaces
from parameterized import parameterized
from paths import WORKERS

from holmes.training.integrations.torchft import ProcessGroupHolmes

LOST_PEER = r"rank 2 \(host .*\) on NIC .* destroyed its communicator|no error"
LATE_PEER = "rank 1 of 2 did not take part in choosing the NICs within 0.010 s"


@pytest.fixture(autouse=True)
def ours_in_place_of_gloo(monkeypatch):
    for module in (theirs, theirs_manager, theirs_local_sgd):
        monkeypatch.setattr(module, "ProcessGroupGloo", ProcessGroupHolmes)


class OurWords:
    """Of unittest.TestCase: Gloo's words become ours."""

    def assertRaisesRegex(self, error, regex):  # unittest's name
        words = {"(timeout after 10ms|Socket Timeout)": LATE_PEER}
        ours = LOST_PEER if "by peer" in regex else words.get(regex, regex)
        return super().assertRaisesRegex(error, ours)  # noqa: PT027  # what their tests call


class TestProcessGroups(OurWords, theirs.MultiPgBaseTest):
    """Every collective on three ranks, and on the two that are left after the third has gone."""

    WORLD_SIZE = 3

    @classmethod
    def _create_pg(cls, backend):
        return ProcessGroupHolmes(timeout=timedelta(seconds=10))

    @parameterized.expand(theirs._ALL_COLLECTIVES)
    def test_collective(self, collective):
        self._run_parallel(collective)

    @parameterized.expand(theirs._ALL_COLLECTIVES)
    def test_collective_with_resiliency(self, collective):
        self._run_with_resiliency(collective)


class TestProcessGroup(OurWords, theirs.ProcessGroupTest):
    """Reconfiguring, timeouts, functional collectives, wrappers."""


class TestManager(theirs_manager.ManagerIntegTest):
    """Manager and Lighthouse: replicas that fail, heal and come late."""


class TestLocalSgd(theirs_local_sgd.LocalSGDIntegTest):
    """LocalSGD and DiLoCo, also streaming, through failures."""


@needs_namespaces
def test_diloco_over_two_clusters_reaches_the_loss_of_one_process():
    testbed = pytest.importorskip("holmes.lab.testbed")
    result = testbed.Testbed("two-clusters").run(
        [sys.executable, str(WORKERS / "diloco_worker.py")], nproc_per_node=1, timeout_s=200
    )
    assert result.returncode == 0, result.outputs
    outcomes = [json.loads(line) for lines in result.outputs.values() for line in lines if line.startswith("{")]
    assert len(outcomes) == 4
    losses = [outcome["loss"] for outcome in outcomes]
    alone = single_process_loss()
    print(f"losses {losses}, of one process {alone}, at the start {evaluate(make_model())}; {outcomes[0]}")
    assert max(losses) == pytest.approx(min(losses), rel=1e-5)  # all hold the same model at the end
    assert losses[0] == pytest.approx(alone, rel=0.02)
    assert alone < 0.8 * evaluate(make_model())
    for outcome in outcomes:
        assert outcome["steps"] == STEPS
        assert list(outcome["across"]) == ["eth0"]
        assert "eth0" not in outcome["inside"]
        # Each round each rank sends the model's difference once to its one peer, where DDP sends a gradient each step.
        (across,) = outcome["across"].values()
        rounds_bytes = sync_rounds() * outcome["model_bytes"]
        assert rounds_bytes <= across < 1.2 * rounds_bytes
        assert across < 1.2 * STEPS * outcome["model_bytes"] / SYNC_EVERY
