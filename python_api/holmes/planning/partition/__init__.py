"""Partition: how many layers each pipeline stage gets. Needs numpy only.

By rule (problem.py, which also says what a partition costs); with the least bottleneck (optimum.py, its steps
window.py, equal.py, spread.py and search.py); and again from a run's timings (replan.py).
"""

from holmes.planning.partition.optimum import best_partition
from holmes.planning.partition.problem import (
    PAPER_ALPHA,
    Layer,
    Link,
    Partition,
    PartitionProblem,
    Stage,
    equal_layers,
    evaluate,
    split_by_speed,
    split_evenly,
)
from holmes.planning.partition.replan import Proposal, Replanner, observed_speeds, replan
from holmes.planning.partition.transformer import Transformer, transformer_layers

__all__ = [
    "PAPER_ALPHA",
    "Layer",
    "Link",
    "Partition",
    "PartitionProblem",
    "Proposal",
    "Replanner",
    "Stage",
    "Transformer",
    "best_partition",
    "equal_layers",
    "evaluate",
    "observed_speeds",
    "replan",
    "split_by_speed",
    "split_evenly",
    "transformer_layers",
]
