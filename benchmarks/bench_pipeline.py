"""How much of a pipeline's traffic hides behind compute: holmes.PipelineStage beside torch's own stage.

    python benchmarks/bench_pipeline.py           # writes results/pipeline.json and results/pipeline.md

Two stages of a small GPT on the emulated testbed, one link shaped so that a micro-batch takes about as long to cross as
to compute. All variants run in the same processes and take turns; a step's time is the slower rank's, the table has
medians and ratios to torch's stage over Gloo with the same schedule.
"""

import argparse
import statistics
import sys
import time

import torch
import torch.distributed as dist
from rank_jobs import tell_result
from shaped_pair import run_pair, write_pair_results
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleavedZeroBubble

import holmes
from holmes.lab.demo.model import Batches, Stage, loss_of
from holmes.lab.demo.settings import Settings

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "zb-h1": lambda stage, *rest, **options: ScheduleInterleavedZeroBubble([stage], *rest, **options),
}
STAGES = {
    "torch, gloo": ("gloo", PipelineStage, {}),
    "torch, holmes": ("holmes", PipelineStage, {}),
    "holmes.PipelineStage": ("holmes", holmes.PipelineStage, {}),
    "holmes.PipelineStage, bfloat16 wire": (
        "holmes",
        holmes.PipelineStage,
        {"input_wire_dtype": torch.bfloat16, "output_wire_dtype": torch.bfloat16},
    ),
}


class Variant:
    """One stage class and schedule; `turn` trains a few steps."""

    def __init__(self, settings, arguments, schedule: str, title: str, group) -> None:
        self.schedule_name, self.title = schedule, title
        _, stage_class, options = STAGES[title]
        self.batches, rank = Batches(settings), dist.get_rank()
        half = settings.layers // 2
        model = Stage(settings, self.batches.vocabulary, range(rank * half, (rank + 1) * half))
        stage = stage_class(model, rank, 2, torch.device("cpu"), group=group, **options)
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        self.schedule = SCHEDULES[schedule](stage, arguments.micro_batches, loss_fn=loss_of)
        self.number = 0
        self.step_s: list[float] = []

    def step(self) -> None:
        inputs, targets = self.batches.batch(self.number)
        if dist.get_rank() == 0:
            self.schedule.step(inputs)
        else:
            self.schedule.step(target=targets)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1

    def turn(self, steps: int) -> None:
        """The first step is not counted: it meets the caches that the variant before left."""
        self.step()
        dist.barrier()
        start_s = time.monotonic()
        for _ in range(steps):
            self.step()
        taken = torch.tensor([(time.monotonic() - start_s) / steps])
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        self.step_s.append(taken.item())


def compute_s(variant: Variant, arguments) -> float:
    """Forward and backward of all micro-batches of the slower stage, both at once, nothing sent."""
    model = variant.schedule._stage.submod
    inputs = variant.batches.batch(0)[0].chunk(arguments.micro_batches)[0]
    if dist.get_rank() == 1:
        inputs = torch.randn(*inputs.shape, arguments.width, requires_grad=True)
    taken = []
    for _ in range(arguments.rounds):
        dist.barrier()
        start_s = time.monotonic()
        for _ in range(arguments.micro_batches):
            model(inputs).sum().backward()
        slowest = torch.tensor([time.monotonic() - start_s])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        taken.append(slowest.item())
    model.zero_grad()
    return statistics.median(taken)


def work(arguments) -> None:
    torch.set_num_threads(1)
    settings = Settings(
        layers=arguments.layers, width=arguments.width, sequence=arguments.sequence, global_batch=arguments.batch
    )
    dist.init_process_group("gloo")
    groups = {name: dist.new_group(backend=name) for name in ("holmes", "gloo")}
    variants = [
        Variant(settings, arguments, schedule, title, groups[STAGES[title][0]])
        for schedule in SCHEDULES
        for title in STAGES
    ]
    for variant in variants:
        variant.step()
    for _ in range(arguments.rounds):
        for variant in variants:
            variant.turn(arguments.steps)
    compute = compute_s(variants[0], arguments)
    if dist.get_rank() == 0:
        rows = [
            {"schedule": v.schedule_name, "title": v.title, "step_s": statistics.median(v.step_s), "turns_s": v.step_s}
            for v in variants
        ]
        message_bytes = 4 * settings.global_batch // arguments.micro_batches * settings.sequence * settings.width
        tell_result({"rows": rows, "compute_s": compute, "message_bytes": message_bytes})
    dist.barrier()
    dist.destroy_process_group()


def table(result: dict, rate_gbps: float, micro_batches: int) -> str:
    """Adds each row's ratio; returns the table."""
    crossing_s = 8 * result["message_bytes"] / (1e9 * rate_gbps)
    lines = [
        f"a micro-batch: {1e3 * result['compute_s'] / micro_batches:.1f} ms forward and backward, "
        f"{result['message_bytes'] / 1e6:.2f} MB, {1e3 * crossing_s:.1f} ms on the link each way; "
        f"{micro_batches} micro-batches",
        "",
        "| schedule | stage | step (ms) | torch over Gloo / this |",
        "| --- | --- | --- | --- |",
    ]
    peers = {row["schedule"]: row["step_s"] for row in result["rows"] if row["title"] == "torch, gloo"}
    for row in result["rows"]:
        row["ratio"] = peers[row["schedule"]] / row["step_s"]
        lines.append(f"| {row['schedule']} | {row['title']} | {1e3 * row['step_s']:.0f} | {row['ratio']:.2f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each variant (default 5)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn (default 3)")
    parser.add_argument("--batch", type=int, default=64, help="samples of a step (default 64)")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rate-gbps", type=float, default=0.06, help="of the link (default 0.06)")
    parser.add_argument("--dry", action="store_true", help="writes no result files")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        work(arguments)
        return 0
    result = run_pair(__file__, arguments.rate_gbps, timeout_s=600)
    text = table(result, arguments.rate_gbps, arguments.micro_batches)
    print(text)
    if not arguments.dry:
        settings = {key: value for key, value in vars(arguments).items() if key not in ("rank", "dry")}
        write_pair_results(__file__, "pipeline", "2 stages", settings, text, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
