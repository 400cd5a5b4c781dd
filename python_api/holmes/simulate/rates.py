"""Rates: the measured or assumed numbers of the cost model, in a file that a person can write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holmes import files


@dataclass(frozen=True)
class LinkRate:
    """Effective rate of one host's NICs of a class, each direction, and the latency of a message."""

    gbps: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.gbps > 0 and self.latency_s >= 0):
            raise ValueError(f"gbps={self.gbps} of a link must be above 0, and latency_s={self.latency_s} at least 0")

    @property
    def bytes_per_s(self) -> float:
        """The rate in bytes."""
        return self.gbps * 1e9 / 8


@dataclass(frozen=True)
class Rates:
    """`compute_tflops`: what one GPU reaches inside a layer, in 1e12 operations per second, counted as `ModelShape`
    counts. `links`: NIC class (or NIC name) to its rate."""

    compute_tflops: float
    links: Mapping[str, LinkRate]

    def __post_init__(self) -> None:
        if not self.compute_tflops > 0:
            raise ValueError(f"compute_tflops={self.compute_tflops} must be above 0")

    def link(self, name: str) -> LinkRate:
        """The rate of a class or NIC. Raises ValueError naming those there are."""
        if name not in self.links:
            raise ValueError(f"no rate for {name!r}; there are rates for {', '.join(self.links) or 'nothing'}: add one")
        return self.links[name]

    def with_link(self, name: str, rate: LinkRate) -> Rates:
        """The same with one link's rate set."""
        return replace(self, links={**self.links, name: rate})

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and numbers, with kind and version."""
        return {"kind": "holmes rates", "version": 1, **files.plain(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Rates:
        """The inverse of `to_dict`. Raises ValueError naming what is wrong."""
        files.check_kind(data, "holmes rates", version=1)
        try:
            links = {name: LinkRate(**entry) for name, entry in data["links"].items()}
            return cls(data["compute_tflops"], links)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not rates: {error}") from error

    def save(self, path: str | Path) -> None:
        """Writes .yaml, .yml or .json."""
        files.save(self.to_dict(), path)

    @classmethod
    def load(cls, path: str | Path) -> Rates:
        """Reads what `save` wrote or a person did. Raises ValueError naming what is wrong."""
        return cls.from_dict(files.load(path))
