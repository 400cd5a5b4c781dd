"""Recovery: a job that goes on with whoever is left, in the same processes, and lets in who comes back.

After a failure the survivors abort their communicators, agree through the job's store on who is left (rendezvous,
agreement, watch), make new groups (rebuild) and a new plan, and go on from the last checkpoint (checkpoints, state).
Who comes back joins at the next checkpoint.
"""

from holmes.training.recovery.agreement import Rules
from holmes.training.recovery.errors import (
    CheckpointError,
    FencedError,
    GenerationFailed,
    LeftOutError,
    NoProgressError,
    ReplacedError,
    StoreContentError,
    StoreLostError,
    TooFewRanksError,
    UnequalStepsError,
)
from holmes.training.recovery.generation import Generation, Regroup
from holmes.training.recovery.run import run_elastic

__all__ = [
    "CheckpointError",
    "FencedError",
    "Generation",
    "GenerationFailed",
    "LeftOutError",
    "NoProgressError",
    "Regroup",
    "ReplacedError",
    "Rules",
    "StoreContentError",
    "StoreLostError",
    "TooFewRanksError",
    "UnequalStepsError",
    "run_elastic",
]
