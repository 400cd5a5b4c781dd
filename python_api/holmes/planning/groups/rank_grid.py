"""RankGrid: the ranks as a grid of parallel sizes, and the groups of each kind cut out of it. Needs numpy only.

Ranks are put in a logical order first; in it, they are numbered as Megatron-core does with its order "tp-cp-ep-dp-pp"
(RankGenerator in megatron/core/parallel_state.py): tensor fastest, pipeline slowest. Groups and the ranks in them come
in Megatron's order too, so with ranks already in logical order they are its groups exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from holmes.cluster.topology import Cluster, Topology
from holmes_comm.errors import UsageError

Ints = npt.NDArray[np.int64]


class Kind(NamedTuple):
    """One kind of group. `axes`: those its ranks differ in, of the grid "dense" or "expert".

    `within`: what a group must not leave: "host", "cluster" or, for the few that may cross clusters, "". `why`: the
    reason for that. `stages`: the stages whose ranks are in a group: "" for all, else "first" or "first and last".
    """

    title: str
    grid: str
    axes: tuple[str, ...]
    within: str
    why: str
    stages: str = ""

    @property
    def priority(self) -> int:
        """On links that several kinds use, 0 to 3 (docs/wan.md): what the next computation waits for goes first."""
        if self.axes == ("pp",) and not self.stages:
            return 3
        if self.why == _CHECKPOINTS:
            return 0
        return 1 if self.why == _GRADIENTS or self.stages else 2


_GRADIENTS = "every gradient and parameter, each step"
_ACTIVATIONS = "activations, several times a layer"
_SEQUENCES = "keys and values, in every layer"
_TOKENS = "every token to its experts and back, in every layer"
_CHECKPOINTS = "set-up, barriers, checkpoints"
_SCALARS = "norms and flags: a few bytes a step"

#: All kinds, named as in Megatron-core's ProcessGroupCollection, in the order in which process groups are made; and
#: "world", all ranks.
KINDS = {
    "dp_cp": Kind("data and context parallel", "dense", ("cp", "dp"), "cluster", _GRADIENTS),
    "dp": Kind("data parallel", "dense", ("dp",), "cluster", _GRADIENTS),
    "cp": Kind("context parallel", "dense", ("cp",), "cluster", _SEQUENCES),
    "mp": Kind("model parallel (tensor and pipeline)", "dense", ("tp", "pp"), "", _SCALARS),
    "tp": Kind("tensor parallel", "dense", ("tp",), "host", _ACTIVATIONS),
    "pp": Kind("pipeline", "dense", ("pp",), "", "activations of a stage's end, point to point"),
    "embd": Kind("embedding", "dense", ("pp",), "", "the tied embedding's gradient, once a step", "first and last"),
    "pos_embd": Kind("position embedding", "dense", ("pp",), "", "one rank", "first"),
    "tp_dp_cp": Kind("tensor, data and context parallel", "dense", ("tp", "cp", "dp"), "cluster", _GRADIENTS),
    "tp_dp": Kind("tensor and data parallel", "dense", ("tp", "dp"), "cluster", _GRADIENTS),
    "tp_cp": Kind("tensor and context parallel", "dense", ("tp", "cp"), "cluster", _SEQUENCES),
    "ep": Kind("expert parallel", "expert", ("ep",), "cluster", _TOKENS),
    "expt_tp": Kind("expert tensor parallel", "expert", ("tp",), "host", _ACTIVATIONS),
    "tp_ep": Kind("expert tensor and expert parallel", "expert", ("tp", "ep"), "cluster", _TOKENS),
    "tp_ep_pp": Kind("expert model parallel", "expert", ("tp", "ep", "pp"), "", _SCALARS),
    "expt_dp": Kind("expert data parallel", "expert", ("dp",), "cluster", _GRADIENTS),
    "world": Kind("all ranks", "dense", ("tp", "cp", "dp", "pp"), "", _CHECKPOINTS),
}


def check_kind(kind: str) -> Kind:
    """The kind of this name. Raises ValueError listing the names."""
    if kind not in KINDS:
        raise UsageError(f"no groups of kind {kind!r}; kinds are {', '.join(KINDS)}")
    return KINDS[kind]


class RankGrid:
    """`order[i]` is the rank at logical place i. Sizes multiply up to len(order), in each of the two grids.

    Immutable once made; safe to share between threads.
    """

    def __init__(
        self,
        order: Sequence[int],
        *,
        tensor: int = 1,
        context: int = 1,
        data: int = 1,
        pipeline: int = 1,
        expert: int = 1,
        expert_tensor: int = 1,
    ) -> None:
        self.order: Ints = np.asarray(order, dtype=np.int64)
        self.place: Ints = np.empty_like(self.order)
        self.place[self.order] = np.arange(len(self.order))
        width = tensor * context * data
        self._axes = {  # fastest first
            "dense": {"tp": tensor, "cp": context, "dp": data, "pp": pipeline},
            "expert": {"tp": expert_tensor, "ep": expert, "dp": width // (expert_tensor * expert), "pp": pipeline},
        }
        self.width = width
        self.pipeline = pipeline

    def kinds(self) -> list[str]:
        """The kinds but "world" whose groups have several ranks, each only once where sizes of 1 make several kinds the
        same (with context=1, "dp_cp" is "dp"). Expert kinds only where experts are placed differently from the rest."""
        dense, expert = self._axes["dense"], self._axes["expert"]
        has_experts = expert["ep"] > 1 or expert["tp"] != dense["tp"]
        found: dict[object, str] = {}
        for kind in sorted(KINDS, key=lambda name: len(KINDS[name].axes)):
            described = KINDS[kind]
            axes = tuple(axis for axis in described.axes if self._axes[described.grid][axis] > 1)
            grid = "dense" if axes == ("pp",) else described.grid
            if kind != "world" and self.size_of(kind) > 1 and (grid == "dense" or has_experts):
                found.setdefault((grid, axes, described.stages), kind)
        return [kind for kind in KINDS if kind in found.values()]

    def size_of(self, kind: str) -> int:
        """Ranks of one group."""
        described = check_kind(kind)
        if described.stages:
            return 1 if described.stages == "first" else min(self.pipeline, 2)
        return math.prod(self._axes[described.grid][axis] for axis in described.axes)

    def count_of(self, kind: str) -> int:
        """Groups of this kind."""
        described = check_kind(kind)
        return len(self.order) // math.prod(self._axes[described.grid][axis] for axis in described.axes)

    def groups(self, kind: str) -> Ints:
        """All groups of a kind: ranks, (groups, ranks of a group)."""
        described = check_kind(kind)
        axes = list(reversed(self._axes[described.grid]))  # slowest first, as an array's axes
        outer = [i for i, axis in enumerate(axes) if axis not in described.axes]
        inner = [i for i, axis in enumerate(axes) if axis in described.axes]
        shape = [self._axes[described.grid][axis] for axis in axes]
        size = math.prod(shape[i] for i in inner)
        every: Ints = self.order.reshape(shape).transpose(outer + inner).reshape(-1, size)
        if described.stages == "first":
            every = every[:, :1]
        elif described.stages and size > 1:
            every = every[:, [0, -1]]
        return every

    def row_of(self, kind: str, rank: int) -> int | None:
        """Which row of `groups(kind)` holds a rank; None where none does. O(1)."""
        described = check_kind(kind)
        left, row, stride = int(self.place[rank]), 0, 1
        for axis, size in self._axes[described.grid].items():
            left, at = divmod(left, size)
            if axis not in described.axes:
                row += at * stride
                stride *= size
        stage = self.stage_of(rank)
        allowed = {"": True, "first": stage == 0, "first and last": stage in (0, self.pipeline - 1)}
        return row if allowed[described.stages] else None

    def stage_of(self, rank: int) -> int:
        """The pipeline stage of a rank. O(1)."""
        return int(self.place[rank]) // self.width

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """Place of a rank along "tp", "cp", "dp" and "pp"; along "expt_tp", "ep" and "expt_dp" of the expert grid."""
        found: dict[str, Any] = {}
        for grid, names in (("dense", {}), ("expert", {"tp": "expt_tp", "dp": "expt_dp"})):
            left = int(self.place[rank])
            for axis, size in self._axes[grid].items():
                left, found[names.get(axis, axis)] = divmod(left, size)
        return found


def order_ranks(
    topology: Topology, clusters: Iterable[Cluster], *, tensor: int, context: int, expert_tensor: int
) -> tuple[int, ...]:
    """The ranks of these clusters, cluster by cluster, whatever order they were started in.

    Inside a cluster, host by host: blocks that no tensor group leaves; blocks of context groups whole on one host
    first, as far as they fit, then what is left over, host after host. The sizes must fit (`check_sizes`).
    """
    block = math.lcm(tensor, expert_tensor)
    unit = math.lcm(tensor * context, block)
    hosts = {host.name: host for host in topology.hosts}
    order: list[int] = []
    for cluster in clusters:
        left: list[int] = []
        for name in cluster.hosts:
            ranks = hosts[name].ranks
            whole = len(ranks) // unit * unit
            order += ranks[:whole]
            left += ranks[whole:]
        order += left
    return tuple(order)


def ordered_clusters(topology: Topology, cluster_order: Sequence[str] | None) -> tuple[Cluster, ...]:
    """The clusters in this order; None: by lowest rank. Raises ValueError unless each is named once."""
    if cluster_order is None:
        return topology.clusters
    by_name = {cluster.name: cluster for cluster in topology.clusters}
    if sorted(cluster_order) != sorted(by_name):
        raise UsageError(
            f"cluster_order={list(cluster_order)} must name each cluster once; the topology has {list(by_name)}"
        )
    return tuple(by_name[name] for name in cluster_order)
