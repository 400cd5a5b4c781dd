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


@needs_namespaces
def test_those_cut_off_from_the_store_stop_before_one_on_its_side_begins(tmp_path: Path) -> None:
    """Their own network stands: they could train on for ever. The one on the store's side needs nobody else."""
    with ElasticNodes(tmp_path) as nodes:
        folder = tmp_path / "run"
        job = ElasticJob(nodes, ["a0", "a1", "b0"], 29400, TINY, checkpoints=str(folder), until=1_000_000)
        job.start("a0", "a1", "b0")
        job.wait_for_step(12, 1)
        store = job.store.rpartition(":")[0]
        for node in ("a0", "a1", "b0"):
            nodes.session.exec(node, ["ip", "route", "add", "blackhole", f"{store}/32"])
        job.running.clear()  # they will end, and not well
        job.places[0] = "b1"
        job.options.update(ranks=1, min_ranks=1)
        job.start("b1")
        began_s = job.wait("; agreed", "b1")
        number = max(job.members())  # 2, or more where the three lost one for a moment on a busy machine
        own = f"generation-{number:04}"
        written = {path.name for path in folder.iterdir() if own not in path.name}
        job.wait_for_step(100, number)
        trained_s = [at for at, node, line in job.lines if node != "b1" and line.startswith('{"step"')]
        assert max(trained_s) < began_s
        assert not {path.name for path in folder.iterdir() if own not in path.name} - written
        for node in ("a0", "a1"):
            job.wait("has not reached the job's store", node)  # said when it ends, which takes longer than to stop
