"""Cost model and event-driven simulator of a training step. Runs on a laptop: no torch, no GPU.

Flow: `Job` (model, sizes, places, framework) and `Rates` -> `make_step` -> `simulate` -> `Result`, timeline.
"""

from holmes.planning.model.gpt import Transformer
from holmes.planning.schedule import SCHEDULES
from holmes.planning.simulate.best import ScheduleChoice, best_schedule
from holmes.planning.simulate.calibrate import (
    compute_from_bench,
    fit_link,
    link_from_bench,
    links_from_bench,
    solve_increasing,
)
from holmes.planning.simulate.job import Framework, Job, Place, job_of_plan, make_step
from holmes.planning.simulate.rates import LinkRate, MeasuredTimes, Rates
from holmes.planning.simulate.result import DeviceTime, Result, simulate
from holmes.planning.simulate.schedules import Operation, operations
from holmes.planning.simulate.step import Boundary, Route, Stage, Step
from holmes.planning.simulate.timeline import chrome_trace, draw, save_trace

__all__ = [
    "SCHEDULES",
    "Boundary",
    "DeviceTime",
    "Framework",
    "Job",
    "LinkRate",
    "MeasuredTimes",
    "Operation",
    "Place",
    "Rates",
    "Result",
    "Route",
    "ScheduleChoice",
    "Stage",
    "Step",
    "Transformer",
    "best_schedule",
    "chrome_trace",
    "compute_from_bench",
    "draw",
    "fit_link",
    "job_of_plan",
    "link_from_bench",
    "links_from_bench",
    "make_step",
    "operations",
    "save_trace",
    "simulate",
    "solve_increasing",
]
