"""What may change between the steps of a pipeline, what is refused, and pipelines under data parallelism."""

import warnings
from collections import Counter

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
pipelining = pytest.importorskip("torch.distributed.pipelining")
pytest.importorskip("holmes.training.pipeline", exc_type=ImportError)  # says which torch it needs

from pipeline_programs import PROGRAMS, STEPS, WIDTH, Program, Record, differences, parts_of, sgd, train_alone  # noqa: E402
from test_pipeline_programs import SCHEDULES, Pipeline, make_plan  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch_ranks import init, run_ranks  # noqa: E402

import holmes  # noqa: E402

PLAIN = PROGRAMS["plain"]


def error_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return None


def change_sizes(rank, size, store):
    """Batches that are too small are refused on every rank; the group goes on."""
    init(store, rank, size)
    found = {}
    for schedule in SCHEDULES:
        pipeline = Pipeline(PLAIN, schedule, "holmes")
        optimizer = sgd(list(pipeline.parts.values()))
        losses = []
        for batch in (8, 3, 8, 10, 2):
            inputs, target = torch.ones(batch, WIDTH), torch.zeros(batch, WIDTH)
            told = []
            told.append(error_of(lambda: losses.append(pipeline.run(inputs, target, {}))))  # noqa: B023
            found[schedule, len(losses), batch] = told[0]
            optimizer.step()
            optimizer.zero_grad()
    return found


def test_batch_with_too_few_samples_is_refused_everywhere():
    for found in run_ranks(change_sizes, 2):
        for (_, _, batch), told in found.items():
            if batch >= 4:
                assert told is None
            else:
                assert f"{batch} samples" in told
                assert "micro_batches=4" in told
                assert "drop_last" in told


def evaluate(rank, size, store):
    """Evaluations, of other sizes and without targets, change nothing."""
    init(store, rank, size)
    wrong = {}
    for schedule in SCHEDULES:
        pipeline, record = Pipeline(PLAIN, schedule, "holmes"), Record()
        optimizer = sgd(list(pipeline.parts.values()))
        for step in range(STEPS):
            loss = pipeline.run(*PLAIN.data(step))
            if pipeline.is_last:
                record.losses.append(loss)
            for batch in (8, 5):
                inputs = torch.ones(batch, WIDTH)
                with torch.no_grad():
                    output = pipeline.schedule.eval(*([inputs] if pipeline.is_first else []))
                assert not pipeline.is_last or output.shape == (batch, WIDTH)
            told = pipeline.run(*PLAIN.data(step), run=pipeline.schedule.eval)
            assert not pipeline.is_last or told == pytest.approx(loss, rel=1e-6)
            for number, part in pipeline.parts.items():
                record.keep(step, number, part)
            optimizer.step()
            optimizer.zero_grad()
        wrong[schedule] = differences(record, train_alone(PLAIN))
    return wrong


def test_evaluation_between_backward_and_step():
    assert run_ranks(evaluate, 2) == [{schedule: [] for schedule in SCHEDULES}] * 2


def train_with_optimizer(program, both, schedule, group, data_group, in_backward):
    pipeline, record, replica = Pipeline(program, schedule, "holmes", group), Record(), data_group.rank()
    optimizer = holmes.DistributedOptimizer(
        list(pipeline.parts.values()),
        torch.optim.SGD,
        lr=0.1,
        momentum=0.5,
        group=data_group,
        bucket_bytes=256,
        step_in_backward=in_backward,
    )
    for step in range(STEPS):
        inputs, target, kwargs = both.data(step)
        inputs, target = (each.chunk(2)[replica] for each in (inputs, target))
        total = torch.tensor(pipeline.run(inputs, target, kwargs))
        if step == 1:
            pipeline.run(inputs, target, kwargs, run=pipeline.schedule.eval)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        for number, part in pipeline.parts.items():
            record.keep(step, number, part)
        dist.all_reduce(total)
        record.losses.append(total.item() / 2)
    optimizer.close()
    record.tensors = {name: value for name, value in record.tensors.items() if not name.endswith(".grad")}
    return record


def two_by_two(rank, size, store):
    """Two pipelines of two ranks, whose gradients and parameters DistributedOptimizer moves."""
    warnings.simplefilter("ignore")
    init(store, rank, size)
    pipelines = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    replicas = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    wrong = {}
    for name in ("plain", "first layers frozen", "tied weights", "uneven micro-batches"):
        program = PROGRAMS[name]
        both = Program(program.parts, program.loss, 2 * program.batch, 2 * program.micro_batches)
        expected = train_alone(both, keeps_before_step=False)
        for schedule in SCHEDULES:
            for in_backward in (True, False):
                record = train_with_optimizer(
                    program, both, schedule, pipelines[rank // 2], replicas[rank % 2], in_backward
                )
                wrong[name, schedule, in_backward] = differences(record, expected)
    return wrong


def test_distributed_optimizer():
    for wrong in run_ranks(two_by_two, 4):
        assert not {case: told for case, told in wrong.items() if told}


def wrap_in_ddp(module, group):
    return DistributedDataParallel(module, process_group=group)


def wrap_in_fsdp(module, group):
    return fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu"))


def train_wrapped(program, both, schedule, group, data_group, wrap):
    pipeline = Pipeline(program, schedule, "holmes", group, lambda module: wrap(module, data_group))
    optimizer, record = sgd(list(pipeline.parts.values())), Record()
    for step in range(STEPS):
        inputs, target, kwargs = both.data(step)
        pipeline.run(*(each.chunk(2)[data_group.rank()] for each in (inputs, target)), kwargs)
        for number, part in pipeline.parts.items():
            record.keep(step, number, part)
        optimizer.step()
        optimizer.zero_grad()
    whole = {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in record.tensors.items()
    }
    return Record([], whole)


def two_by_two_wrapped(rank, size, store, wrap, names):
    """Two pipelines of two ranks, whose stages a wrapper of torch's makes data parallel."""
    warnings.simplefilter("ignore")
    init(store, rank, size)
    pipelines = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    replicas = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    wrong = {}
    for name in names:
        program = PROGRAMS[name]
        both = Program(program.parts, program.loss, 2 * program.batch, 2 * program.micro_batches)
        expected = train_alone(both)
        for schedule in SCHEDULES:
            record = train_wrapped(program, both, schedule, pipelines[rank // 2], replicas[rank % 2], wrap)
            wrong[name, schedule] = differences(record, expected)
    return wrong


@pytest.mark.parametrize(
    ("wrap", "names"),
    [(wrap_in_ddp, ["plain", "tied weights", "first layers frozen"]), (wrap_in_fsdp, ["plain", "tied weights"])],
)
def test_wrapped_stages(wrap, names):
    for wrong in run_ranks(two_by_two_wrapped, 4, wrap, names):
        assert not {case: told for case, told in wrong.items() if told}


def unfreeze(rank, size, store):
    """Parameters of the first stage are trained from the second step on: refused there, until the schedule is new."""
    init(store, rank, size)
    program = Program(parts_of())
    pipeline = Pipeline(program, "zb-h1", "holmes")
    if rank == 0:
        pipeline.stages[0].submod.requires_grad_(False)
    pipeline.run(*program.data(0))
    gradients = [p.grad is not None for part in pipeline.parts.values() for p in part.parameters()]
    pipeline.stages[0].submod.requires_grad_(True)
    output = torch.zeros(2, WIDTH, requires_grad=True)
    told = error_of(pipeline.stages[0]._check_outputs, 0, (output,)) if rank == 0 else None
    for wrong in (0, -4, 1.5):
        with pytest.raises(ValueError, match=f"micro_batches={wrong} must be a whole number, 1 or more"):
            holmes.pipeline_schedule(make_plan("1f1b", size, 4), pipeline.stages, program.loss, micro_batches=wrong)
    pipeline.schedule = holmes.pipeline_schedule(make_plan("1f1b", size, 4), pipeline.stages, program.loss)
    pipeline.run(*program.data(0))
    after = [p.grad is not None for part in pipeline.parts.values() for p in part.parameters()]
    return gradients, told, after


def test_unfrozen_stage_needs_a_new_schedule():
    (first, told, first_after), (second, _, second_after) = run_ranks(unfreeze, 2)
    assert not any(first)
    assert all(second)
    assert "output 0 of stage 0 requires a gradient" in told
    assert "new schedule" in told
    assert all(first_after)
    assert all(second_after)


def hear_hooks(rank, size, store):
    """How often the hooks of parameters run in a step of zb-h1."""
    init(store, rank, size)
    pipeline, heard = Pipeline(PROGRAMS["tied weights"], "zb-h1", "holmes"), Counter()
    for part in pipeline.parts.values():
        for parameter in part.parameters():
            parameter.register_post_accumulate_grad_hook(lambda heard_of: heard.update([heard_of]))
    pipeline.run(*PLAIN.data(0))
    return set(heard.values())


def test_hooks_of_parameters_run_once_a_micro_batch():
    assert run_ranks(hear_hooks, 2) == [{4}] * 2


def use_torchs_schedule(rank, size, store):
    """torch's own class cannot hear of sizes: what would not fit does not leave."""
    init(store, rank, size)
    stage = holmes.PipelineStage(torch.nn.Linear(WIDTH, WIDTH), rank, size, group=dist.group.WORLD)
    schedule = pipelining.ScheduleGPipe(stage, 4, loss_fn=lambda output, target: (output - target).square().mean())
    inputs, target = torch.ones(10, WIDTH), torch.zeros(10, WIDTH)
    try:
        schedule.step(*([inputs] if rank == 0 else []), target=target if rank else None)
    except Exception as error:
        return str(error)
    return None


def test_uneven_micro_batches_in_torchs_own_schedule_name_the_way_out():
    told = run_ranks(use_torchs_schedule, 2)[0]
    assert "output 0 of stage 0" in told
    assert "holmes.pipeline_schedule" in told


def change_under_options(rank, size, store):
    """Sizes change under example tensors too, and where receives are not posted ahead."""
    warnings.simplefilter("ignore")
    init(store, rank, size)
    program, wrong = Program(parts_of(), batches=(8, 10, 7)), {}
    expected = train_alone(program)
    example = torch.zeros(2, WIDTH, requires_grad=True)
    for way, options in {
        "examples": {"input_args": example, "output_args": example},
        "torch's order": {"posts_ahead": False},
    }.items():
        for schedule in SCHEDULES:
            pipeline, record = Pipeline(program, schedule, "holmes", **options), Record()
            optimizer = sgd(list(pipeline.parts.values()))
            for step in range(STEPS):
                pipeline.run(*program.data(step))
                for number, part in pipeline.parts.items():
                    record.keep(step, number, part)
                optimizer.step()
                optimizer.zero_grad()
            wrong[schedule, way] = differences(record, expected)
    return wrong


def test_sizes_change_under_examples():
    for wrong in run_ranks(change_under_options, 2):
        assert not {case: told for case, told in wrong.items() if told}


def use_untold_ranks(rank, size, store):
    """As on a GPU, whose messages may be NCCL's: only one size at a time, of steps and of evaluations."""
    init(store, rank, size)
    pipeline, told = Pipeline(PLAIN, "1f1b", "holmes"), []
    pipeline.schedule._announcer.can_tell = False
    for batch, run in ((8, pipeline.schedule.step), (4, pipeline.schedule.eval), (8, pipeline.schedule.step)):
        told.append(error_of(pipeline.run, torch.ones(batch, WIDTH), torch.zeros(batch, WIDTH), {}, run))
    if rank == 0:
        told.append(error_of(pipeline.schedule.step, torch.ones(10, WIDTH)))
        told.append(error_of(pipeline.schedule.step, torch.ones(12, WIDTH)))
    return told


def test_sizes_where_ranks_cannot_be_told():
    first, second = run_ranks(use_untold_ranks, 2)
    assert first[:3] == second == [None] * 3
    assert all("micro_batches=4" in told and "drop_last" in told for told in first[3:])
