"""What to measure: the options of `holmes bench` as one checked value that travels to every rank."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection
from typing import Any

from holmes.tools.bench.operations import DTYPES, OPERATIONS, REDUCTIONS
from holmes_comm.errors import UsageError
from holmes_comm.nic_selection import TRANSPORTS

#: As a path: standard output.
STDOUT = "-"
#: Libraries to compare with.
PEERS = ("gloo", "openmpi-tcp", "openmpi-shm", "openmpi-shm-nocma", "ucx-tcp", "ucx-shm", "ucx-rdma", "perftest")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_bytes(text: str) -> int:
    """Returns the bytes that `text` ("8", "64K", "1.5M", "1G"; units of 1024) names; ValueError where it names none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise UsageError(
            f"size {text!r} is not a number of bytes; write for example 8, 64K, 1.5M or 1G (units of 1024)"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


@dataclasses.dataclass(frozen=True)
class Settings:
    """One run of the benchmark. Immutable; the same on every rank."""

    operations: tuple[str, ...]
    begin_bytes: int = 8
    end_bytes: int = 64 << 20
    factor: float = 2.0  # each size is the one before times this
    sizes: tuple[int, ...] = ()  # in bytes; exactly these instead of begin, end and factor
    dtype: str = "float32"
    op: str = "sum"
    through: str = "api"  # ours: "api" (holmes_comm's own) or "torch" (the c10d backend)
    transport: str = "auto"  # ours: one of TRANSPORTS
    nics: tuple[str, ...] = ()  # ours: one peer for each selection; none: the library's default
    peers: tuple[str, ...] = ("gloo",)  # others beside ours, in the same run
    holmes: bool = True
    rounds: int = 5  # peers take turns this many times
    seconds: float = 1.0  # of timed work for each peer, operation and size
    warmup: int = 5  # untimed calls for each peer, operation and size, at least
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        checks: list[tuple[str, str, Collection[str]]] = [
            *(("operation", operation, OPERATIONS) for operation in self.operations),
            *(("peer", peer, PEERS) for peer in self.peers),
            ("dtype", self.dtype, DTYPES),
            ("reduction", self.op, REDUCTIONS),
            ("through", self.through, ("api", "torch")),
            ("transport", self.transport, TRANSPORTS),
        ]
        for name, value, known in checks:
            if value not in known:
                raise UsageError(f"{name} {value!r} is unknown; known are {', '.join(known)}")
        if not 0 < self.begin_bytes <= self.end_bytes:
            raise UsageError(f"sizes run from {self.begin_bytes} to {self.end_bytes} bytes; need 0 < begin <= end")
        if any(size <= 0 for size in self.sizes):
            raise UsageError(f"sizes are {', '.join(map(str, self.sizes))} bytes; each must be above 0")
        if self.factor <= 1:
            raise UsageError(f"factor is {self.factor}; it must be greater than 1, or the sizes never reach the end")
        if self.rounds < 1 or self.warmup < 1 or self.seconds <= 0:
            raise UsageError(
                f"rounds={self.rounds}, warmup={self.warmup}, seconds={self.seconds}: need at least one round, one "
                "warm-up call and a positive time"
            )
        if not (self.peers or self.holmes):
            raise UsageError("nothing to measure: ours is switched off and there are no peers")
        if len(self.mpi_peers) > 1:
            raise UsageError(
                f"peers {', '.join(self.mpi_peers)} are Open MPI, which starts once in a process, with one "
                "transport; take one of them in a run"
            )
        DTYPES[self.dtype].check_reduction(self.op)

    @property
    def needs_torch(self) -> bool:
        """Whether a peer or the data type needs torch."""
        return "gloo" in self.peers or self.through == "torch" or DTYPES[self.dtype].torch_only

    @property
    def mpi_peers(self) -> tuple[str, ...]:
        """The peers whose ranks mpirun has to start."""
        return tuple(peer for peer in self.peers if peer.startswith(("openmpi", "ucx")))

    def sizes_bytes(self) -> list[int]:
        """Returns the sizes to measure: those given, else from begin to at most end, ascending."""
        if self.sizes:
            return list(self.sizes)
        sizes = []
        size = float(self.begin_bytes)
        while size <= self.end_bytes:
            if int(size) not in sizes:
                sizes.append(int(size))
            size *= self.factor
        return sizes

    def to_json(self) -> str:
        """Returns the settings as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Returns the settings that `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        lists = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
        return cls(**{**fields, **lists})


@dataclasses.dataclass(frozen=True)
class Output:
    """Where a run's results go, and the command that asked for it. Paths are rank 0's.

    `json_path`: STDOUT prints the JSON in place of the lines. `width`: of the terminal in columns; None: there is none.
    """

    command: str
    json_path: str | None = None
    plot_path: str | None = None
    width: int | None = None

    def to_json(self) -> str:
        """Returns it as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Output:
        """Returns what `to_json` wrote."""
        return cls(**json.loads(text))
