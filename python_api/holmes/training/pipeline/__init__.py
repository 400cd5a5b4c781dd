"""Pipeline parallelism: torch's schedules over Holmes groups, with messages that move behind compute."""

from holmes.training.pipeline.stage import PipelineStage
from holmes.training.pipeline.stages import pipeline_schedule, pipeline_stages

__all__ = ["PipelineStage", "pipeline_schedule", "pipeline_stages"]
