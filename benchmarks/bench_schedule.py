"""Schedules over a distance: `python benchmarks/bench_schedule.py` makes the tables of docs/pipeline.md.

Stages of a small GPT on emulated nodes, joined by links of --rate-gbps with each of --round-trips. There the ranks time
their passes and the link, the simulator takes these numbers and `choices_of` finds each kind's warm-up; the best choice
trains beside torch's own schedules with torch's own stage, over Gloo and over the backend holmes, and beside the other
kinds with holmes.PipelineStage, all in the same processes and in turns. A step's time is the slowest rank's, the tables
have medians. All losses are compared with those of one process that trains the whole model. The choice follows from
what was timed before the turns; the predictions in the tables from the medians of that and what was timed between
them, as other processes slow all down for minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.distributed.pipelining as torch_pipelining
from rank_jobs import tell_result
from shaped_pair import run_pair, write_pair_results

import holmes
from holmes.cluster.topology import Topology
from holmes.lab.demo.model import Batches, Stage, loss_of
from holmes.lab.demo.settings import Settings
from holmes.planning import simulate as model
from holmes.planning.schedule import in_flight
from holmes.planning.simulate.best import choices_of, ranked
from holmes.training.pipeline.backward import backward_inputs

CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1}
CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
}
PASSES = ("forward_s", "backward_s", "weight_share", "dividing_s", "optimizer_s")
STREAMED = 8  # messages of which the link's rate is measured


class Bench:
    """What the ranks share."""

    def __init__(self, arguments) -> None:
        self.arguments = arguments
        self.settings = Settings(
            layers=arguments.layers, width=arguments.width, sequence=arguments.sequence, global_batch=arguments.batch
        )
        self.batches = Batches(self.settings)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.groups = {name: dist.new_group(backend=name) for name in ("holmes", "gloo")}

    def layers(self, part: int, parts: int) -> range:
        each = self.settings.layers // parts
        return range(part * each, (part + 1) * each)

    def module(self, part: int, parts: int) -> Stage:
        return Stage(self.settings, self.batches.vocabulary, self.layers(part, parts))

    def gathered(self, value):
        found = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def stage_times(self, times: int) -> model.Stage:
        """Of this rank's passes, all ranks at once, while messages go both ways as they do in a step."""
        module, arguments = self.module(self.rank, self.size), self.arguments
        sent, received = (torch.zeros(self.message_bytes // 4) for _ in range(2))
        peers, group = [rank for rank in (self.rank - 1, self.rank + 1) if 0 <= rank < self.size], self.groups["holmes"]
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        inputs, targets = (batch.chunk(arguments.micro_batches)[0] for batch in self.batches.batch(0))
        if self.rank > 0:
            inputs = torch.randn(*inputs.shape, arguments.width, requires_grad=True)
        taken = {name: [] for name in ("forward", "backward", "inputs", "weights", "optimizer")}

        def timed(name, call):
            start_s = time.perf_counter()
            found = call()
            taken[name].append(time.perf_counter() - start_s)
            return found

        def forward():
            output = module(inputs)
            return loss_of(output, targets) if module.is_last else output

        dist.barrier()
        for _ in range(times):
            works = [dist.irecv(received, peer, group=group) for peer in peers for _ in range(2)]
            works += [dist.isend(sent, peer, group=group) for peer in peers for _ in range(2)]
            output = timed("forward", forward)
            timed("backward", lambda output=output: output.backward(torch.ones_like(output)))
            output = forward()
            _, left = timed(
                "inputs", lambda output=output: backward_inputs([output], [torch.ones_like(output)], [inputs])
            )
            timed("weights", left.run)
            timed("optimizer", lambda: (optimizer.step(), optimizer.zero_grad()))
            for work in works:
                work.wait()
        s = {name: statistics.median(values) for name, values in taken.items()}
        divided_s = s["inputs"] + s["weights"]
        return model.Stage(
            s["forward"],
            s["backward"],
            s["weights"] / divided_s,
            max(divided_s - s["backward"], 0.0),
            optimizer_s=s["optimizer"],
        )

    @contextmanager
    def computing(self):
        """All ranks compute beside what is done: that, and not an idle processor, is what a step's messages meet."""
        module, inputs = self.module(self.rank, self.size), self.batches.batch(0)[0][: self.arguments.micro_batches]
        if self.rank > 0:
            inputs = torch.randn(*inputs.shape, self.arguments.width)
        is_over = threading.Event()

        def work() -> None:
            while not is_over.is_set():
                module(inputs).sum().backward()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def link(self, message_bytes: int) -> dict:
        """Seconds that a message is under way beside its bytes, and bytes per second; of ranks 0 and 1, timed by 0."""
        group, data = self.groups["holmes"], torch.zeros(message_bytes // 4)
        word, found = torch.zeros(1), {}
        peer = 1 - self.rank
        if self.rank < 2:
            trips_s, streams_s = [], []
            for _ in range(self.arguments.calibration + 1):
                start_s = time.perf_counter()
                for turn in (0, 1):
                    (dist.send if turn == self.rank else dist.recv)(word, peer, group=group)
                trips_s.append(time.perf_counter() - start_s)
                start_s = time.perf_counter()
                works = [(dist.irecv if self.rank else dist.isend)(data, peer, group=group) for _ in range(STREAMED)]
                for work in works:
                    work.wait()
                (dist.send if self.rank else dist.recv)(word, peer, group=group)
                streams_s.append(time.perf_counter() - start_s)
            trip_s, stream_s = statistics.median(trips_s[1:]), statistics.median(streams_s[1:])
            found = {"message_s": trip_s / 2, "bytes_per_s": STREAMED * message_bytes / max(stream_s - trip_s, 1e-9)}
        return self.gathered(found)[0]


class Variant:
    """A schedule, its stages and what it took; `turn` trains a few steps."""

    def __init__(self, bench: Bench, title: str, schedule: str, backend: str, own: bool, warmup=None, group=None):
        self.bench, self.title, self.kind, self.backend = bench, title, schedule, backend
        self.warmup, self.group, self.predicted_s = warmup, group, None
        arguments, size, chunks = bench.arguments, bench.size, CHUNKS[schedule]
        modules = [bench.module(chunk * size + bench.rank, size * chunks) for chunk in range(chunks)]
        cls = holmes.PipelineStage if own else torch_pipelining.PipelineStage
        stages = [
            cls(
                module,
                chunk * size + bench.rank,
                size * chunks,
                torch.device("cpu"),
                group=bench.groups[backend],
            )
            for chunk, module in enumerate(modules)
        ]
        if own:
            plan = self.plan()
            self.schedule = holmes.pipeline_schedule(plan, stages, loss_of, micro_batches=arguments.micro_batches)
        else:
            taken = stages[0] if schedule in ("gpipe", "1f1b") else stages
            cls = getattr(torch_pipelining, CLASSES[schedule])
            self.schedule = cls(taken, arguments.micro_batches, loss_fn=loss_of)
        self.optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], fused=True)
        self.number, self.step_s, self.losses = 0, [], []

    def plan(self) -> holmes.Plan:
        size, chunks, layers = self.bench.size, CHUNKS[self.kind], self.bench.settings.layers
        port = {"name": "eth0", "nic_class": "ethernet", "subnet": "a", "speed_gbps": 1}
        hosts = [{"count": size, "name": "a{}", "ranks_per_host": 1, "ports": [port]}]
        topology = Topology.from_dict({"kind": "holmes topology", "version": 2, "hosts": hosts})
        return holmes.plan_for(
            topology,
            model_layers=layers,
            pipeline=size,
            chunks=chunks,
            schedule=self.kind,
            micro_batch=1,
            global_batch=self.bench.arguments.micro_batches,
            warmup=self.warmup,
            micro_batch_group=self.group,
        )

    def step(self) -> None:
        inputs, targets = self.bench.batches.batch(self.number)
        is_last, losses = self.bench.rank == self.bench.size - 1, []
        if self.bench.rank == 0:
            self.schedule.step(inputs)
        else:
            self.schedule.step(**({"target": targets, "losses": losses} if is_last else {}))
        self.losses += [torch.stack(losses).mean().item()] if is_last else []
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1

    def turn(self, steps: int) -> None:
        """The first step is not counted: it meets the caches that the variant before left."""
        self.step()
        for _ in range(steps):
            dist.barrier()
            start_s = time.monotonic()
            self.step()
            dist.barrier()
            self.step_s.append(time.monotonic() - start_s)


def one_process(bench: Bench, steps: int) -> list[float]:
    """Losses of the whole model."""
    module = bench.module(0, 1)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    losses = []
    for number in range(steps):
        inputs, targets = bench.batches.batch(number)
        loss = loss_of(module(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def simulated_step(bench: Bench, link: dict, stages: list, kind: str) -> model.Step:
    """Of a schedule, from what was timed."""
    count, boundaries = bench.arguments.micro_batches, []
    links = {f"{rank} {way}": link["bytes_per_s"] for rank in range(bench.size) for way in ("out", "in")}
    for rank in range(bench.size if CHUNKS[kind] > 1 else bench.size - 1):
        other = (rank + 1) % bench.size
        there, back = (
            model.Route({f"{a} out": 1.0, f"{b} in": 1.0}, link["message_s"]) for a, b in ((rank, other), (other, rank))
        )
        boundaries.append(model.Boundary(there, back, bench.message_bytes))
    return model.Step(tuple(stages), tuple(boundaries), links, count, kind, CHUNKS[kind], global_norm=False)


def chosen_of(bench: Bench, link: dict, stages: list, limit: int) -> model.ScheduleChoice:
    """The best of all kinds, equal on all ranks."""
    steps = [simulated_step(bench, link, stages, kind) for kind in CHUNKS]
    return ranked([choice for step in steps for choice in choices_of(step, [limit] * bench.size)])[0]


def median_of(passes: tuple) -> model.Stage:
    """Of what a stage took, as the tables' steps are medians."""
    return model.Stage(**{name: statistics.median(getattr(one, name) for one in passes) for name in PASSES})


def held_of(variant: Variant, count: int, size: int) -> int:
    """Micro-batches in flight of the first stage, of its whole model."""
    moments = in_flight(variant.kind, size, CHUNKS[variant.kind], count, 0, variant.warmup, variant.group)
    return int(-(-moments.sum(axis=1).max() // CHUNKS[variant.kind]))


def work(arguments) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    bench = Bench(arguments)
    bench.message_bytes = 4 * arguments.batch // arguments.micro_batches * arguments.sequence * arguments.width
    timed = [bench.gathered(bench.stage_times(arguments.calibration))]
    with bench.computing():
        link = bench.link(bench.message_bytes)
    limit = arguments.most_in_flight or arguments.micro_batches
    best = chosen_of(bench, link, timed[0], limit)
    variants = [
        Variant(bench, f"torch's stage over {backend}", kind, backend, own=False)
        for backend in ("gloo", "holmes")
        for kind in CHUNKS
    ]
    variants += [Variant(bench, "holmes.PipelineStage", kind, "holmes", own=True) for kind in CHUNKS]
    chosen = Variant(bench, "chosen", best.schedule, "holmes", own=True, warmup=best.warmup, group=best.group)
    variants.append(chosen)
    for variant in variants:
        variant.step()
    for _ in range(arguments.rounds):
        for variant in variants:
            variant.turn(arguments.steps)
            timed.append(bench.gathered(bench.stage_times(2)))
    stages = [median_of(passes) for passes in zip(*timed, strict=True)]
    for variant in variants[-len(CHUNKS) - 1 :]:
        step = simulated_step(bench, link, stages, variant.kind)
        variant.predicted_s = model.simulate(replace(step, warmup=variant.warmup, group=variant.group)).step_s
    losses = bench.gathered([variant.losses for variant in variants])[-1]
    if bench.rank == 0:
        alone = one_process(bench, variants[0].number)
        rows = [
            {
                "schedule": v.kind,
                "title": v.title,
                "warmup": v.warmup,
                "group": v.group,
                "step_s": statistics.median(v.step_s),
                "steps_s": v.step_s,
                "predicted_s": v.predicted_s,
                "held": held_of(v, arguments.micro_batches, bench.size),
                "loss_difference": max(abs(a / b - 1) for a, b in zip(mine, alone, strict=True)),
            }
            for v, mine in zip(variants, losses, strict=True)
        ]
        stages_s = [{name: getattr(one, name) for name in PASSES} for one in stages]
        result = {"rows": rows, "link": link, "stages": stages_s, "limit": limit}
        tell_result({**result, "message_bytes": bench.message_bytes})
    dist.barrier()
    dist.destroy_process_group()


def table(result: dict, round_trip_ms: float, micro_batches: int) -> str:
    """Adds what follows from the rows; returns the table of one round trip."""
    rows = result["rows"]
    chosen = rows[-1]
    torchs = [row for row in rows if row["title"].startswith("torch's") and row["held"] <= result["limit"]]
    over_gloo = [row for row in torchs if row["title"].endswith("gloo")]
    result["best_of_torch_s"] = min(row["step_s"] for row in over_gloo)
    result["gain"] = result["best_of_torch_s"] / chosen["step_s"]
    result["gain_over_any"] = min(row["step_s"] for row in torchs) / chosen["step_s"]
    result["error_percent"] = 100 * (chosen["predicted_s"] / chosen["step_s"] - 1)
    passes = [f"{1e3 * (one['forward_s'] + one['backward_s']):.0f}" for one in result["stages"]]
    link = result["link"]
    room = "" if result["limit"] >= micro_batches else f" Memory for {result['limit']} in flight."
    first = "" if chosen["warmup"] is None else f" with {list(chosen['warmup'])} forwards first"
    first += "" if chosen["group"] is None else f" in groups of {chosen['group']}"
    lines = [
        f"Round trip {round_trip_ms:g} ms.{room} A micro-batch of {micro_batches}: {' and '.join(passes)} ms of "
        "compute, "
        f"{1e3 * result['message_bytes'] / link['bytes_per_s']:.0f} ms on the link each way and "
        f"{1e3 * link['message_s']:.1f} ms of way. Chosen: {chosen['schedule']}{first}; "
        f"{result['gain']:.2f}x the best of torch's over Gloo, {result['gain_over_any']:.2f}x the best of torch's "
        f"stage over either backend{'' if result['limit'] >= micro_batches else ', of those that hold no more'}.",
        "",
        "| schedule | stage | in flight | step (ms) | predicted (ms) | error | loss differs by |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        predicted_s = row["predicted_s"]
        text = "" if predicted_s is None else f"{1e3 * predicted_s:.0f}"
        error = "" if predicted_s is None else f"{100 * (predicted_s / row['step_s'] - 1):+.0f} %"
        lines.append(
            f"| {row['schedule']} | {row['title']} | {row['held']} | {1e3 * row['step_s']:.0f} | {text} | {error} | "
            f"{row['loss_difference']:.0e} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each variant (default 3)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn (default 3)")
    parser.add_argument("--stages", type=int, default=2, help="nodes with a stage each (default 2)")
    parser.add_argument("--batch", type=int, default=64, help="samples of a step (default 64)")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--most-in-flight", type=int, default=0, help="of a stage's memory (default: all)")
    parser.add_argument("--sequence", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--calibration", type=int, default=8, help="times that a pass and the link are timed")
    parser.add_argument("--rate-gbps", type=float, default=0.1, help="of the link (default 0.1)")
    parser.add_argument("--round-trips", default="0,20,80", help="ms (default 0,20,80)")
    parser.add_argument("--dry", action="store_true", help="writes no result files")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        work(arguments)
        return 0
    results, texts = [], []
    for round_trip_ms in map(float, arguments.round_trips.split(",")):
        found = run_pair(
            __file__, arguments.rate_gbps, timeout_s=900, round_trip_ms=round_trip_ms, nodes=arguments.stages
        )
        texts.append(table(found, round_trip_ms, arguments.micro_batches))
        results.append({"round_trip_ms": round_trip_ms, **found})
        print(texts[-1], flush=True)
        if not arguments.dry:
            settings = {key: value for key, value in vars(arguments).items() if key not in ("rank", "dry")}
            ranks = f"{arguments.stages} stages"
            write_pair_results(
                __file__, "schedule", ranks, settings, "\n\n".join(texts), {"cells": results}, nodes=arguments.stages
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
