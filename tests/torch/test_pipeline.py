"""Pipelines over Holmes groups: every schedule of a plan trains as one process does; bfloat16 across clusters only."""

import importlib
import re
import sys

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
pytest.importorskip("holmes.training.pipeline", exc_type=ImportError)  # says which torch it needs

from single_process import single_process_losses  # noqa: E402
from topologies import topology_of  # noqa: E402
from torch import nn  # noqa: E402
from torch_ranks import init, run_ranks  # noqa: E402

import holmes  # noqa: E402
from holmes.lab.demo.model import (  # noqa: E402
    Batches,
    Stage,
    loss_of,
)
from holmes.lab.demo.settings import Settings  # noqa: E402

SETTINGS = Settings(layers=4, width=32, heads=2, sequence=16, global_batch=16)
STEPS, MICRO_BATCHES = 8, 4
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")


@pytest.fixture(scope="module")
def expected():
    return single_process_losses(SETTINGS, STEPS)


def make_plan(ranks_of_hosts, schedule, chunks=1):
    return holmes.plan_for(
        topology_of(ranks_of_hosts),
        model_layers=SETTINGS.layers,
        pipeline=2,
        chunks=chunks,
        schedule=schedule,
        micro_batch=SETTINGS.global_batch // 2 // MICRO_BATCHES,
        global_batch=SETTINGS.global_batch,
    )


class Trainer:
    """Two data-parallel replicas of a two-stage pipeline."""

    def __init__(self, plan, wire_dtype=None):
        rank = dist.get_rank()
        groups = {}
        for kind in ("dp", "pp"):
            for ranks in plan.groups(kind).ranks:
                made = dist.new_group(ranks.tolist())
                if rank in ranks:
                    groups[kind] = made
        self.plan, self.replica = plan, dist.get_rank(groups["dp"])
        self.batches = Batches(SETTINGS)
        stage = plan.stage_of(rank)
        parts = [plan.layers_of(stage, chunk) for chunk in range(plan.chunks)]
        self.model = nn.ModuleList(Stage(SETTINGS, self.batches.vocabulary, part) for part in parts)
        self.optimizer = holmes.DistributedOptimizer(
            list(self.model), torch.optim.AdamW, lr=SETTINGS.learning_rate, group=groups["dp"], bucket_bytes=32768
        )
        self.stages = holmes.pipeline_stages(plan, list(self.model), group=groups["pp"], wire_dtype=wire_dtype)
        self.schedule = holmes.pipeline_schedule(plan, self.stages, loss_of)
        self.is_last = any(stage.is_last for stage in self.stages)

    def step(self, number):
        inputs, targets = (t.chunk(self.plan.data)[self.replica] for t in self.batches.batch(number))
        losses = []
        self.schedule.step(
            *([inputs] if self.stages[0].is_first else []), target=targets if self.is_last else None, losses=losses
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = sum(loss.detach() for loss in losses) / MICRO_BATCHES if self.is_last else torch.zeros(())
        dist.all_reduce(total)
        return total.item() / self.plan.data


def train_all(rank, size, store):
    init(store, rank, size)
    found = {}
    for schedule in SCHEDULES:
        trainer = Trainer(make_plan([[1, 1], [1, 1]], schedule, chunks=2 if schedule == "interleaved" else 1))
        found[schedule] = [trainer.step(number) for number in range(STEPS)]
        kinds = {wait.what for stage in trainer.stages for wait in stage.waits}
        assert "sends" in kinds
        assert kinds & {"forward", "backward"}
        assert all(wait.end_s >= wait.start_s for stage in trainer.stages for wait in stage.waits)
    trainer = Trainer(make_plan([[1, 1], [1, 1]], "1f1b"), wire_dtype=torch.bfloat16)
    found["bfloat16"] = [trainer.step(number) for number in range(STEPS)]
    boundary = trainer.stages[0].submod
    assert type(boundary).__name__ == "WireCast"
    return found


@pytest.fixture(scope="module")
def trained():
    return run_ranks(train_all, 4)[0]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_are_the_single_process_ones(schedule, trained, expected):
    torch.testing.assert_close(trained[schedule], expected, rtol=1e-4, atol=0)


def test_bfloat16_on_the_wire_stays_near(trained, expected):
    torch.testing.assert_close(trained["bfloat16"], expected, rtol=5e-3, atol=0)
    assert trained["bfloat16"] != expected


def train_by_torchs_own_schedules(rank, size, store):
    """Whatever order a schedule sends micro-batches in: the gradients of one process."""
    from torch.distributed import pipelining

    init(store, rank, size)

    def parts(count):
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double() for _ in range(count)]

    inputs, targets = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = {}
    for name in ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble"):
        schedule = getattr(pipelining, f"Schedule{name}")
        chunks = 1 if name in ("GPipe", "1F1B") else 2
        whole = parts(size * chunks)
        nn.functional.mse_loss(nn.Sequential(*whole)(inputs), targets).backward()
        own = [chunk * size + rank for chunk in range(chunks)]
        mine = parts(size * chunks)
        stages = [holmes.PipelineStage(mine[k], k, size * chunks, group=dist.group.WORLD) for k in own]
        made = schedule(stages[0] if chunks == 1 else stages, 4, loss_fn=nn.functional.mse_loss)
        made.step(*([inputs] if rank == 0 else []), target=targets if rank == size - 1 else None)
        pairs = [
            (a.grad, b.grad) for k in own for a, b in zip(mine[k].parameters(), whole[k].parameters(), strict=True)
        ]
        found[name] = max((a - b).abs().max().item() for a, b in pairs)
    return found


def test_schedules_of_torch_give_the_gradients_of_one_process():
    for found in run_ranks(train_by_torchs_own_schedules, 2):
        assert all(error < 1e-12 for error in found.values()), found


def train_with_few_micro_batches(rank, size, store):
    from torch.distributed import pipelining

    init(store, rank, size)

    def parts():
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double() for _ in range(size)]

    inputs, targets = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = parts()
    nn.functional.mse_loss(nn.Sequential(*whole)(inputs), targets).backward()
    found = {}
    for kind in (holmes.PipelineStage, pipelining.PipelineStage):
        for micro_batches in range(1, size + 1):
            plan = holmes.plan_for(topology_of([[1] * size]), model_layers=size, pipeline=size, schedule="1f1b")
            mine = parts()[rank]
            stage = kind(mine, rank, size, torch.device("cpu"), group=dist.group.WORLD)
            made = holmes.pipeline_schedule(plan, [stage], nn.functional.mse_loss, micro_batches=micro_batches)
            for _ in range(2):
                mine.zero_grad()
                losses = []
                made.step(*([inputs] if rank == 0 else []), target=targets if rank == size - 1 else None, losses=losses)
                assert len(losses) == (micro_batches if rank == size - 1 else 0)
            pairs = zip(mine.parameters(), whole[rank].parameters(), strict=True)
            found[kind.__module__, micro_batches] = max((a.grad - b.grad).abs().max().item() for a, b in pairs)
    return found


def test_1f1b_with_fewer_micro_batches_than_stages():
    for found in run_ranks(train_with_few_micro_batches, 3):
        assert len(found) == 6
        assert all(error < 1e-12 for error in found.values()), found


def test_micro_batches_that_no_rounds_divide_are_refused():
    for schedule, chunks in (("zb-h1", 1), ("interleaved", 2)):
        plan = holmes.plan_for(topology_of([[1, 1]]), model_layers=4, pipeline=2, schedule=schedule, chunks=chunks)
        with pytest.raises(
            ValueError, match=f"micro_batches=5 cannot be had with schedule='{schedule}' .* are 4 and 6"
        ):
            holmes.pipeline_schedule(plan, [None] * chunks, nn.functional.mse_loss, micro_batches=5)


def test_a_torch_without_stage_metadata_is_told(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("holmes.training.pipeline")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("torch.distributed.pipelining._utils._StageMeta")
    with pytest.raises(ImportError, match=rf"torch {re.escape(torch.__version__)} has no metadata .* need torch 2.13"):
        importlib.import_module("holmes.training.pipeline")
