"""A step of replicas of which some are slower, with equal shares and with shares by speed.

python benchmarks/bench_shares.py                     # two ranks on this machine, one three times as slow
python benchmarks/bench_shares.py --slowness 2 --pass-ms 40 --micro-batches 12

A pass sleeps as long as it would compute, so that ranks take no processor from each other: what is measured are the
waits for each other, and what the optimizer and its gradients take. Both are trained in turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import holmes
from holmes.cluster.topology.file import from_dict
from holmes.planning.plan import Plan
from holmes.planning.simulate import Framework, LinkRate, Rates, Transformer, job_of_plan, make_step, simulate

WIDTH, LAYERS, MICRO_BATCH = 128, 4, 2
MODEL = Transformer(layers=LAYERS, hidden=WIDTH, heads=4, sequence=32, vocabulary=64)


def topology_of(slowness: float) -> holmes.Topology:
    """Two hosts of a rank each."""
    hosts = [
        {
            "name": name,
            "ranks_per_host": 1,
            "gpu_tflops": tflops,
            "ports": [{"name": "eth0", "nic_class": "ethernet", "subnet": "wan", "speed_gbps": 25}],
        }
        for name, tflops in (("fast", 1.0), ("slow", 1.0 / slowness))
    ]
    return from_dict({"kind": "holmes topology", "version": 2, "hosts": hosts})


def plan_with(shares: Any, arguments: argparse.Namespace) -> Plan:
    """One stage, a replica on each rank."""
    return holmes.plan_for(
        topology_of(arguments.slowness),
        model_layers=LAYERS,
        pipeline=1,
        span_clusters=True,
        micro_batch=MICRO_BATCH,
        global_batch=MICRO_BATCH * arguments.micro_batches,
        data_shares=shares,
    )


class Slept(torch.autograd.Function):
    """Sleeps in the forward, and twice as long in the backward."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, seconds: float) -> torch.Tensor:
        """As torch's."""
        context.seconds = seconds
        time.sleep(seconds)
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        """As torch's."""
        time.sleep(2 * context.seconds)
        return gradient, None


def work(rank: int, port: int, arguments: argparse.Namespace, results: Any) -> None:
    """One rank: seconds of its steps with each plan."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("holmes", store=store, rank=rank, world_size=2)
    seconds = arguments.pass_ms / 3000 * (arguments.slowness if rank == 1 else 1.0) / LAYERS
    variants: dict[str, tuple[Plan, nn.Module, Any]] = {}
    for name, shares in (("equal", None), ("by speed", "speed")):
        plan = plan_with(shares, arguments)
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        weight = plan.gradient_weight(rank)
        variants[name] = plan, model, holmes.DistributedOptimizer(
            model, torch.optim.AdamW, lr=1e-3, gradient_weight=weight
        )  # fmt: skip
    taken_s: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(arguments.steps):
        for name, (plan, model, optimizer) in variants.items():
            dist.barrier()
            started_s = time.monotonic()
            count = plan.micro_batches_of(rank)
            assert count is not None
            for _ in range(count):
                values = torch.ones(MICRO_BATCH, WIDTH)
                for layer in model:
                    values = Slept.apply(layer(values), seconds)
                (values.square().mean() / count).backward()
            optimizer.step()
            optimizer.synchronize()
            optimizer.zero_grad()
            taken_s[name].append(time.monotonic() - started_s)
    results.put(taken_s)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Runs both and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slowness", type=float, default=3.0, help="times as long as the other replica computes")
    parser.add_argument("--pass-ms", type=float, default=30.0, help="of a micro-batch forward and backward, fast one")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step, both replicas together")
    parser.add_argument("--steps", type=int, default=20, help="with each; the first three do not count")
    arguments = parser.parse_args()
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [context.Process(target=work, args=(rank, server.port, arguments, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("a rank failed; its error is above")
    found = [results.get() for _ in ranks]
    # The simulator's rate: at which a micro-batch takes that long on the fast one.
    flops = MICRO_BATCH * MODEL.flops_per_sample("none")
    rates = Rates(flops / (arguments.pass_ms / 1e3) / 1e12, {"ethernet": LinkRate(25.0)})
    print("| micro-batches | step (ms) | simulated (ms) | times as fast |\n| --- | --- | --- | --- |")
    base_s = None
    for name, shares in (("equal", None), ("by speed", "speed")):
        step_s = statistics.median(max(pair) for pair in zip(*(rank[name][3:] for rank in found), strict=True))
        base_s = base_s or step_s
        plan = plan_with(shares, arguments)
        job = job_of_plan(plan, topology_of(arguments.slowness), MODEL, Framework(recomputation="none"))
        listed = [plan.micro_batches_of(rank) for rank in range(2)]
        told_s = simulate(make_step(job, rates)).step_s
        print(f"| {name}, {listed} | {step_s * 1e3:.1f} | {told_s * 1e3:.1f} | {base_s / step_s:.2f} |")


if __name__ == "__main__":
    main()
