"""Replicas with different numbers of micro-batches: the gradient is that of the global batch, as one process has it."""

import dataclasses
import random
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
pytest.importorskip("holmes.training.pipeline", exc_type=ImportError)  # says which torch it needs

from single_process import single_process_losses  # noqa: E402
from topologies import topology_of  # noqa: E402
from torch import nn  # noqa: E402
from torch_ranks import init, run_ranks  # noqa: E402

import holmes  # noqa: E402
from holmes.lab.demo.model import Batches, Stage, loss_of  # noqa: E402
from holmes.lab.demo.settings import Settings  # noqa: E402

WIDTH, MICRO, SHARES, STEPS = 6, 2, (3, 1), 5
BATCH = MICRO * sum(SHARES)
SETTINGS = Settings(layers=4, width=32, heads=2, sequence=16, global_batch=16)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
PLAIN = {"lr": 0.01, "eps": 1e-4}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, WIDTH))


def samples(step):
    """Later ones are larger: replicas' means are far apart."""
    generator = torch.Generator().manual_seed(100 + step)
    scale = 1.0 + torch.arange(BATCH)[:, None]
    return torch.randn(BATCH, WIDTH, generator=generator), scale * torch.randn(BATCH, WIDTH, generator=generator)


def values_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def expected(clip=None):
    """Losses, parameters and gradient norms of one process with the whole batch."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), **PLAIN)
    losses, norms = [], []
    for step in range(STEPS):
        inputs, targets = samples(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, values_of(model), norms


def train_ddp(plan, rank):
    """DDP and a plain optimizer, with the loss times the weight."""
    model = nn.parallel.DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), **PLAIN)
    mine, count, losses = plan.samples_of(rank), plan.micro_batches_of(rank), []
    for step in range(STEPS):
        inputs, targets = (each[mine.start : mine.stop].chunk(count) for each in samples(step))
        total = torch.zeros(())
        optimizer.zero_grad()
        for number in range(count):
            with model.no_sync() if number < count - 1 else nullcontext():
                loss = nn.functional.mse_loss(model(inputs[number]), targets[number]) / count
                loss = loss * plan.gradient_weight(rank)
                loss.backward()
            total += loss.detach()
        optimizer.step()
        dist.all_reduce(total)
        losses.append(total.item() / plan.data)
    return losses, values_of(model), []


def train(plan, rank, *, group, no_sync=False, drops=False, **options):
    """As documented: each rank takes its samples, in its number of micro-batches, and means over them."""
    model = make_model()
    optimizer = holmes.DistributedOptimizer(
        model, torch.optim.AdamW, group=group, bucket_bytes=2048, **PLAIN, **options
    )
    mine, count, losses, norms = plan.samples_of(rank), plan.micro_batches_of(rank), [], []
    for step in range(STEPS):
        inputs, targets = (each[mine.start : mine.stop].chunk(count) for each in samples(step))
        total = torch.zeros(())
        if drops and step > 0:  # a backward whose gradients, sent already, are for nothing
            for x, y in zip(inputs, targets, strict=True):
                nn.functional.mse_loss(model(x), y).backward()
            optimizer.zero_grad()
        for number in range(count):
            loss = nn.functional.mse_loss(model(inputs[number]), targets[number]) / count
            if no_sync and number < count - 1:
                with optimizer.no_sync():
                    optimizer.scale(loss).backward()
            else:
                optimizer.scale(loss).backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        total *= plan.gradient_weight(rank)
        dist.all_reduce(total)
        losses.append(total.item() / plan.data)
        norms.append(optimizer.grad_norm)
    optimizer.synchronize()
    return losses, values_of(model), norms


def plan_of(topology, shares=SHARES, **options):
    sizes = {"model_layers": 1, "pipeline": 1, "micro_batch": MICRO, "global_batch": MICRO * sum(shares)}
    return holmes.plan_for(topology, span_clusters=True, data_shares=shares, **(sizes | options))


def train_each_way(rank, size, store):
    """Found losses and parameters by name."""
    init(store, rank, size)
    found = {}
    by_hand = plan_of(topology_of([[1], [1]]))
    weight = by_hand.gradient_weight(rank)
    found["by hand"] = train(by_hand, rank, group=None, gradient_weight=weight)
    found["equal mean"] = train(by_hand, rank, group=None)
    found["one by one"] = train(by_hand, rank, group=None, gradient_weight=weight, step_in_backward=False)
    found["no_sync"] = train(by_hand, rank, group=None, gradient_weight=weight, no_sync=True)
    found["dropped"] = train(by_hand, rank, group=None, gradient_weight=weight, drops=True)
    found["DDP"] = train_ddp(by_hand, rank)
    found["clipped"] = train(by_hand, rank, group=None, gradient_weight=weight, max_grad_norm=0.5)
    found["scaled"] = train(by_hand, rank, group=None, gradient_weight=weight, loss_scale=1024.0)
    found["reduce_dtype"] = train(by_hand, rank, group=None, gradient_weight=weight, reduce_dtype=torch.float64)
    # The plan's groups know their weights, over either backend, and in any order of the ranks.
    groups = holmes.process_groups(by_hand, backend="gloo")
    found["gloo"] = train(by_hand, rank, group=groups.dp)
    discovered = plan_of(holmes.gather_topology(measure_s=0))
    found["holmes"] = train(discovered, rank, group=holmes.process_groups(discovered).dp)
    swapped = dataclasses.replace(by_hand, order=(1, 0))
    assert swapped.micro_batches_of(1) == SHARES[0]
    found["swapped"] = train(swapped, rank, group=holmes.process_groups(swapped, backend="gloo").dp)
    return found


@pytest.fixture(scope="module")
def trained():
    return run_ranks(train_each_way, 2)


@pytest.mark.parametrize(
    "way",
    [
        "by hand",
        "one by one",
        "no_sync",
        "dropped",
        "DDP",
        "clipped",
        "scaled",
        "reduce_dtype",
        "gloo",
        "holmes",
        "swapped",
    ],
)
def test_losses_and_parameters_are_the_single_process_ones(way, trained):
    losses, parameters, norms = expected(0.5 if way == "clipped" else None)
    for mine in trained:
        torch.testing.assert_close(mine[way][0], losses, rtol=1e-4, atol=0)
        torch.testing.assert_close(torch.tensor(mine[way][1]), torch.tensor(parameters), rtol=2e-4, atol=2e-6)
    if way == "clipped":
        torch.testing.assert_close(trained[0][way][2], norms, rtol=1e-4, atol=0)


def test_the_mean_over_ranks_would_be_another_training(trained):
    _, parameters, _ = expected()
    assert max(abs(a - b) for a, b in zip(trained[0]["equal mean"][1], parameters, strict=True)) > 1e-3


# --- pipelines ---


def train_pipeline(plan, *, knows_plan):
    """Two stages, two replicas: the losses of the global batch."""
    rank = dist.get_rank()
    groups = holmes.process_groups(plan, backend="gloo") if knows_plan else None
    data, stages = (groups.dp, groups.pp) if groups else (_own(plan, "dp"), _own(plan, "pp"))
    batches = Batches(SETTINGS)
    stage = plan.stage_of(rank)
    parts = [plan.layers_of(stage, chunk) for chunk in range(plan.chunks)]
    model = nn.ModuleList(Stage(SETTINGS, batches.vocabulary, part) for part in parts)
    weight = {} if knows_plan else {"gradient_weight": plan.gradient_weight(rank)}
    optimizer = holmes.DistributedOptimizer(
        list(model), torch.optim.AdamW, lr=SETTINGS.learning_rate, group=data, bucket_bytes=32768, **weight
    )
    own = holmes.pipeline_stages(plan, list(model), group=stages)
    schedule = holmes.pipeline_schedule(plan, own, loss_of)
    is_last, mine, found = any(each.is_last for each in own), plan.samples_of(rank), []
    for step in range(STEPS):
        inputs, targets = (each[mine.start : mine.stop] for each in batches.batch(step))
        losses = []
        schedule.step(*([inputs] if own[0].is_first else []), target=targets if is_last else None, losses=losses)
        assert len(losses) == (plan.micro_batches_of(rank) if is_last else 0)
        optimizer.step()
        optimizer.zero_grad()
        total = sum(loss.detach() for loss in losses) / len(losses) if is_last else torch.zeros(())
        total *= plan.gradient_weight(rank)
        dist.all_reduce(total)
        found.append(total.item() / plan.data)
    return found


def _own(plan, kind):
    made = [(ranks, dist.new_group(ranks.tolist())) for ranks in plan.groups(kind).ranks]
    return next(group for ranks, group in made if dist.get_rank() in ranks)


def train_pipelines(rank, size, store):
    init(store, rank, size)
    found = {}
    topology = topology_of([[1, 1], [1, 1]], random.Random(1))
    sizes = {"model_layers": SETTINGS.layers, "pipeline": 2}
    for schedule in SCHEDULES:
        chunks = 2 if schedule == "interleaved" else 1
        plan = plan_of(topology, (6, 2), schedule=schedule, chunks=chunks, **sizes)
        found[schedule] = train_pipeline(plan, knows_plan=True)
    # Fewer micro-batches than stages in one replica, and warm-ups beyond its number.
    found["one"] = train_pipeline(plan_of(topology, (7, 1), schedule="1f1b", **sizes), knows_plan=False)
    found["warm-up"] = train_pipeline(plan_of(topology, (7, 1), warmup=[4, 2], **sizes), knows_plan=False)
    return found


@pytest.fixture(scope="module")
def pipelines():
    return run_ranks(train_pipelines, 4)[0]


@pytest.mark.parametrize("name", [*SCHEDULES, "one", "warm-up"])
def test_pipelines_train_as_one_process(name, pipelines):
    torch.testing.assert_close(pipelines[name], single_process_losses(SETTINGS, STEPS), rtol=1e-4, atol=0)


# --- refusals ---


def refuse(rank, size, store):
    init(store, rank, size)
    model, found = make_model(), []

    def attempt(weight):
        try:
            holmes.DistributedOptimizer(model, torch.optim.SGD, lr=0.1, gradient_weight=weight)
        except ValueError as error:
            found.append(str(error))
        else:
            found.append("")

    attempt(1.5)  # on both: 3 in all
    attempt(1.5 if rank == 0 else None)  # the other rank forgot
    attempt(SHARES[rank])  # shares are no weights
    attempt(1.5 if rank == 0 else 0.5)
    for weight in (0.0, -1.0, float("inf"), float("nan"), True, "1", 1j):
        attempt(weight)
    return found


def test_weights_that_make_no_mean_are_refused_on_every_rank():
    for rank, found in enumerate(run_ranks(refuse, 2)):
        own = (("1.5", "3"), (("1.5", "1")[rank], "2.5"), (("3", "1")[rank], "4"))
        for (weight, total), text in zip(own, found[:3], strict=True):
            assert f"gradient_weight is {weight} on rank {rank}" in text
            assert f"and {total} on all its 2 ranks together, which must be 2" in text
            assert "plan.gradient_weight(rank)" in text
        assert found[3] == ""
        assert all("gradient_weight=" in text and "must be above 0" in text for text in found[4:])


def test_alone_there_is_nothing_to_weigh():
    with pytest.raises(ValueError, match=r"gradient_weight is 2 on rank 0 .* must be 1 for a mean"):
        holmes.DistributedOptimizer(make_model(), torch.optim.SGD, lr=0.1, gradient_weight=2.0)
