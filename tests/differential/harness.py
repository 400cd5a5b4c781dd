"""Runs training programs on ranks, and compares their losses and parameters at every step with plain torch alone."""

import contextlib
import faulthandler
import gc
import json
import logging
import math
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).parent.parent / "helpers"))
from torch_ranks import init, run_ranks

import holmes

PLAIN, OURS, DEFERRED, UNWATCHED, DDP, FSDP2 = "plain", "ours", "deferred", "unwatched", "ddp", "fsdp2"
#: `unwatched` is ours, whose parameters nobody reads before the end: watching them would wait for every all-gather.
OUR_VARIANTS = (OURS, DEFERRED, UNWATCHED)
VARIANTS = (*OUR_VARIANTS, DDP, FSDP2)
WIDTH, ROWS = 6, 8
BUCKET_BYTES = 512
DEADLINE_S = 20.0  # of the groups: a rank that waits for another longer than this has failed
LIMIT_S = 60.0  # of a job: longer is a hang, and the process ends with every thread's stack in its log
TOLERANCES = {
    torch.float64: {"rtol": 1e-7, "atol": 1e-9},
    torch.float32: {"rtol": 2e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-3},
    torch.float16: {"rtol": 2e-3, "atol": 2e-4},
}
#: Plain torch adds up the gradients of all ranks in the parameters' own precision, ours in reduce_dtype.
LOW = (torch.bfloat16, torch.float16)
#: To run against versions where parameters had to be waited for by hand: shows what else is wrong with them.
WAITS_BY_HAND = bool(os.environ.get("HOLMES_DIFFERENTIAL_SYNCHRONIZE"))


class MasterOptimizer:
    """What ours promises for 16-bit parameters, on one process: `optimizer_class` steps float32 copies of them.

    A parameter that was changed from outside is taken over; the others keep the bits of their copies.
    """

    def __init__(self, optimizer_class, groups, **settings):
        self.parameters, copies = [], []
        for group in groups:
            self.parameters.extend(group["params"])
            copies.append({**group, "params": [p.detach().float() for p in group["params"]]})
        self.inner = optimizer_class(copies, **settings)
        self.masters = [p for group in copies for p in group["params"]]

    @property
    def param_groups(self):
        return self.inner.param_groups

    @torch.no_grad()
    def step(self):
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            kept = master.to(parameter.dtype) == parameter
            master.copy_(torch.where(kept, master, parameter.float()))
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.inner.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)

    def zero_grad(self, set_to_none=True):
        assert set_to_none
        for parameter in self.parameters:
            parameter.grad = None


@dataclass
class Env:
    """What a program trains with. `share` of the ranks' data is this rank's; the plain variant has all of it."""

    variant: str
    rank: int = 0
    size: int = 1
    groups: tuple = (None, None)  # the group, and one for the first optimizer's all-gathers; None: as many as it makes
    same_data: bool = False  # every rank has the whole batch: their gradients are equal, not only their mean
    dtype: torch.dtype = torch.float64
    losses: list = field(default_factory=list)
    trace: list = field(default_factory=list)
    watched: list = field(default_factory=list)
    optimizers: list = field(default_factory=list)

    @property
    def group(self):
        return self.groups[0]

    @property
    def is_plain(self):
        return self.variant == PLAIN

    @property
    def is_ours(self):
        return self.variant in OUR_VARIANTS

    # --- data ---

    def share(self, tensor):
        return tensor if self.is_plain or self.same_data else tensor.chunk(self.size)[self.rank]

    def batch(self, step, *shapes, rows=ROWS):
        """Normal tensors of `rows` x shape each, this rank's share."""
        generator = torch.Generator().manual_seed(100 + step)
        shapes = shapes or ((WIDTH,), (WIDTH,))
        tensors = [torch.randn(rows, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
        return [self.share(t.to(self.dtype)) for t in tensors]

    def parts(self, *tensors):
        """(rank, its part of each of `tensors`) for every rank that this process plays."""
        if not self.is_plain:
            return [(self.rank, *tensors)]
        if self.same_data:
            return [(rank, *tensors) for rank in range(self.size)]
        return list(zip(range(self.size), *(t.chunk(self.size) for t in tensors), strict=True))

    def seeded(self, build):
        """The model that `build()` makes, equal everywhere."""
        torch.manual_seed(0)
        return build().to(self.dtype)

    # --- what differs between the variants ---

    def wrap(self, model, **options):
        if self.variant == DDP:
            return nn.parallel.DistributedDataParallel(
                model, process_group=self.group, bucket_cap_mb=BUCKET_BYTES / 2**20, **options
            )
        if self.variant == FSDP2:
            return self._sharded(model)
        return model

    def _sharded(self, model):
        from torch.distributed.fsdp import fully_shard

        mesh = dist.device_mesh.DeviceMesh.from_group(self.group, "cpu")
        for child in model.children():
            if any(True for _ in child.parameters()) and not isinstance(child, nn.ParameterList | nn.ModuleList):
                fully_shard(child, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def model(self, build, **options):
        return self.wrap(self.seeded(build), **options)

    def optimizer(self, model, optimizer_class=torch.optim.SGD, *, params=None, clip=None, ours=None, **settings):
        """`params`: model -> what the optimizer takes. `ours`: arguments that only ours has."""
        groups = params(bare(model)) if params else None
        if self.is_ours:
            options = {"bucket_bytes": BUCKET_BYTES, "group": self.group, "max_grad_norm": clip, **(ours or {})}
            if self.variant == DEFERRED:
                options["step_in_backward"] = False
            elif not self.optimizers:
                options["gather_group"] = self.groups[1]
            made = holmes.DistributedOptimizer(model, optimizer_class, params=groups, **options, **settings)
            self.optimizers.append(made)
            return made
        groups = groups or [p for p in model.parameters() if p.requires_grad]
        if self.dtype.itemsize == 2 and self.is_plain:
            groups = groups if isinstance(groups[0], dict) else [{"params": groups}]
            return MasterOptimizer(optimizer_class, groups, **settings)
        made = optimizer_class(groups, **settings)
        if clip is not None:
            made.register_step_pre_hook(lambda *_: _clip(made, clip))
        return made

    def no_sync(self, model, optimizer):
        """Around all backward passes but the last one before a step."""
        if self.is_ours:
            return optimizer.no_sync()
        if self.variant == DDP:
            return model.no_sync()
        return _unsynchronized(model) if self.variant == FSDP2 else contextlib.nullcontext()

    def scale(self, optimizer, loss):
        return optimizer.scale(loss) if self.is_ours else loss

    def all_reduce(self, tensor):
        """The mean over the ranks, in place."""
        if not self.is_plain:
            dist.all_reduce(tensor, group=self.group)
            tensor /= self.size
        return tensor

    # --- what is compared ---

    def record(self, loss, *models):
        """The step is over: `loss` is the mean over this process's share."""
        self.losses.append(loss.detach().double().clone())
        self.watched = models or self.watched
        if self.variant != UNWATCHED:
            self.trace.append(self._values())

    def _values(self):
        if WAITS_BY_HAND:
            for optimizer in self.optimizers:
                optimizer.synchronize()
        return {f"{i}.{name}": _full(t) for i, m in enumerate(self.watched) for name, t in _named(bare(m))}

    def finish(self):
        """(losses, parameters and buffers after each step; after the last one only where nobody watched)."""
        losses = torch.stack(self.losses) if self.losses else torch.zeros(0)
        self.all_reduce(losses)
        if self.variant == UNWATCHED:
            self.trace = [None] * (len(self.losses) - 1) + [self._values()]
        for optimizer in self.optimizers:
            optimizer.close()
        return losses.tolist(), self.trace


def bare(model):
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _named(model):
    yield from model.named_parameters()
    yield from model.named_buffers()


def _full(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def _clip(optimizer, norm):
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], norm)


@contextlib.contextmanager
def _unsynchronized(model):
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def compare(actual, expected, tolerance):
    """Raises AssertionError at the first step that differs."""
    losses, trace = actual
    wanted_losses, wanted = expected
    assert len(losses) == len(wanted_losses), f"{len(losses)} steps recorded, plain torch has {len(wanted_losses)}"
    for step in range(len(losses)):
        limit = tolerance["atol"] + tolerance["rtol"] * abs(wanted_losses[step])
        error = abs(losses[step] - wanted_losses[step])
        are_same = losses[step] == wanted_losses[step] or (math.isnan(losses[step]) and math.isnan(wanted_losses[step]))
        if not are_same and not error <= limit:
            raise AssertionError(f"step {step}: loss {losses[step]:.9g}, plain torch {wanted_losses[step]:.9g}")
        if trace[step] is not None:
            _compare_values(step, trace[step], wanted[step], tolerance)


def _compare_values(step, values, wanted, tolerance):
    assert values.keys() == wanted.keys(), f"step {step}: {sorted(values.keys() ^ wanted.keys())} on one side only"
    for name, tensor in values.items():
        expected = wanted[name]
        atol = tolerance["atol"]
        if (
            expected.dtype in LOW and expected.numel()
        ):  # a rounded gradient shifts small elements by a share of the large
            atol *= max(1.0, expected.nan_to_num(0.0, 0.0, 0.0).abs().max().item())
        if not torch.allclose(tensor, expected, rtol=tolerance["rtol"], atol=atol, equal_nan=True):
            worst = (tensor.double() - expected.double()).abs().max().item()
            raise AssertionError(
                f"step {step}: {name} differs from plain torch by {worst:.3g}, of {expected.abs().max().item():.3g}"
            )


# --- jobs: what runs in the rank processes ---


@dataclass(frozen=True)
class Job:
    """`program` of `table`, a module that has `program_of(name)`, in one variant."""

    table: str
    program: str
    variant: str

    def __str__(self):
        return f"{self.program}[{self.variant}]"


@dataclass(frozen=True)
class Program:
    """A training program and what is expected of it, see programs.py."""

    name: str
    train: object
    variants: tuple = VARIANTS
    ranks: tuple = (1, 2, 4)
    same_data: bool = False
    dtype: torch.dtype = torch.float64
    tolerance: dict | None = None
    error: str | None = None  # what ours says, instead of training
    is_slow: bool = False

    def __post_init__(self):
        object.__setattr__(self, "tolerance", self.tolerance or TOLERANCES[self.dtype])

    def env(self, variant, rank=0, size=1, groups=(None, None)):
        return Env(variant, rank, size, groups, self.same_data, self.dtype)


@dataclass(frozen=True)
class Outcome:
    job: Job
    error: str = ""  # empty: it went as it should
    seconds: float = 0.0
    steps: int = 0


_references: dict = {}


def reference(program, size):
    key = (program.name, size)
    if key not in _references:
        _references.clear()  # jobs of one program follow each other
        env = program.env(PLAIN, size=size)
        program.train(env)
        _references[key] = env.finish()
    return _references[key]


def run_job(program, variant, rank, size, groups):
    """How many steps it took. Raises where something differs, or another error than the expected one comes."""
    env = program.env(variant, rank, size, groups)
    if program.error is None or not env.is_ours:
        expected = reference(program, size)
        program.train(env)
        compare(env.finish(), expected, program.tolerance)
        return len(env.losses)
    try:
        program.train(env)
    except Exception as error:
        if not re.search(program.error, str(error)):
            raise AssertionError(f"expected an error with {program.error!r}") from error
        return len(env.losses)
    raise AssertionError(f"no error; expected one with {program.error!r}")


class Groups:
    """Of the jobs that must succeed, the same two; one that must fail has its own."""

    def __init__(self):
        self.shared = None

    @contextlib.contextmanager
    def of(self, program):
        if program.error is None:
            self.shared = self.shared or (_new_group(), _new_group())
            yield self.shared
            return
        yield _new_group(), None  # not destroyed: something may still be under way in it
        gc.collect()  # an optimizer that failed went with its exception


def _new_group():
    return dist.new_group(timeout=timedelta(seconds=DEADLINE_S))


def _attempt(job, rank, size, groups):
    """(error text, steps)"""
    program = __import__(job.table).program_of(job.program)
    try:
        with groups.of(program) as own:
            return "", run_job(program, job.variant, rank, size, own)
    except Exception as error:
        cause = "".join(traceback.format_exception(error, limit=-6, chain=True))
        return f"{type(error).__name__}: {error}\n{cause}", 0


def serve(rank, size, store, jobs, folder, until):
    """A rank: runs `jobs` in order, writes how each went, and stops at the first that failed on any rank."""
    init(store, rank, size, timeout_s=DEADLINE_S)
    warnings.simplefilter("ignore")
    logging.getLogger("holmes").setLevel(logging.ERROR)
    groups = Groups()
    with open(f"{folder}/{rank}.jsonl", "a", buffering=1) as log, open(f"{folder}/{rank}.stacks", "w") as stacks:
        for number, job in enumerate(jobs):
            if rank == 0:
                store.set(f"go {number}", "" if time.time() < until else "over")
            if store.get(f"go {number}"):
                break
            began = time.monotonic()
            faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=stacks)
            error, steps = _attempt(job, rank, size, groups)
            faulthandler.cancel_dump_traceback_later()
            row = {"number": number, "error": error, "seconds": time.monotonic() - began, "steps": steps}
            log.write(json.dumps(row) + "\n")
            if not _all_well(store, number, rank, size, error):
                break
    return True


def _all_well(store, number, rank, size, error):
    store.set(f"done {number} {rank}", "bad" if error else "ok")
    keys = [f"done {number} {r}" for r in range(size)]
    store.wait(keys, timedelta(seconds=LIMIT_S))
    return all(store.get(key) == b"ok" for key in keys)


def run_jobs(jobs, size, *, seconds=600.0, on_outcome=None):
    """The outcome of each job on `size` ranks that began within `seconds`. A failure ends the processes."""
    outcomes, left, until = [], list(jobs), time.time() + seconds
    while left and time.time() < until:
        with tempfile.TemporaryDirectory() as folder:
            crash = ""
            try:
                run_ranks(serve, size, left, folder, until, timeout_s=until - time.time() + LIMIT_S + 40)
            except AssertionError as error:
                crash = f"{error}\n{_stacks(folder, size)}"
            ended = _outcomes(left, folder, size, crash)
        if not ended:
            break
        for outcome in ended:
            outcomes.append(outcome)
            if on_outcome is not None:
                on_outcome(outcome)
        left = left[len(ended) :]
    return outcomes


def _stacks(folder, size):
    texts = [Path(f"{folder}/{rank}.stacks") for rank in range(size)]
    return "\n".join(
        f"rank {i}: {p.read_text()[:3000]}" for i, p in enumerate(texts) if p.exists() and p.stat().st_size
    )


def _outcomes(jobs, folder, size, crash):
    logs = [Path(f"{folder}/{rank}.jsonl") for rank in range(size)]
    rows = [[json.loads(line) for line in log.read_text().splitlines()] if log.exists() else [] for log in logs]
    ended = []
    for number, reports in enumerate(zip(*rows, strict=False)):
        errors = [f"rank {rank}: {report['error']}" for rank, report in enumerate(reports) if report["error"]]
        slowest = max(report["seconds"] for report in reports)
        ended.append(Outcome(jobs[number], "\n".join(errors), slowest, reports[0]["steps"]))
    if crash and not (ended and ended[-1].error) and len(ended) < len(jobs):
        told = [f"rank {r}: {log[len(ended)]['error']}" for r, log in enumerate(rows) if len(log) > len(ended)]
        ended.append(Outcome(jobs[len(ended)], "\n".join(["crash or hang: " + crash, *told])))
    return ended
