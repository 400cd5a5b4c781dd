"""Overlap: gradients leave while backward still runs, parameters arrive while the next forward already runs.

    optimizer = holmes.DistributedOptimizer(model, torch.optim.AdamW, lr=3e-4, group=data_parallel_group)

Parameters lie in flat buckets in the order in which backward finishes them. A bucket's gradients are reduce-scattered
when its last one is ready; each rank steps its own shard; the all-gather of the new parameters is awaited just before
the first module that uses them. See docs/optimizer.md.
"""

from holmes.training.overlap.optimizer import DistributedOptimizer
from holmes.training.overlap.report import GroupReport, StepReport

__all__ = ["DistributedOptimizer", "GroupReport", "StepReport"]
