"""Training programs for pipelines of four parts: what each does, alone in a process and over stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

PARTS, WIDTH, STEPS = 4, 6, 3


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def dense(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


class Calls(nn.Module):
    """A forward given as a function of the module and its inputs."""

    def __init__(self, forward: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        for name, member in members.items():
            setattr(self, name, member)
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self, *args, **kwargs)


def vector(width: int = WIDTH) -> nn.Parameter:
    return nn.Parameter(torch.randn(width) / 2)


def parts_of(**special: Callable[[], nn.Module]) -> Callable[[], list[nn.Module]]:
    """Four parts: `dense` but for the `special` ones, p0=...p3=."""
    return lambda: [special.get(f"p{index}", dense)() for index in range(PARTS)]


def mean_square(output: Any, target: torch.Tensor) -> torch.Tensor:
    output = output[0] if isinstance(output, tuple) else output
    return (output - target).square().mean()


@dataclass
class Program:
    parts: Callable[[], list[nn.Module]]
    loss: Callable[..., torch.Tensor] = mean_square
    batch: int = 8
    micro_batches: int = 4
    makes_inputs: Callable[[int], torch.Tensor] = lambda batch: torch.randn(batch, WIDTH)
    makes_kwargs: Callable[[int], dict[str, torch.Tensor]] | None = None  # for every part
    batches: tuple[int, ...] = ()  # sizes by step; empty: `batch` always
    has_rng: bool = False  # parts draw from the default generator: one part per rank only
    inputs_require_grad: bool = False

    def data(self, step: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        generator = torch.get_rng_state()
        torch.manual_seed(100 + step)
        batch = self.batches[step % len(self.batches)] if self.batches else self.batch
        inputs, target = self.makes_inputs(batch), torch.randn(batch, WIDTH)
        kwargs = self.makes_kwargs(batch) if self.makes_kwargs else {}
        torch.set_rng_state(generator)
        return inputs.requires_grad_(self.inputs_require_grad), target, kwargs

    def make(self) -> list[nn.Module]:
        torch.manual_seed(7)
        return self.parts()


def as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


class Chain(nn.Module):
    """Several parts as one stage."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for part in self.parts:
            args = as_tuple(part(*args, **kwargs))
        return args[0] if len(args) == 1 else args


@dataclass
class Record:
    """What training showed: losses by step; gradients of every step and the state at the end by part and name."""

    losses: list[float] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def keep(self, step: int, part: int, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            self.tensors[f"step {step} part {part} {name}.grad"] = gradient.detach().clone()
        for name, value in module.state_dict().items():
            self.tensors[f"step {step} part {part} {name}"] = value.detach().clone()

    def keep_given(self, step: int, **given: torch.Tensor) -> None:
        for name, value in given.items():
            if value.requires_grad:
                gradient = torch.zeros_like(value) if value.grad is None else value.grad
                self.tensors[f"step {step} {name}.grad"] = gradient.detach().clone()


def sgd(parts: list[nn.Module]) -> torch.optim.Optimizer | None:
    trained = [p for part in parts for p in part.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.5) if trained else None


def differences(found: Record, expected: Record, tolerance: float = 1e-5) -> list[str]:
    """`found` may hold a part of what is `expected`."""
    told = []
    if found.losses and not torch.allclose(torch.tensor(found.losses), torch.tensor(expected.losses), 1e-4, tolerance):
        told.append(f"losses {found.losses} instead of {expected.losses}")
    for name, value in found.tensors.items():
        right = expected.tensors[name]
        if not torch.allclose(value.double(), right.double(), rtol=1e-4, atol=tolerance):
            told.append(f"{name}: {(value.double() - right.double()).abs().max():.2g} off")
    return told


class RngStreams:
    """One stream of random numbers for each part, as if each had a process of its own."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.states = [torch.get_rng_state() for _ in range(PARTS)]

    def run(self, part: int, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        torch.set_rng_state(self.states[part])
        output = module(*args, **kwargs)
        self.states[part] = torch.get_rng_state()
        return output


def keep_all(record: Record, step: int, parts: list[nn.Module]) -> None:
    for number, part in enumerate(parts):
        record.keep(step, number, part)


def train_alone(program: Program, keeps_before_step: bool = True) -> Record:
    parts, record = program.make(), Record()
    optimizer, streams = sgd(parts), RngStreams()
    for step in range(STEPS):
        inputs, target, kwargs = program.data(step)
        size, total = program.micro_batches, 0.0
        pieces = {name: value.tensor_split(size) for name, value in kwargs.items()}
        for index, (values, wanted) in enumerate(
            zip(inputs.tensor_split(size), target.tensor_split(size), strict=True)
        ):
            given = {name: split[index] for name, split in pieces.items()}
            args: tuple[Any, ...] = (values,)
            for number, part in enumerate(parts):
                args = as_tuple(streams.run(number, part, *args, **given))
            loss = program.loss(args[0] if len(args) == 1 else args, wanted) * (len(wanted) / len(target))
            if loss.requires_grad:
                loss.backward()
            total += loss.item()
        record.losses.append(total)
        record.keep_given(step, inputs=inputs, **kwargs)
        if keeps_before_step:
            keep_all(record, step, parts)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        if not keeps_before_step:
            keep_all(record, step, parts)
    return record


# --- The shapes of stages ---


def tied(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(self.second(torch.tanh(self.middle(torch.tanh(self.first(x))))))


class Tied(nn.Module):
    """One weight in two layers, with others between and behind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.second = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.second.weight = self.first.weight

    forward = tied


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH))
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend, self.recur = nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.LSTM(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(1)
        x = x + self.attend(x, x, x)[0]
        low, high = self.norm(self.recur(x)[0]).squeeze(1).chunk(2, dim=-1)
        return torch.cat([low * high, high], dim=-1)


def scaled_gradient(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.first(x)
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient * 2)
    return torch.tanh(self.second(torch.tanh(h)))


def beside(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The second output comes from parameters only; `both` serves both."""
    return torch.tanh(self.linear(x) * self.both), (self.alone * self.both).exp().expand(len(x), WIDTH).contiguous()


def pass_on(self: Any, x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tanh(self.linear(x)), other


def pair(forward: Callable[..., Any], **members: Any) -> Callable[[], nn.Module]:
    return lambda: Calls(forward, linear=nn.Linear(WIDTH, WIDTH), **{name: make() for name, make in members.items()})


def cross_shared(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Each of two nodes has a parameter of its own and one that both use; parameters in the order that merges late."""
    return torch.tanh((torch.tanh(x * (self.a + self.c))) * (self.b + self.c))


PROGRAMS: dict[str, Program] = {
    "plain": Program(parts_of()),
    "first stage frozen": Program(parts_of(p0=lambda: frozen(dense()))),
    "two first stages frozen": Program(parts_of(p0=lambda: frozen(dense()), p1=lambda: frozen(dense()))),
    "middle stages frozen": Program(parts_of(p1=lambda: frozen(dense()), p2=lambda: frozen(dense()))),
    "last stage frozen": Program(parts_of(p3=lambda: frozen(dense()))),
    "all but the last frozen": Program(parts_of(**{f"p{i}": lambda: frozen(dense()) for i in range(3)})),
    "only the first trained": Program(parts_of(**{f"p{i}": lambda: frozen(dense()) for i in range(1, 4)})),
    "nothing trained": Program(parts_of(**{f"p{i}": lambda: frozen(dense()) for i in range(4)})),
    "first stage without parameters": Program(parts_of(p0=nn.Tanh)),
    "middle stage without parameters": Program(parts_of(p1=nn.Tanh)),
    "last stage without parameters": Program(parts_of(p3=nn.Tanh)),
    "first layers frozen": Program(
        parts_of(**{f"p{i}": lambda: nn.Sequential(frozen(dense()), dense()) for i in (0, 2)})
    ),
    "last layers frozen": Program(
        parts_of(**{f"p{i}": lambda: nn.Sequential(dense(), frozen(dense())) for i in (1, 3)})
    ),
    "bias only": Program(
        parts_of(
            **{
                f"p{i}": lambda: Calls(
                    lambda s, x: torch.tanh(s.w(x) + s.b), w=frozen(nn.Linear(WIDTH, WIDTH)), b=vector()
                )
                for i in range(4)
            }
        )
    ),
    "unused parameters": Program(
        parts_of(p0=pair(lambda s, x: s.linear(x), idle=dense), p2=pair(lambda s, x: s.linear(x), idle=dense))
    ),
    "tied weights": Program(parts_of(p0=Tied, p1=Tied, p3=Tied)),
    "weight used twice": Program(
        parts_of(p1=pair(lambda s, x: torch.tanh(s.linear(torch.tanh(s.linear(x))))), p3=Tied)
    ),
    "parameters that nodes share": Program(
        parts_of(**{f"p{i}": lambda: Calls(cross_shared, a=vector(), b=vector(), c=vector()) for i in range(4)})
    ),
    "token ids": Program(
        parts_of(p0=lambda: nn.Sequential(nn.Embedding(11, WIDTH), dense())),
        makes_inputs=lambda batch: torch.randint(11, (batch,)),
    ),
    "frozen embedding": Program(
        parts_of(p0=lambda: frozen(nn.Embedding(11, WIDTH))), makes_inputs=lambda batch: torch.randint(11, (batch,))
    ),
    "integers between stages": Program(
        parts_of(
            p0=pair(lambda s, x: (s.linear(x), (x > 0).long())),
            p1=pair(lambda s, x, m: (s.linear(x * m), m)),
            p2=pair(lambda s, x, m: (s.linear(x), m)),
            p3=pair(lambda s, x, m: s.linear(x * m)),
        )
    ),
    "output from parameters only": Program(
        parts_of(
            p0=pair(beside, both=vector, alone=vector),
            p1=pair(pass_on),
            p2=pair(lambda s, x, o: beside(s, x * o), both=vector, alone=vector),
            p3=pair(lambda s, x, o: s.linear(x) + o),
        )
    ),
    "output that nobody uses": Program(
        parts_of(
            p0=pair(beside, both=vector, alone=vector),
            p1=pair(lambda s, x, o: beside(s, x), both=vector, alone=vector),
            p2=pair(lambda s, x, o: s.linear(x)),
        )
    ),
    "last stage with two outputs": Program(
        parts_of(p3=pair(beside, both=vector, alone=vector)),
        loss=lambda output, target: mean_square(output, target) + output[1].mean(),
    ),
    "output detached": Program(parts_of(p1=pair(lambda s, x: s.linear(x).detach()))),
    "keyword tensors": Program(
        parts_of(**{f"p{i}": pair(lambda s, x, scale: torch.tanh(s.linear(x) * scale)) for i in range(4)}),
        makes_kwargs=lambda batch: {"scale": torch.rand(batch, 1)},
    ),
    "keyword tensors that require gradients": Program(
        parts_of(
            **{f"p{i}": pair(lambda s, x, scale: s.linear(x)) for i in range(3)},
            p3=pair(lambda s, x, scale: torch.tanh(s.linear(x) * scale)),
        ),
        makes_kwargs=lambda batch: {"scale": torch.rand(batch, 1).requires_grad_()},
    ),
    "dropout": Program(
        parts_of(**{f"p{i}": lambda: nn.Sequential(dense(), nn.Dropout(0.5)) for i in range(4)}), has_rng=True
    ),
    "checkpointing": Program(parts_of(**{f"p{i}": lambda: Checkpointed(False) for i in range(4)})),
    "checkpointing with dropout": Program(
        parts_of(**{f"p{i}": lambda: Checkpointed(False, 0.5) for i in range(4)}), has_rng=True
    ),
    "reentrant checkpointing": Program(parts_of(**{f"p{i}": lambda: Checkpointed(True) for i in (1, 2, 3)})),
    "batch norm": Program(
        parts_of(**{f"p{i}": lambda: nn.Sequential(dense(), nn.BatchNorm1d(WIDTH)) for i in range(4)})
    ),
    "output is a view": Program(
        parts_of(**{f"p{i}": pair(lambda s, x: s.linear(x).view(-1, 2, 3).view(-1, WIDTH)) for i in range(4)})
    ),
    "output is not contiguous": Program(
        parts_of(
            p0=pair(lambda s, x: s.linear(x).view(-1, 2, 3).transpose(1, 2)),
            p1=pair(lambda s, x: s.linear(x.reshape(-1, WIDTH)).view(-1, 2, 3).transpose(1, 2)),
            p2=pair(lambda s, x: s.linear(x.transpose(1, 2).reshape(-1, WIDTH)).view(-1, 3, 2).transpose(1, 2)),
            p3=pair(lambda s, x: s.linear(x.reshape(-1, WIDTH))),
        )
    ),
    "gradient is expanded": Program(
        parts_of(
            **{
                f"p{i}": pair(lambda s, x: x.sum(1, keepdim=True).expand(-1, WIDTH) + s.linear(x).mean() * 0.1)
                for i in range(4)
            }
        ),
        loss=lambda output, target: output.sum() / 100,
    ),
    "loss is a view": Program(parts_of(), loss=lambda output, target: mean_square(output, target).view(1)[0]),
    "micro-batches of one": Program(
        parts_of(
            **{
                f"p{i}": lambda: Calls(lambda s, x: x + s.place, place=nn.Parameter(torch.randn(1, WIDTH)))
                for i in range(4)
            }
        ),
        batch=4,
    ),
    "sum of parameters": Program(
        parts_of(
            **{
                f"p{i}": lambda: Calls(lambda s, x: torch.tanh(x) + (s.p + s.q), p=vector(), q=vector())
                for i in range(4)
            }
        )
    ),
    "gradient hooks on activations": Program(
        parts_of(
            **{
                f"p{i}": lambda: Calls(scaled_gradient, first=nn.Linear(WIDTH, WIDTH), second=nn.Linear(WIDTH, WIDTH))
                for i in range(4)
            }
        )
    ),
    "in place": Program(
        parts_of(
            **{
                f"p{i}": lambda: nn.Sequential(
                    nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.1, inplace=True), nn.Linear(WIDTH, WIDTH)
                )
                for i in range(4)
            }
        )
    ),
    "attention and recurrence": Program(parts_of(p0=Attention, p2=Attention)),
    "inputs that require gradients": Program(parts_of(), inputs_require_grad=True),
    "stage that passes its input": Program(parts_of(p1=nn.Identity, p2=nn.Identity)),
    "loss of several terms": Program(
        parts_of(), loss=lambda output, target: mean_square(output, target) + output.abs().mean()
    ),
    "indices between stages": Program(
        parts_of(
            p0=lambda: Calls(lambda s, ids: (s.table(ids), ids), table=nn.Embedding(11, WIDTH)),
            p1=lambda: Calls(lambda s, x, ids: (x + s.table(ids), ids), table=nn.Embedding(11, WIDTH)),
            p2=pair(lambda s, x, ids: s.linear(x)),
        ),
        makes_inputs=lambda batch: torch.randint(11, (batch,)),
    ),
    "uneven micro-batches": Program(parts_of(), batch=10),
    "uneven micro-batches, one input unused": Program(
        parts_of(
            p0=pair(beside, both=vector, alone=vector),
            p1=pair(lambda s, x, o: s.linear(x)),
        ),
        batch=11,
    ),
    "batches of several sizes": Program(parts_of(), batches=(8, 5, 8)),
    "sequences of several lengths": Program(
        parts_of(p1=pair(lambda s, x: torch.tanh(s.linear(x)).mean(0, keepdim=True) + x)), batches=(12, 8, 4)
    ),
}
