"""run_elastic on the testbed: nodes are killed in mid-step and come back; losses are those of an unbroken run."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
testbed = pytest.importorskip("holmes.testbed")

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

from elastic_job import ElasticJob, ElasticNodes  # noqa: E402
from test_testbed import needs_namespaces  # noqa: E402

from holmes.demo.data import Batches  # noqa: E402
from holmes.demo.model import Stage, loss_of  # noqa: E402
from holmes.demo.settings import Settings  # noqa: E402

NODES = ["a0", "a1", "b0", "b1"]
STEPS = 30
TINY = {"layers": 3, "width": 32, "heads": 2, "sequence": 8, "global_batch": 12, "steps": STEPS}


def losses_of_one_process() -> list[float]:
    settings = Settings(**TINY)
    batches = Batches(settings)
    torch.set_num_threads(1)
    model = Stage(settings, batches.vocabulary, range(settings.layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    losses = []
    for step in range(STEPS):
        inputs, targets = batches.batch(step)
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


@needs_namespaces
def test_a_node_is_lost_and_comes_back(tmp_path: Path) -> None:
    hold = {"2": {"step": 21, "file": str(tmp_path / "go")}}  # the three train on when the fourth waits
    with ElasticNodes(tmp_path) as nodes:
        job = ElasticJob(nodes, NODES, 29400, TINY, checkpoints=str(tmp_path / "run"), hold=hold)
        job.start(*NODES)
        job.wait_for_step(12, 1)
        job.kill("a1")
        job.wait("generation 2: ")
        job.start("a1")
        job.wait("waits to be let in", "a1")
        Path(hold["2"]["file"]).touch()
        job.finish()
    (first, start, _), (second, resumed, left), (third, again, end) = job.generations()
    assert (first, second, third) == (4, 3, 4)
    assert start == 0
    assert end == STEPS - 1
    assert resumed % 5 == 0
    assert resumed <= 15
    assert again == left + 1  # nothing was lost at the boundary
    losses = job.losses()
    assert [losses[step] for step in range(STEPS)] == pytest.approx(losses_of_one_process(), rel=1e-5)
    kept = job.kept()
    assert sorted(kept) == ["a0", "b0", "b1"]
    assert all(before == after for before, after in kept.values()), kept
