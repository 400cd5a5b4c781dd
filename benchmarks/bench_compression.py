"""What less across costs and gains: `python benchmarks/bench_compression.py` makes the table of docs/optimizer.md.

A small GPT trained by data parallelism over two emulated clusters of two nodes, joined by `--rate-mbps` with a round
trip: the demo's model and data, holmes.DistributedOptimizer without and with compression of what crosses. Each variant
trains from the same weights on the same batches; the table has its losses beside those of the first, which sends all as
it is, and the median step (the slowest rank's) of turns in which the variants follow each other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

from rank_jobs import parse_or_work, results_of, tell_result
from result_files import write_results
from two_clusters import spec_of_clusters

VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "gradients bf16": {"compress_gradients": "bf16"},
    "gradients int8": {"compress_gradients": "int8"},
    "gradients int4": {"compress_gradients": "int4"},
    "parameters int8": {"compress_parameters": "int8"},
    "both int8": {"compress_gradients": "int8", "compress_parameters": "int8"},
    "both int4": {"compress_gradients": "int4", "compress_parameters": "int4"},
}


def work(job: dict[str, Any]) -> None:
    """What every rank runs; rank 0 prints losses and seconds by variant as JSON."""
    import torch
    import torch.distributed as dist

    import holmes
    from holmes.lab.demo.model import Batches, Stage, loss_of
    from holmes.lab.demo.settings import Settings

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    os.environ["HOLMES_CLUSTER"] = "ab"[rank // 2]
    dist.init_process_group("holmes")
    size = dist.get_world_size()
    settings = Settings(layers=job["layers"], width=job["width"], global_batch=4 * size, sequence=32)
    batches = Batches(settings)
    runs = {}
    for name in job["variants"]:
        model = Stage(settings, batches.vocabulary, range(settings.layers))
        runs[name] = model, holmes.DistributedOptimizer(model, torch.optim.AdamW, lr=1e-3, **VARIANTS[name])
    losses: dict[str, list[float]] = {name: [] for name in runs}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for first in range(0, job["steps"], job["turn"]):
        for name, (model, optimizer) in runs.items():
            for step in range(first, first + job["turn"]):
                inputs, targets = (part.chunk(size)[rank] for part in batches.batch(step))
                start_s = time.perf_counter()
                loss = loss_of(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found = torch.stack([loss.detach().double(), torch.tensor(time.perf_counter() - start_s).double()])
                table = torch.empty(size, 2, dtype=torch.float64)
                dist.all_gather_into_tensor(table, found)
                losses[name].append(table[:, 0].mean().item())
                if step > first:  # the first of a turn waits for the one before it
                    seconds[name].append(table[:, 1].max().item())
            optimizer.synchronize()
    if rank == 0:
        parameters = sum(p.numel() for p in model.parameters())
        tell_result({"losses": losses, "seconds": seconds, "parameters": parameters})
    dist.barrier()
    dist.destroy_process_group()


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The job on the testbed."""
    from holmes.lab.testbed import Testbed

    uplink = {"rate_gbps": arguments.rate_mbps / 1e3, "delay_ms": arguments.round_trip_ms / 2}
    job = {name: getattr(arguments, name) for name in ("steps", "turn", "layers", "width", "variants")}
    with Testbed(spec_of_clusters("compression", 2, uplink)).session() as session:
        outcome = session.launch([sys.executable, __file__, "--rank", json.dumps(job)]).wait(3000.0)
    return results_of(outcome)[0]


def table(result: dict[str, Any]) -> str:
    """Losses of the last tenth of the steps, and step times, by variant."""
    last = max(1, len(next(iter(result["losses"].values()))) // 10)
    losses = {name: statistics.mean(found[-last:]) for name, found in result["losses"].items()}
    steps = {name: statistics.median(found) for name, found in result["seconds"].items()}
    first = next(iter(losses))
    rows = [
        f"| {name} | {losses[name]:.4f} | {losses[name] / losses[first] - 1:+.2%} | {steps[name] * 1e3:.0f} | "
        f"{steps[first] / steps[name]:.2f} |"
        for name in losses
    ]
    head = "| what crosses | loss at the end | beside the first | step (ms) | times as fast |\n|" + " --- |" * 5
    return "\n".join([head, *rows])


def main() -> None:
    """Runs all variants, prints the table, writes JSON and Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate-mbps", type=float, default=100, help="of the uplinks (default 100)")
    parser.add_argument("--round-trip-ms", type=float, default=20)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--turn", type=int, default=10, help="steps of a variant before the next one's turn")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--save", action="store_true", help="write results/compression.json and .md")
    arguments = parse_or_work(parser, work)
    result = run(arguments)
    text = table(result)
    print(text)
    if arguments.save:
        write_results(
            __file__,
            "compression",
            heading=f"Less across: {result['parameters'] / 1e6:.1f} million parameters, two clusters of two nodes, "
            f"{arguments.rate_mbps:g} Mbit/s and {arguments.round_trip_ms:g} ms between them, emulated",
            notes=f"{arguments.steps} steps; losses are means of the last tenth of them.",
            ranks=4,
            settings={"rate_mbps": arguments.rate_mbps, "round_trip_ms": arguments.round_trip_ms},
            text=text,
            result=result,
        )


if __name__ == "__main__":
    main()
