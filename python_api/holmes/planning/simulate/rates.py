"""Rates: the measured or assumed numbers of the cost model, in a file that a person can write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from holmes import files
from holmes.cluster.topology.fields import Entry
from holmes.planning.model.gpt import PartTimes, PassTimes, Transformer, modelled_times
from holmes_comm.errors import UsageError

_MEASURED_SIZES = ("hidden", "heads", "sequence", "vocabulary")


@dataclass(frozen=True)
class LinkRate:
    """Effective rate of one host's NICs of a class, each direction, and the latency of a message.

    `jitter_s`: by how much the slowest of a hundred packets comes later than that: a message is as late as the slowest
    of its packets, so each counts with both. `core_s_per_gb`: processor seconds that a rank spends for 1e9 bytes it
    sends and as many it receives; it counts only where ranks share cores (`Rates.cores`).
    """

    gbps: float
    latency_s: float = 0.0
    core_s_per_gb: float = 0.0
    jitter_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.gbps > 0 and min(self.latency_s, self.core_s_per_gb, self.jitter_s) >= 0):
            raise UsageError(
                f"gbps={self.gbps} of a link must be above 0, latency_s={self.latency_s}, jitter_s={self.jitter_s} and "
                f"core_s_per_gb={self.core_s_per_gb} at least 0"
            )

    @property
    def message_s(self) -> float:
        """How much later a message arrives than it was sent, beside its bytes."""
        return self.latency_s + self.jitter_s

    @property
    def bytes_per_s(self) -> float:
        """The rate in bytes."""
        return self.gbps * 1e9 / 8


@dataclass(frozen=True)
class MeasuredTimes:
    """What `holmes bench compute` measured for one shape, by a rank that has a core (or GPU) to itself.

    Backward times are without recomputation. `optimizer_ns_per_parameter`: of the optimizer's update.
    `sharding_ns_per_parameter`: what holmes.DistributedOptimizer's hooks, buckets and their separate updates add to a
    step's last backward.
    """

    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    micro_batch: int
    times: PartTimes
    optimizer_ns_per_parameter: float = 0.0
    sharding_ns_per_parameter: float = 0.0

    def of(self, model: Transformer, micro_batch: int, recomputation: str) -> PartTimes:
        """The times of this model. Raises ValueError where another shape was measured."""
        wanted = {name: getattr(model, name) for name in _MEASURED_SIZES} | {"micro_batch": micro_batch}
        have = {name: getattr(self, name) for name in wanted}
        if wanted != have:
            options = " ".join(f"--{name.replace('_', '-')} {size}" for name, size in wanted.items())
            raise UsageError(f"compute was measured for {have}, not for {wanted}: run `holmes bench compute {options}`")
        if recomputation == "selective":
            raise UsageError("selective recomputation was not measured; use recomputation none or full")
        layer, again = self.times.layer, recomputation == "full"
        return replace(
            self.times, layer=PassTimes(layer.forward_s, layer.backward_s + (layer.forward_s if again else 0.0))
        )


@dataclass(frozen=True)
class Rates:
    """Compute and links of a job.

    `compute_tflops`: what one GPU reaches inside a layer, in 1e12 operations per second, counted as `Transformer`
    counts; or `measured` times instead. `links`: NIC class (or NIC name) to its rate. `cores`: where all ranks share
    one machine's processor cores, as emulated nodes do: so many ranks that compute at once to the cores that they get
    together; empty: every rank has its own device.
    `tensor_gbps`: of one GPU to the others of its host, each way; None: tensor groups' exchanges are part of the
    compute rate.
    """

    compute_tflops: float | None
    links: Mapping[str, LinkRate]
    measured: MeasuredTimes | None = None
    cores: Mapping[int, float] = field(default_factory=dict)
    tensor_gbps: float | None = None

    def __post_init__(self) -> None:
        if (self.compute_tflops is None) == (self.measured is None):
            raise UsageError("rates need either compute_tflops or measured times, one of them")
        if self.compute_tflops is not None and not self.compute_tflops > 0:
            raise UsageError(f"compute_tflops={self.compute_tflops} must be above 0")
        if self.tensor_gbps is not None and not self.tensor_gbps > 0:
            raise UsageError(f"tensor_gbps={self.tensor_gbps} must be above 0, or left out")

    def times(self, model: Transformer, micro_batch: int, tensor: int, recomputation: str) -> PartTimes:
        """Seconds of a micro-batch through each part of the model. Raises ValueError where they were not measured."""
        if self.measured is not None:
            if tensor != 1:
                raise UsageError(f"measured times are of tensor=1, not {tensor}; give compute_tflops instead")
            return self.measured.of(model, micro_batch, recomputation)
        assert self.compute_tflops is not None, "checked when made"
        return modelled_times(
            model,
            micro_batch=micro_batch,
            flops_per_s=self.compute_tflops * 1e12,
            tensor=tensor,
            recomputation=recomputation,
            tensor_bytes_per_s=None if self.tensor_gbps is None else self.tensor_gbps * 1e9 / 8,
        )

    @property
    def optimizer_s_per_parameter(self) -> float:
        """Seconds that the optimizer takes for one parameter; 0 where it was not measured."""
        return self.measured.optimizer_ns_per_parameter * 1e-9 if self.measured else 0.0

    @property
    def sharding_s_per_parameter(self) -> float:
        """Seconds that sharding the optimizer adds to a step's last backward, for each parameter; 0 where unknown."""
        return self.measured.sharding_ns_per_parameter * 1e-9 if self.measured else 0.0

    def link(self, name: str) -> LinkRate:
        """The rate of a class or NIC. Raises ValueError naming those there are."""
        if name not in self.links:
            raise UsageError(f"no rate for {name!r}; there are rates for {', '.join(self.links) or 'nothing'}: add one")
        return self.links[name]

    def with_link(self, name: str, rate: LinkRate) -> Rates:
        """The same with one link's rate set."""
        return replace(self, links={**self.links, name: rate})

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and numbers, with kind and version; what is not known is left out."""
        known = {name: value for name, value in files.plain(self).items() if value not in (None, {})}
        return {"kind": "holmes rates", "version": 1, **known}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Rates:
        """The inverse of `to_dict`. Raises ValueError naming what is wrong."""
        files.check_kind(data, "holmes rates", version=1)
        top = Entry(data, "", ("kind", "version", *(entry.name for entry in fields(cls))))
        links = {str(name): _link(Entry(item, where, _LINK)) for where, name, item in top.mapping("links")}
        return cls(top.positive("compute_tflops"), links, _measured(top), _cores(top), top.positive("tensor_gbps"))

    def save(self, path: str | Path) -> None:
        """Writes .yaml, .yml or .json."""
        files.save(self.to_dict(), path)

    @classmethod
    def load(cls, path: str | Path) -> Rates:
        """Reads what `save` wrote or a person did. Raises ValueError naming the file and what is wrong."""
        return files.load_as(path, cls.from_dict)


_LINK = tuple(entry.name for entry in fields(LinkRate))
_MEASURED = tuple(entry.name for entry in fields(MeasuredTimes))
_PARTS = tuple(entry.name for entry in fields(PartTimes))
_PASSES = tuple(entry.name for entry in fields(PassTimes))


def _link(entry: Entry) -> LinkRate:
    return LinkRate(entry.required("gbps"), **{name: entry.not_negative(name, 0.0) for name in _LINK if name != "gbps"})


def _measured(top: Entry) -> MeasuredTimes | None:
    if "measured" not in top:
        return None
    entry = Entry(top.get("measured"), "measured", _MEASURED)
    times = Entry(entry.get("times"), "measured.times", _PARTS)
    parts = [Entry(times.get(name), f"measured.times.{name}", _PASSES) for name in _PARTS]
    return MeasuredTimes(
        **{name: entry.whole(name, 0) for name in (*_MEASURED_SIZES, "micro_batch")},
        times=PartTimes(
            *(PassTimes(part.not_negative("forward_s"), part.not_negative("backward_s")) for part in parts)
        ),
        optimizer_ns_per_parameter=entry.not_negative("optimizer_ns_per_parameter", 0.0),
        sharding_ns_per_parameter=entry.not_negative("sharding_ns_per_parameter", 0.0),
    )


def _cores(top: Entry) -> dict[int, float]:
    """Keys are texts in JSON."""
    listed = top.mapping("cores")
    if wrong := [where for where, ranks, _ in listed if not str(ranks).isdecimal()]:
        raise UsageError(f"{wrong[0]}: numbers of ranks must be whole, such as cores: {{2: 1.9}}")
    entry = Entry(top.get("cores") or {}, "cores", [ranks for _, ranks, _ in listed])
    return {int(ranks): entry.required(ranks) for _, ranks, _ in listed}
