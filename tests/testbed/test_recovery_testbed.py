"""run_elastic on the testbed: nodes are killed in mid-step and come back; losses are those of an unbroken run."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
testbed = pytest.importorskip("holmes.lab.testbed")


from elastic_job import ElasticJob, ElasticNodes  # noqa: E402
from namespaces import needs_namespaces  # noqa: E402
from single_process import single_process_losses  # noqa: E402

from holmes.lab.demo.settings import Settings  # noqa: E402

NODES = ["a0", "a1", "b0", "b1"]
STEPS = 30
TINY = {"layers": 3, "width": 32, "heads": 2, "sequence": 8, "global_batch": 12, "steps": STEPS}


def losses_of_one_process() -> list[float]:
    settings = Settings(**TINY)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR  # as in examples/elastic_gpt.py
    return single_process_losses(settings, STEPS, lambda optimizer: cosine(optimizer, settings.steps))


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
