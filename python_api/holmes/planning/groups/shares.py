"""Shares: how many of a step's micro-batches each data-parallel replica takes, where replicas are not equally fast."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from holmes.cluster.topology import Topology
from holmes.planning.groups.rank_grid import RankGrid
from holmes.planning.model.gpus import peak_tflops
from holmes.planning.schedule import check_group, fits_rounds
from holmes.words import short
from holmes_comm.errors import UsageError

SPEED = "speed"  # in place of the numbers: those that the topology's GPUs suggest


def check_shares(
    shares: Sequence[Any],
    data: int,
    *,
    global_batch: int | None,
    micro_batch: int | None,
    schedule: str = "1f1b",
    pipeline: int = 1,
    group: int | None = None,
) -> None:
    """Raises ValueError where these are not the micro-batches of a step for each of so many replicas, or the schedule
    does not run so many of one of them. `group`: of micro-batches, as a plan's micro_batch_group."""
    text = f"data_shares={short(map(repr, shares))}"
    if len(shares) != data or not all(type(count) is int and count >= 1 for count in shares):
        raise UsageError(f"{text} must be data={data} whole numbers of at least 1, one for each replica")
    total = step_micro_batches(global_batch, micro_batch, data)
    if sum(shares) != total:
        raise UsageError(
            f"{text} sums to {sum(shares)} micro-batches, but global_batch={global_batch} of micro_batch={micro_batch} "
            f"is {total}; give shares that sum to {total}, or plan with data_shares={SPEED!r}"
        )
    for replica, count in enumerate(shares):
        if not fits_rounds(schedule, pipeline, count):
            rule = "whole rounds of it" if schedule == "interleaved" else "as many as its whole rounds divide"
            raise UsageError(
                f"{text}: replica {replica} has {count} micro-batches, but schedule={schedule!r} with "
                f"pipeline={pipeline} takes {rule}; multiples of {pipeline} fit"
            )
        check_group(schedule, group, pipeline, count)


def share_unit(schedule: str, pipeline: int, group: int | None = None) -> int:
    """A number of micro-batches of which the schedule runs every multiple."""
    return math.lcm(pipeline, group or 1) if schedule in ("interleaved", "zb-h1") else 1


def shares_problem(global_batch: int, micro_batch: int, data: int, unit: int = 1) -> tuple[str, int] | None:
    """As `batch_problem`, where replicas need not have equal shares: these are of `unit` micro-batches."""
    samples = micro_batch * unit
    if global_batch % samples == 0 and global_batch >= data * samples:
        return None
    rounds = "" if unit == 1 else f" * {unit} (micro-batches that the schedule takes together)"
    return (
        f"global_batch={global_batch} must be a multiple of micro_batch={micro_batch}{rounds} = {samples}, and at "
        f"least data={data} times that",
        max(round(global_batch / samples), data) * samples,
    )


def step_micro_batches(global_batch: int | None, micro_batch: int | None, data: int, unit: int = 1) -> int:
    """Of all replicas together. Raises ValueError where one of the two is not known, and as `shares_problem` says."""
    if global_batch is None or micro_batch is None:
        raise UsageError(
            f"data_shares needs micro_batch and global_batch, but they are {micro_batch} and {global_batch}; give both"
        )
    if wrong := shares_problem(global_batch, micro_batch, data, unit):
        raise UsageError(f"{wrong[0]}; the nearest is global_batch={wrong[1]}")
    return global_batch // micro_batch


def shares_by_speed(total: int, speeds: Sequence[float], unit: int = 1) -> tuple[int, ...]:
    """The micro-batches m_r of each replica, multiples of `unit` above 0 that sum to `total`, whose largest m_r / v_r
    is least: the slowest replica is done soonest. `speeds`: v_r, in any unit; equal ones give the most even shares.

    One unit after another goes to the replica that would be done with it first. That is exact: where T is the largest
    time of the best shares, a replica gets nothing beyond T before each has all that it can do until T, and that is
    `total` at least. Of equals the first is taken, so that all ranks find the same. `total` is as `step_micro_batches`
    checks it.
    """
    counts = [1] * len(speeds)
    done = [(2 / speed, replica) for replica, speed in enumerate(speeds)]
    heapq.heapify(done)
    for _ in range(total // unit - len(speeds)):
        _, replica = done[0]
        counts[replica] += 1
        heapq.heapreplace(done, ((counts[replica] + 1) / speeds[replica], replica))
    return tuple(count * unit for count in counts)


def shares_reason(shares: Sequence[int], speeds: Sequence[float]) -> str:
    """Why these shares, in words."""
    times = [share / speed for share, speed in zip(shares, speeds, strict=True)]
    even = shares_by_speed(sum(shares), [1.0] * len(shares))
    longest = max(share / speed for share, speed in zip(even, speeds, strict=True))
    relative = short(f"{speed / max(speeds):.3g}" for speed in speeds)
    return (
        f"micro-batches {short(shares)} by the replicas' speeds {relative}: "
        f"the slowest computes {max(times) / longest:.3g} of the time that it takes with equal shares"
    )


def replica_speeds(topology: Topology, grid: RankGrid, layers_per_stage: Sequence[int]) -> tuple[float, ...]:
    """Of each replica the speed of its slowest stage: TFLOP/s of the slowest GPU over the layers. Raises ValueError
    naming a host whose GPU's speed the topology does not know."""
    tflops = stage_tflops(topology, grid)
    if tflops is None:
        host = next(host for host in topology.hosts if peak_tflops(host) is None)
        raise UsageError(
            f"data_shares={SPEED!r} needs the speed of every GPU, but host {host.name} of the topology says "
            f"gpu={host.gpu!r}, gpu_tflops={host.gpu_tflops}: write `gpu: A100-80GB` or gpu_tflops there, or give the "
            "shares themselves, such as [6, 2]"
        )
    layers = np.asarray(layers_per_stage)
    return tuple((tflops[:, layers > 0] / layers[layers > 0]).min(axis=1).tolist())


def stage_tflops(topology: Topology, grid: RankGrid) -> npt.NDArray[np.float64] | None:
    """Peak TFLOP/s of the slowest GPU of each replica's stages: (data, pipeline). None where one is not known."""
    of_rank = np.empty(topology.world_size)
    for host in topology.hosts:
        tflops = peak_tflops(host)
        if tflops is None:
            return None
        of_rank[list(host.ranks)] = tflops
    of_stage = of_rank[grid.order].reshape(grid.pipeline, grid.size_of("dp"), -1)
    slowest: npt.NDArray[np.float64] = of_stage.min(axis=2).T
    return slowest
