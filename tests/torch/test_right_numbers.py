"""Ways to write a training step with which DistributedOptimizer once gave wrong numbers, hung or failed obscurely.

Each is trained over two ranks and compared with one process, or must say what is wrong. The ranks run once for all
tests of this file; a test looks at what its check found.
"""

import copy
import io
import logging
import os
import tempfile
import time
import traceback
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch_ranks import init, run_ranks  # noqa: E402

import holmes  # noqa: E402

SIZE, BATCH, WIDTH = 2, 8, 6
TIMEOUT_S = 30.0
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def net(dtype=torch.float64, depth=4):
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers).to(dtype)


def batch(step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(2, BATCH, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


class Job:
    """One training: alone (rank None: plain torch and the whole batch), or this rank's part of it with Holmes."""

    def __init__(self, rank, make=net, optimizer_class=torch.optim.Adam, early=True, **arguments):
        self.rank, self.model = rank, make()
        self.is_plain = rank is None
        arguments = arguments or {"lr": 0.02}
        if self.is_plain:
            self.optimizer = optimizer_class(self.model.parameters(), **arguments)
        else:
            self.optimizer = holmes.DistributedOptimizer(
                self.model, optimizer_class, bucket_bytes=256, step_in_backward=early, **arguments
            )
        self.dtype = next(self.model.parameters()).dtype

    def share(self, step):
        inputs, targets = batch(step, self.dtype)
        return (inputs, targets) if self.is_plain else (inputs.chunk(SIZE)[self.rank], targets.chunk(SIZE)[self.rank])

    def loss(self, step):
        inputs, targets = self.share(step)
        return nn.functional.mse_loss(self.model(inputs), targets)

    def close(self):
        if not self.is_plain:
            self.optimizer.close()

    @property
    def has_error(self):
        """Whether this one must notice what plain torch allows."""
        return not self.is_plain


def same(rank, program, steps=8, tolerance=1e-9, **options):
    """`program(job, step)` must end every step with plain torch's parameters, read as any code reads them."""
    for early in (True, False):
        plain, ours = Job(None, **options), Job(rank, early=early, **options)
        for step in range(steps):
            for job in (plain, ours):
                program(job, step)
            for expected, got in zip(plain.model.parameters(), ours.model.parameters(), strict=True):
                torch.testing.assert_close(
                    got.detach(), expected.detach(), rtol=tolerance, atol=tolerance, msg=f"step {step}".__add__
                )
        if early:
            assert ours.optimizer._runtime.is_early or ours.optimizer._runtime._redone, "nothing was stepped early"
        ours.close()


def plain_step(job, step):
    job.optimizer.zero_grad()
    job.loss(step).backward()
    job.optimizer.step()
    job.optimizer.zero_grad()


def raises(match, function):
    with pytest.raises((RuntimeError, TypeError, ValueError), match=match) as caught:
        function()
    return caught.value


# 1: 16-bit parameters changed from outside


@check
def masters_follow_load_state_dict(rank):
    other = net(torch.bfloat16)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)

    def program(job, step):
        plain_step(job, step)
        if step == 3:
            job.model.load_state_dict(other.state_dict())
            for got, expected in zip(job.model.parameters(), other.parameters(), strict=True):
                assert torch.equal(got, expected)
        if step == 5:
            job.model[0].weight.data.zero_()
        if step > 3:
            for got, expected in zip(job.model.parameters(), other.parameters(), strict=True):
                close = got is job.model[0].weight or (got - expected).abs().max() < 0.2
                assert close, "the step undid what was loaded"
        if step >= 5:
            assert job.model[0].weight.abs().max() < 0.1, "what was zeroed came back"

    for early in (True, False):
        job = Job(rank, lambda: net(torch.bfloat16), early=early)
        for step in range(7):
            program(job, step)
        job.close()


# 2: .data replaced, other parameters, other dtypes


@check
def data_replaced(rank):
    def program(job, step):
        plain_step(job, step)
        if step in (2, 4):
            for p in job.model.parameters():
                p.data = p.data.clone() * 0.9

    same(rank, program)


@check
def data_replaced_between_backward_and_step(rank):
    def program(job, step):
        job.optimizer.zero_grad()
        job.loss(step).backward()
        if step in (2, 4):
            for p in job.model.parameters():
                p.data = p.data.add(p.data, alpha=-0.1)
        if step == 5:
            for p in job.model.parameters():
                p.data.mul_(0.9)
        job.optimizer.step()

    same(rank, program)


@check
def assigned_parameters_are_refused(rank):
    job = Job(rank)
    for step in range(2):
        plain_step(job, step)
    job.model.load_state_dict(net().state_dict(), assign=True)
    raises("'0.weight' of the model is another tensor now.*without assign", lambda: plain_step(job, 2))
    job.close()


@check
def another_dtype_is_refused(rank):
    job = Job(rank)
    for step in range(2):
        plain_step(job, step)
    job.model.to(torch.float32)
    job.dtype = torch.float32
    raises(r"'6.bias' has dtype torch.float32 now, but torch.float64|'\d.\w+' has dtype", lambda: plain_step(job, 2))
    job.close()


# 3: weights that are still in use


class Detached(nn.Module):
    """The first operation uses a later layer's weight, detached: it is needed to the end of backward."""

    def __init__(self):
        super().__init__()
        self.first, self.body = nn.Linear(WIDTH, WIDTH).double(), net()

    def forward(self, x):
        return self.body(torch.tanh(self.first(x @ self.body[6].weight.detach())))


def detached():
    torch.manual_seed(0)
    return Detached()


@check
def detached_weights_in_an_earlier_operation(rank):
    same(rank, plain_step, make=detached)


@check
def second_loss_through_the_model_under_no_grad(rank):
    def program(job, step):
        job.optimizer.zero_grad()
        job.loss(step).backward()
        with torch.no_grad():
            target = job.model(job.share(step)[0])
        (job.share(step)[1] * target).sum()
        time.sleep(0.01)
        with torch.no_grad():
            assert torch.equal(job.model(job.share(step)[0]), target)
        job.optimizer.step()

    same(rank, program)


@check
def gradient_of_inputs_after_backward(rank):
    def program(job, step):
        job.optimizer.zero_grad()
        inputs, targets = job.share(step)
        inputs = inputs.clone().requires_grad_()
        loss = nn.functional.mse_loss(job.model(inputs), targets)
        (before,) = torch.autograd.grad(loss, inputs, retain_graph=True)
        loss.backward(retain_graph=True)
        time.sleep(0.01)
        (after,) = torch.autograd.grad(loss, inputs)
        assert torch.equal(before, after)
        job.optimizer.step()

    same(rank, program)


@check
def backward_after_step_is_an_error_as_in_torch(rank):
    for job in (Job(None), Job(rank)):
        for step in range(3):
            plain_step(job, step)
        job.optimizer.zero_grad()
        loss = job.loss(3)
        loss.backward(retain_graph=True)
        job.optimizer.step()
        raises("modified by an inplace operation", loss.backward)
        job.optimizer.zero_grad()
        job.close()


@check
def lr_set_between_backward_and_step(rank):
    def program(job, step):
        job.optimizer.zero_grad()
        job.loss(step).backward()
        job.optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)
        job.optimizer.step()

    same(rank, program)
    same(rank, program, optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9)


@check
def gradients_dropped_after_backward(rank):
    def program(job, step):
        job.optimizer.zero_grad()
        job.loss(step).backward()
        if step % 3 == 2:
            job.optimizer.zero_grad()
            return
        if step % 3 == 1:
            job.model.zero_grad()
            job.loss(step + 50).backward()
        if step == 6:
            job.model.zero_grad()  # and nothing to step with
        job.optimizer.step()

    same(rank, program)


# 4: checkpoints with parameters that had no gradient yet


class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.late, self.uses_late = net(), nn.Linear(WIDTH, WIDTH).double(), False

    def forward(self, x):
        x = self.body(x)
        return x + self.late(x) if self.uses_late else x


def late():
    torch.manual_seed(0)
    return Late()


def resume(rank, optimizer_class, arguments):
    def run(job, steps):
        for step in steps:
            job.model.uses_late = step >= 4
            plain_step(job, step)

    plain, first = Job(None, late, optimizer_class, **arguments), Job(rank, late, optimizer_class, **arguments)
    run(plain, range(8))
    run(first, range(3))
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save(
        {"model": first.model.state_dict(), "optimizer": first.optimizer.state_dict()}, checkpoint_id=Path(folder[0])
    )
    first.close()
    second = Job(rank, late, optimizer_class, **arguments)
    state = {"model": second.model.state_dict(), "optimizer": second.optimizer.state_dict()}
    dcp.load(state, checkpoint_id=Path(folder[0]))
    second.model.load_state_dict(state["model"])
    second.optimizer.load_state_dict(state["optimizer"])
    run(second, range(3, 8))
    for expected, got in zip(plain.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(got.detach(), expected.detach(), rtol=1e-9, atol=1e-9)
    second.close()


@check
def resume_with_parameters_that_were_unused(rank):
    resume(rank, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5})
    resume(rank, torch.optim.NAdam, {"lr": 0.02})
    resume(rank, torch.optim.ASGD, {"lr": 0.1})
    resume(rank, torch.optim.AdamW, {"lr": 0.02})


# 6: gradients and parameters used from outside


@check
def gradients_that_were_sent_say_so(rank):
    job = Job(rank)
    plain_step(job, 0)
    job.loss(1).backward()
    named = r"gradient of '\d.(weight|bias)'.*has been sent.*max_grad_norm"
    raises(named, lambda: nn.utils.clip_grad_norm_(job.model.parameters(), 1.0))
    raises(named, lambda: nn.utils.clip_grad_value_(job.model.parameters(), 1.0))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    raises(named, lambda: scaler.unscale_(job.optimizer))
    raises(named, lambda: [p.grad.norm() for p in job.model.parameters()])
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.loss(2).backward()
    job.model[0].weight.grad = torch.zeros_like(job.model[0].weight)
    raises("grad of parameter '0.weight' was set between backward and step", job.optimizer.step)
    plain_step(job, 3)
    job.close()


@check
def parameters_used_right_after_step(rank):
    averages = {}

    def program(job, step):
        plain_step(job, step)
        average = averages.setdefault(id(job), copy.deepcopy(job.model))
        with torch.no_grad():
            for kept, p in zip(average.parameters(), job.model.parameters(), strict=True):
                kept.lerp_(p, 0.1)
            for p in job.model.parameters():
                p.clamp_(-0.5, 0.5)
            job.model[2].weight.data.mul_(0.99)
            torch._foreach_mul_([job.model[4].weight, job.model[4].bias], 0.98)
        if step == 7:
            job.average = [p.detach().clone() for p in average.parameters()]

    same(rank, program)


# 8 to 10: hangs and dead groups


@check
def forward_without_grad_between_backward_and_step(rank):
    def program(job, step):
        job.optimizer.zero_grad()
        job.loss(step).backward()
        if rank == 0:
            time.sleep(0.002 * (step % 3))
        with torch.no_grad():
            job.loss(step + 1)
        job.optimizer.step()

    same(rank, program, steps=40)


class FailsOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise ArithmeticError("backward failed here")
        return gradient, None


@check
def an_error_of_one_ranks_backward(rank):
    for early in (True, False):
        job = Job(rank, early=early)
        for step in range(6):
            plain_step(job, step)
        kept = [p.detach().clone() for p in job.model.parameters()]
        hidden = job.model[:4](job.share(6)[0])
        loss = job.model[4:](FailsOnce.apply(hidden, rank == 1)).sum()
        started = time.monotonic()
        if rank == 1:
            with pytest.raises(ArithmeticError):
                loss.backward()
            job.optimizer.zero_grad()
        else:
            loss.backward()
            raises("rank 1 of this group dropped the gradients of this step", job.optimizer.step)
        assert time.monotonic() - started < TIMEOUT_S / 3
        for before, p in zip(kept, job.model.parameters(), strict=True):
            assert torch.equal(before, p)
        for step in range(6, 9):
            plain_step(job, step)
        job.close()


class SomeRanks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.some = net(), nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x, uses_some):
        x = self.body(x)
        return x + self.some(x) if uses_some else x


def some_ranks():
    torch.manual_seed(0)
    return SomeRanks()


@check
def unused_on_some_ranks_and_a_collective_of_the_trainer(rank):
    for early in (True, False):
        plain, ours = Job(None, some_ranks), Job(rank, some_ranks, early=early)
        for step in range(6):
            plain.optimizer.zero_grad()
            (inputs, targets), total = plain.share(step), 0.0
            for r, (x, y) in enumerate(zip(inputs.chunk(SIZE), targets.chunk(SIZE), strict=True)):
                total += nn.functional.mse_loss(plain.model(x, (r + step) % 2 == 0), y) / SIZE
            total.backward()
            plain.optimizer.step()
            ours.optimizer.zero_grad()
            x, y = ours.share(step)
            loss = nn.functional.mse_loss(ours.model(x, (rank + step) % 2 == 0), y)
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            torch.testing.assert_close(mean / SIZE, total.detach())
            ours.optimizer.step()
            for expected, got in zip(plain.model.parameters(), ours.model.parameters(), strict=True):
                torch.testing.assert_close(got.detach(), expected.detach(), rtol=1e-9, atol=1e-9)
        ours.close()


# 12: sparse gradients


def sparse():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)).double()


@check
def sparse_gradients(rank):
    def program(job, step):
        job.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 50, (BATCH, 3), generator=generator)
        tokens = tokens if job.is_plain else tokens.chunk(SIZE)[rank]
        job.model(tokens).square().mean().backward()
        job.optimizer.step()

    same(rank, program, make=sparse, optimizer_class=torch.optim.SGD, lr=0.1)
    same(rank, program, make=sparse, optimizer_class=torch.optim.Adagrad, lr=0.1)


# 13: what recent trainers do


@check
def named_parameters_are_taken(rank):
    for named in (lambda m: m.named_parameters(), lambda m: [{"params": list(m.named_parameters()), "lr": 0.02}]):
        plain, model = Job(None), net()
        optimizer = holmes.DistributedOptimizer(model, torch.optim.Adam, params=named(model), lr=0.02, bucket_bytes=256)
        for step in range(3):
            plain_step(plain, step)
            inputs, targets = (t.chunk(SIZE)[rank] for t in batch(step))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        for expected, got in zip(plain.model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(got.detach(), expected.detach(), rtol=1e-9, atol=1e-9)
        optimizer.close()


@check
def models_and_parameters_can_be_saved_and_copied(rank):
    job = Job(rank)
    for step in range(3):
        plain_step(job, step)
    file, parameter = io.BytesIO(), io.BytesIO()
    torch.save(job.model, file)
    torch.save(job.model[0].weight, parameter)
    assert b"holmes" not in file.getvalue()
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    plain_step(job, 3)
    copied = copy.deepcopy(job.model)
    for p in copied.parameters():
        assert type(p) is nn.Parameter
    x = batch(0)[0]
    assert torch.equal(copied(x), job.model(x))
    assert loaded(x).shape == x.shape
    assert torch.equal(torch.load(io.BytesIO(parameter.getvalue()), weights_only=False), loaded[0].weight)
    raises("cannot be copied or pickled.*state_dict", lambda: copy.deepcopy(job.optimizer))
    raises("cannot be copied or pickled.*state_dict", lambda: torch.save(job.optimizer, io.BytesIO()))
    job.close()


@check
def hooks_that_are_registered_later(rank):
    def program(job, step):
        if step == 0:
            job.seen = []

            def halve(p):
                job.seen.append(p.grad.norm().item())
                p.grad.mul_(0.5)

            for p in job.model.parameters():
                p.register_post_accumulate_grad_hook(halve)
        plain_step(job, step)
        assert len(job.seen) == (step + 1) * len(list(job.model.parameters()))

    same(rank, program)


# 14: torch.compile


@check
def compiled_models(rank):
    for options in ({"fullgraph": True}, {}):
        graphs = []

        def backend(graph, _inputs, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        torch._dynamo.reset()
        plain, ours = Job(None), Job(rank)
        compiled = torch.compile(ours.model, backend=backend, **options)
        for step in range(6):
            plain_step(plain, step)
            inputs, targets = ours.share(step)
            ours.optimizer.zero_grad()
            nn.functional.mse_loss(compiled(inputs), targets).backward()
            ours.optimizer.step()
            for expected, got in zip(plain.model.parameters(), ours.model.parameters(), strict=True):
                torch.testing.assert_close(got.detach(), expected.detach(), rtol=1e-9, atol=1e-9)
        assert len(graphs) == 1, f"{len(graphs)} graphs"
        ours.close()


@check
def models_compiled_later(rank):
    for is_whole in (True, False):
        torch._dynamo.reset()
        plain, ours = Job(None), Job(rank)
        forward = ours.model
        for step in range(8):
            plain_step(plain, step)
            if step == 3 and is_whole:
                forward = torch.compile(ours.model, backend="eager", fullgraph=True)
            if step == 3 and not is_whole:
                for layer in ours.model:
                    layer.compile(backend="eager", fullgraph=True)
            inputs, targets = ours.share(step)
            ours.optimizer.zero_grad()
            nn.functional.mse_loss(forward(inputs), targets).backward()  # nobody reads a parameter before it
            ours.optimizer.step()
        for expected, got in zip(plain.model.parameters(), ours.model.parameters(), strict=True):
            torch.testing.assert_close(got.detach(), expected.detach(), rtol=1e-9, atol=1e-9)
        ours.close()


# 16: what is left behind, and first steps


@check
def close_gives_everything_back(rank):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    counts = []
    for _ in range(4):
        job = Job(rank)
        for step in range(2):
            plain_step(job, step)
        job.close()
        del job
        dist.barrier()
        counts.append(descriptors())
    closed = Job(rank)
    closed.close()
    raises("was closed; make a new one", closed.optimizer.step)
    assert min(counts[2:]) <= min(counts[:2]), counts


@check
def first_steps_of_other_kinds_keep_the_overlap(rank):
    def program(job, step):
        if step == 0:
            job.optimizer.step()
            job.loss(50).backward()
            job.optimizer.zero_grad()
        plain_step(job, step)
        if not job.is_plain and step == 6:
            job.loss(51).backward()
            runtime = job.optimizer._runtime
            assert len(runtime.reducer.transfers) == len(runtime.storages), "nothing was sent during backward"
            job.optimizer.zero_grad()

    same(rank, program)


class MyLBFGS(torch.optim.LBFGS):
    pass


class MyAdafactor(torch.optim.Adafactor):
    pass


class Whole(torch.optim.SGD):
    """As LAMB and LARS: the step depends on the norm of the whole parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad * p.norm() / p.grad.norm(), alpha=-group["lr"])


@check
def optimizers_of_whole_parameters_are_refused(rank):
    for cls in (MyLBFGS, MyAdafactor, Whole, torch.optim.SparseAdam):
        raises(f"{cls.__name__} needs whole parameters", lambda cls=cls: Job(rank, optimizer_class=cls, lr=0.1))
    matrix = nn.Linear(WIDTH, WIDTH, bias=False)
    raises("Muon needs whole parameters", lambda: holmes.DistributedOptimizer(matrix, torch.optim.Muon, lr=0.1))


@check
def parameters_that_share_memory_are_refused(rank):
    def shared():
        model = net()
        model[2].weight.data = model[0].weight.data
        return model

    job = Job(rank, shared)
    job.loss(0).backward()
    raises("'0.weight' and '2.weight' share memory.*one nn.Parameter", job.optimizer.step)
    job.close()


@check
def state_written_from_outside_is_refused(rank):
    job = Job(rank)
    plain_step(job, 0)
    weight = job.model[0].weight

    def write():
        job.optimizer.state[weight]["exp_avg"] = torch.zeros(1)

    raises("optimizer.state was read", write)
    raises("optimizer.state was written to", job.optimizer.state.clear)
    raises("optimizer.state was read", lambda: job.optimizer.state.get(weight))
    raises("get_state_dict does not know it", lambda: get_state_dict(job.model, job.optimizer))
    job.optimizer.state = {weight: {}}
    raises("optimizer.state was replaced", lambda: plain_step(job, 1))
    job.close()


# What a second trial from outside found


@check
def a_gradient_that_a_hook_drops_on_all_ranks_is_no_gradient(rank):
    """The parameter stays, in spite of momentum and weight decay."""
    step_of = [0]

    def drop(parameter):
        if step_of[0] % 2:
            parameter.grad = None

    def program(job, step):
        step_of[0] = step
        if step == 0:
            job.model[2].weight.register_post_accumulate_grad_hook(drop)
        plain_step(job, step)

    same(rank, program, optimizer_class=torch.optim.AdamW, lr=0.02, weight_decay=0.3)


@check
def weights_that_stand_in_through_data_are_put_back_before_step(rank):
    def program(job, step):
        job.optimizer.zero_grad()
        kept = [parameter.data for parameter in job.model.parameters()]
        if not job.is_plain:
            job.optimizer.synchronize()
        if step > 2:
            for parameter in job.model.parameters():
                parameter.data = parameter.data * 1.01
        job.loss(step).backward()
        for parameter, data in zip(job.model.parameters(), kept, strict=True):
            parameter.data = data
        job.optimizer.step()
        job.optimizer.zero_grad()

    same(rank, program)


@check
def averaged_weights_stand_in_through_data_for_a_backward(rank):
    averages = {}

    def program(job, step):
        plain_step(job, step)
        average = averages.setdefault(id(job), [parameter.detach().clone() for parameter in job.model.parameters()])
        for each, parameter in zip(average, job.model.parameters(), strict=True):
            each.lerp_(parameter.data, 0.3)
        kept = [parameter.data for parameter in job.model.parameters()]
        for each, parameter in zip(average, job.model.parameters(), strict=True):
            parameter.data = each
        inputs = batch(50)[0].requires_grad_()
        job.model(inputs).square().mean().backward()
        job.optimizer.zero_grad()
        for data, parameter in zip(kept, job.model.parameters(), strict=True):
            parameter.data = data

    same(rank, program)


@check
def a_step_in_inference_mode_is_a_step(rank):
    def program(job, step):
        job.optimizer.zero_grad()
        job.loss(step).backward()
        with torch.inference_mode():
            job.optimizer.step()

    same(rank, program)


@check
def a_child_forked_after_step_has_all_parameters(rank):
    job = Job(rank)
    for step in range(4):
        plain_step(job, step)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, b"%r" % float(sum(parameter.sum() for parameter in job.model.parameters())))
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as answer:
            seen = answer.read()
        os.waitpid(child, 0)
        assert float(seen) == float(sum(parameter.sum() for parameter in job.model.parameters()))
    job.close()


class SkipsBadParameters(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not parameter.grad.isfinite().all():
                    parameter.grad = None
        return super().step(closure)


@check
def what_ranks_would_do_differently_is_refused(rank):
    raises("SkipsBadParameters needs whole parameters", lambda: Job(rank, optimizer_class=SkipsBadParameters, lr=0.1))
    embedding = nn.Sequential(nn.Embedding(9, WIDTH, max_norm=1.0), nn.Linear(WIDTH, WIDTH))
    raises(r"'0.weight' .*max_norm=1.*renorm", lambda: Job(rank, lambda: embedding))
    raises("DistributedDataParallel.*ddp.module", lambda: Job(rank, lambda: DistributedDataParallel(net())))
    scripted = torch.jit.trace(net(torch.float32), torch.zeros(1, WIDTH))
    raises("torch.jit.*give the module", lambda: Job(rank, lambda: scripted))

    frozen = net()
    frozen[2].weight.requires_grad_(False)
    job = Job(rank, lambda: frozen)
    plain_step(job, 0)
    frozen[2].weight.requires_grad_(True)
    raises("'2.weight' was frozen", lambda: plain_step(job, 1))
    job.close()


@check
def what_nobody_averages_and_what_others_watch_is_warned_of(rank):
    def warnings_of(model, **options):
        heard, log = [], logging.getLogger("holmes.training.overlap.parameters")
        handler = logging.Handler()
        handler.emit = lambda record: heard.append(record.getMessage())
        log.addHandler(handler)
        job = Job(rank, lambda: model, lr=0.02, **options)
        plain_step(job, 0)
        log.removeHandler(handler)
        job.close()
        return "\n".join(heard)

    model = net()
    assert "'0.weight' first, get gradients but are in no DistributedOptimizer" in warnings_of(
        model, params=model[2:].parameters()
    )
    assert "memory shared with other processes" in warnings_of(net().share_memory())
    assert warnings_of(net()) == ""


def run_checks(rank, size, store, names):
    init(store, rank, size, timeout_s=TIMEOUT_S)
    found = {}
    for name in names:
        error = None
        try:
            CHECKS[name](rank)
        except BaseException:
            error = traceback.format_exc()
        # A rank that failed leaves others waiting: all begin the next check anew.
        failed = torch.tensor([error is not None], dtype=torch.int32)
        dist.all_reduce(failed)
        found[name] = error
        if failed.item():
            found.update({left: "not run: an earlier check failed" for left in names if left not in found})
            break
    return found


@pytest.fixture(scope="module")
def found():
    return run_ranks(run_checks, SIZE, list(CHECKS), timeout_s=170)


@pytest.mark.parametrize("name", CHECKS)
def test_right_numbers(found, name):
    for rank, of_rank in enumerate(found):
        assert of_rank[name] is None, f"rank {rank}: {of_rank[name]}"


def made_too_early(rank, size, store):
    model = net()
    optimizer = holmes.DistributedOptimizer(model, torch.optim.SGD, lr=0.1)
    init(store, rank, size, timeout_s=TIMEOUT_S)
    model(batch(0)[0]).sum().backward()
    raises("made before init_process_group.*2 ranks.*make it afterwards", optimizer.step)


def test_an_optimizer_that_was_made_before_the_group_says_so():
    run_ranks(made_too_early, SIZE)
