"""The names of pipeline schedules: one set for the plan, the partition and the simulator."""

from __future__ import annotations

#: "gpipe" (Huang et al., arXiv 1811.06965), "1f1b" (Narayanan et al., arXiv 2104.04473), "interleaved" (the same with
#: several chunks of the model on each stage, as Megatron-LM runs it), "zb-h1" (Qi et al., arXiv 2401.10241).
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")


def check_schedule(schedule: str, chunks: int) -> None:
    """Raises ValueError where the name is unknown, or a stage holds several chunks without being interleaved."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} is unknown; it must be one of {list(SCHEDULES)}")
    if chunks < 1:
        raise ValueError(f"chunks={chunks} must be at least 1")
    if chunks > 1 and schedule != "interleaved":
        raise ValueError(
            f"chunks={chunks} needs schedule='interleaved', but it is {schedule!r}; use that schedule, or chunks=1"
        )
