"""Pipeline parallelism: torch's schedules over Holmes groups, with messages that move behind compute."""

import torch
from torch.distributed.pipelining import _utils

if not hasattr(_utils, "_StageMeta"):
    raise ImportError(
        f"torch {torch.__version__} has no metadata of pipeline stages, on which Holmes' pipelines are built; they "
        "need torch 2.13 or newer, process groups and holmes.DistributedOptimizer do not"
    )

from holmes.training.pipeline.stage import PipelineStage
from holmes.training.pipeline.stages import pipeline_schedule, pipeline_stages

__all__ = ["PipelineStage", "pipeline_schedule", "pipeline_stages"]
