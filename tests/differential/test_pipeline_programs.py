"""Training programs over pipelines, each beside the same in one process: losses, gradients and state at every step."""

import warnings

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
pipelining = pytest.importorskip("torch.distributed.pipelining")
pytest.importorskip("holmes.training.pipeline", exc_type=ImportError)  # says which torch it needs

from pipeline_programs import PARTS, PROGRAMS, STEPS, Chain, Record, differences, sgd, train_alone  # noqa: E402
from topologies import topology_of  # noqa: E402
from torch_ranks import init, run_ranks  # noqa: E402

import holmes  # noqa: E402

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1}  # name -> chunks of a rank
STAGES = {"holmes": holmes.PipelineStage, "torch": pipelining.PipelineStage}


WARMED = {2: [5, 2], 4: [7, 6, 2, 1]}  # forwards first, for stages that are far from each other


FAR = {
    2: [("zb-h1 warmed", "holmes"), ("interleaved grouped", "holmes"), ("interleaved grouped", "torch")],
    4: [("1f1b warmed", "holmes"), ("zb-h1 warmed", "holmes"), ("1f1b warmed", "torch")],
}
#: Programs that run in these too: orders alone are other ones, stages and messages are not.
OVER_A_DISTANCE = ("plain", "first stage frozen", "token ids", "dropout", "checkpointing", "uneven micro-batches",
                   "batches of several sizes")  # fmt: skip


def make_plan(schedule, pipeline, micro_batches, replicas=1, **options):
    return holmes.plan_for(
        topology_of([[replicas] * (pipeline // 2)] * 2),
        model_layers=PARTS,
        pipeline=pipeline,
        chunks=SCHEDULES[schedule],
        schedule=schedule,
        **options,
        micro_batch=1,
        global_batch=micro_batches * replicas,
    )


class Pipeline:
    """This rank's parts of a program, its stages and the schedule."""

    def __init__(self, program, schedule, kind, group=None, wrap=lambda module: module, **options):
        group = group or dist.group.WORLD
        schedule, _, warmed = schedule.partition(" ")
        size, rank, chunks = group.size(), group.rank(), SCHEDULES[schedule]
        self.program, parts = program, program.make()
        each = PARTS // (size * chunks)
        self.parts = {
            index: parts[index]
            for chunk in range(chunks)
            for index in range(PARTS)
            if index // each == chunk * size + rank
        }
        owned = list(self.parts.values())
        modules = [owned[i] if each == 1 else Chain(owned[i : i + each]) for i in range(0, len(owned), each)]
        self.stages = [
            STAGES[kind](wrap(module), chunk * size + rank, size * chunks, torch.device("cpu"), group=group, **options)
            for chunk, module in enumerate(modules)
        ]
        options = {"warmup": WARMED[size]} if warmed == "warmed" else {}
        options |= {"micro_batch_group": program.micro_batches} if warmed == "grouped" else {}
        plan = make_plan(schedule, size, program.micro_batches, **options)
        self.schedule = holmes.pipeline_schedule(plan, self.stages, program.loss)
        self.is_first, self.is_last = self.stages[0].is_first, self.stages[-1].is_last

    def run(self, inputs, target, kwargs, run=None):
        """The loss over the batch, on the last stage's rank."""
        losses = []
        (run or self.schedule.step)(
            *([inputs] if self.is_first else []), target=target if self.is_last else None, losses=losses, **kwargs
        )
        sizes = [len(piece) for piece in target.tensor_split(self.program.micro_batches)]
        return sum(loss.item() * size for loss, size in zip(losses, sizes, strict=False)) / len(target)


def train(program, schedule, kind):
    pipeline, record = Pipeline(program, schedule, kind), Record()
    optimizer = sgd(list(pipeline.parts.values()))
    torch.manual_seed(3)
    for step in range(STEPS):
        inputs, target, kwargs = program.data(step)
        loss = pipeline.run(inputs, target, kwargs)
        if pipeline.is_last:
            record.losses.append(loss)
            record.keep_given(step, **kwargs)
        if pipeline.is_first:
            record.keep_given(step, inputs=inputs)
        for number, part in pipeline.parts.items():
            record.keep(step, number, part)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return record


def cases(size):
    """One stage on each of 4 ranks; on 2 ranks two stages each, or stages of two parts."""
    four = [("gpipe", "holmes"), ("1f1b", "holmes"), ("zb-h1", "holmes"), ("zb-h1", "torch")]
    two = [("interleaved", "holmes"), ("interleaved", "torch"), ("zb-h1", "holmes")]
    for name, program in PROGRAMS.items():
        if size == PARTS or not program.has_rng:
            yield from ((name, *case) for case in (four if size == PARTS else two))
        if name in OVER_A_DISTANCE and (size == PARTS or not program.has_rng):
            yield from ((name, *case) for case in FAR[size])


def train_all(rank, size, store):
    """What is wrong, by case; up to the first that fails."""
    warnings.simplefilter("ignore")
    init(store, rank, size)
    wrong, expected = {}, {}
    for name, schedule, kind in cases(size):
        if name not in expected:
            expected[name] = train_alone(PROGRAMS[name])
        try:
            wrong[name, schedule, kind] = differences(train(PROGRAMS[name], schedule, kind), expected[name])
        except Exception as error:
            while error.__cause__ is not None:
                error = error.__cause__
            wrong[name, schedule, kind] = [f"{type(error).__name__}: {error}"]
            break
    return wrong


@pytest.fixture(scope="module")
def trained():
    return {size: run_ranks(train_all, size) for size in (2, 4)}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_trains_as_one_process(name, size, trained):
    wrong = {
        (rank, *case[1:]): ranks_wrong.get(case, ["not run"])
        for rank, ranks_wrong in enumerate(trained[size])
        for case in cases(size)
        if case[0] == name and ranks_wrong.get(case, ["not run"])
    }
    assert not wrong
