"""A small GPT trained for 100 steps by DistributedOptimizer over several layouts: the single process's losses."""

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from single_process import single_process_losses  # noqa: E402
from torch_ranks import init, run_ranks  # noqa: E402

import holmes  # noqa: E402
from holmes.lab.demo.model import (  # noqa: E402
    Batches,
    Stage,
    loss_of,
)
from holmes.lab.demo.settings import Settings  # noqa: E402

SETTINGS = Settings(layers=4, width=32, heads=2, sequence=16, global_batch=16)
STEPS, HALF = 100, 50
MICRO_BATCHES = 4  # of a pipeline; without one, with accumulation


class Layout:
    """`data` x `pipeline` ranks: the model's part, its optimizer, and steps that return the mean loss of all."""

    def __init__(self, rank, pipeline, micro_batches):
        self.data, self.pipeline = dist.get_world_size() // pipeline, pipeline
        self.replica, self.stage_index = rank % self.data, rank // self.data
        data_groups = [dist.new_group(list(range(s * self.data, (s + 1) * self.data))) for s in range(pipeline)]
        stage_groups = [dist.new_group(list(range(r, self.data * pipeline, self.data))) for r in range(self.data)]
        self.batches = Batches(SETTINGS)
        per_stage = SETTINGS.layers // pipeline
        layers = range(self.stage_index * per_stage, (self.stage_index + 1) * per_stage)
        self.model = Stage(SETTINGS, self.batches.vocabulary, layers)
        self.is_last = self.stage_index == pipeline - 1
        self.micro_batches = micro_batches
        self.optimizer = holmes.DistributedOptimizer(
            self.model,
            torch.optim.AdamW,
            lr=SETTINGS.learning_rate,
            group=data_groups[self.stage_index],
            bucket_bytes=32768,
            name_of=lambda name: self.global_name(name, layers.start),
        )
        if pipeline > 1:
            from torch.distributed.pipelining import PipelineStage, Schedule1F1B

            stage = PipelineStage(
                self.model, self.stage_index, pipeline, torch.device("cpu"), group=stage_groups[self.replica]
            )
            self.schedule = Schedule1F1B(
                stage, micro_batches, lambda out, target: loss_of(out, target) / micro_batches, scale_grads=False
            )

    @staticmethod
    def global_name(name, first_layer):
        parts = name.split(".")
        if parts[0] == "blocks":
            parts[1] = str(int(parts[1]) + first_layer)
        return ".".join(parts)

    def step(self, number):
        inputs, targets = (t.chunk(self.data)[self.replica] for t in self.batches.batch(number))
        losses = []
        if self.pipeline > 1:
            self.schedule.step(
                *([inputs] if self.stage_index == 0 else []), target=targets if self.is_last else None, losses=losses
            )
        else:
            pairs = zip(inputs.chunk(self.micro_batches), targets.chunk(self.micro_batches), strict=True)
            for x, y in pairs:
                loss = loss_of(self.model(x), y) / self.micro_batches
                loss.backward()
                losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = sum(loss.detach() for loss in losses) if self.is_last else torch.zeros(())
        dist.all_reduce(total)
        return total.item() / self.data

    def state(self):
        model = {self.global_name(n, self.model_start()): p for n, p in self.model.state_dict().items()}
        return {"model": model, "optimizer": self.optimizer.state_dict()}

    def model_start(self):
        return self.stage_index * (SETTINGS.layers // self.pipeline)

    def load(self, folder):
        import torch.distributed.checkpoint as dcp

        state = self.state()
        dcp.load(state, checkpoint_id=folder)  # in place: the model's parameters are views
        self.optimizer.load_state_dict(state["optimizer"])


def train(rank, size, store, pipeline, micro_batches, saved, loaded):
    import torch.distributed.checkpoint as dcp

    init(store, rank, size)
    layout = Layout(rank, pipeline, micro_batches)
    first = 0
    if loaded is not None:
        layout.load(loaded)
        first = HALF
    losses = []
    for number in range(first, STEPS):
        if saved is not None and number == HALF:
            layout.optimizer.synchronize()
            dcp.save(layout.state(), checkpoint_id=saved)
        losses.append(layout.step(number))
    assert layout.optimizer.last_report.groups or layout.data == 1
    return losses


#: Ranks, pipeline stages, micro-batches. Without a pipeline, micro-batches are accumulation; with one, 2x2 holds both
#: and 1x4 the deepest.
LAYOUTS = [
    (4, 4, MICRO_BATCHES),
    (1, 1, MICRO_BATCHES),
    (4, 1, MICRO_BATCHES),
]
#: Each loads what the one before it saved after half of the steps.
CHAIN = [
    (1, 1, 1),
    (4, 1, 1),
    (4, 2, MICRO_BATCHES),
    (2, 1, MICRO_BATCHES),
]


@pytest.fixture(scope="module")
def expected():
    losses = single_process_losses(SETTINGS, STEPS)
    assert losses[-1] < 0.8 * losses[0]
    return losses


@pytest.mark.parametrize(("size", "pipeline", "micro_batches"), LAYOUTS)
def test_losses_are_the_single_process_ones(size, pipeline, micro_batches, expected):
    losses = run_ranks(train, size, pipeline, micro_batches, None, None)[0]
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0)


def test_losses_are_the_single_process_ones_also_when_going_on_from_another_layout(expected, tmp_path):
    """1x1 -> 4 data -> 2 data x 2 stages -> 2 data with accumulation: each also continues the curve from half way."""
    loaded = None
    for number, (size, pipeline, micro_batches) in enumerate(CHAIN):
        saved = str(tmp_path / f"checkpoint{number}")
        losses = run_ranks(train, size, pipeline, micro_batches, saved, None)[0]
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0)
        if loaded is not None:
            losses = run_ranks(train, size, pipeline, micro_batches, None, loaded)[0]
            torch.testing.assert_close(losses, expected[HALF:], rtol=1e-4, atol=0)
        loaded = saved
