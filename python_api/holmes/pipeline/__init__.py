"""Pipeline parallelism: torch's schedules over Holmes groups, with messages that move behind compute."""

from holmes.pipeline.schedules import pipeline_schedule
from holmes.pipeline.stage import PipelineStage
from holmes.pipeline.stages import pipeline_stages

__all__ = ["PipelineStage", "pipeline_schedule", "pipeline_stages"]
