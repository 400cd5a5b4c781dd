"""How much of the data-parallel traffic hides behind compute: holmes.DistributedOptimizer, DDP, FSDP2 and ZeRO-1.

    python benchmarks/bench_overlap.py            # writes results/overlap.json and results/overlap.md
    python benchmarks/bench_overlap.py --only DDP --keep                # these beside what the files have
    python benchmarks/bench_overlap.py --rounds 3 --trace /tmp/overlap  # Chrome traces of DistributedOptimizer

Two ranks of a small GPT on the emulated testbed, one link shaped so that communication takes about as long as compute.
The variants of a run take turns in the same processes (rounds of a few steps each); a step's time is the slower rank's,
the table has medians. compute: forward, backward and the optimizer on half of the parameters, both ranks at once,
nothing sent but a step's last word, for which the faster rank waits, as in any synchronous step. communication: the
same buckets' reduce-scatters and all-gathers, nothing computed. bound: the larger of the two. hidden: 1 - (step -
compute) / communication, the same formula for all; all of the same run. calm: turns without other processes on the
cores; where there is one, only those count.

Compute as on an accelerator: every linear layer takes its share of --pause-s without a processor, beside a small
batch's real computation. `--pause-s 0 --batch 60` (writes overlap-cores.*) computes as long on the processors: with one
thread per rank they fill a two-core machine, and what moves bytes takes its time from them.
"""

import argparse
import json
import statistics
import sys
import time

import torch
import torch.distributed as dist
from overlap_variants import Ours, PacedSettings, Variant, make_variants
from rank_jobs import tell_result
from result_files import RESULTS
from shaped_pair import run_pair, write_pair_results

import holmes
from holmes.lab.demo.model import Batches

HIDDEN_GOAL, BOUND_GOAL = 0.85, 1.15
OURS = "DistributedOptimizer, holmes"
CALM_CORES = 0.25  # turns in which other processes kept more cores busy count only where no turn was calm
SETTINGS = ("batch", "sequence", "layers", "width", "rate_gbps", "pause_s", "bucket_bytes", "steps")


def communication_s(optimizer: holmes.DistributedOptimizer, rounds: int) -> float:
    """The buckets' reduce-scatters, then their all-gathers, with nothing beside them."""
    runtime, lanes = optimizer._runtime, (optimizer._reduce_lane, optimizer._gather_lane)
    taken = []
    for _ in range(rounds):
        dist.barrier()
        start_s = time.monotonic()
        for start in (
            [lambda s=s: lanes[0].reduce_scatter(0, s.gradient_shard, s.gradients) for s in runtime.storages],
            [lambda s=s: lanes[1].all_gather(0, s.values, s.value_shard) for s in runtime.storages],
        ):
            for transfer in [call() for call in start]:
                transfer.wait()
        slowest = torch.tensor([time.monotonic() - start_s])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        taken.append(slowest.item())
        for lane in lanes:
            lane.collect()
    return statistics.median(taken)


def checks_s(optimizer: holmes.DistributedOptimizer, rounds: int = 50) -> float:
    """What a step spends on noticing what was changed from outside (docs/optimizer.md), on this rank."""
    runtime, taken = optimizer._runtime, []
    for _ in range(rounds):
        start_s = time.perf_counter()
        optimizer._check_model()
        runtime.reducer.disturbed()
        for storage in runtime.storages:
            storage.adopt()  # when its bucket is sent, and in step
            storage.adopt()
            storage.fingerprint()  # when its shard steps, and in step
            storage.fingerprint()
        taken.append(time.perf_counter() - start_s)
    return statistics.median(taken)


def work(arguments) -> None:
    torch.set_num_threads(1)
    settings = PacedSettings(
        layers=arguments.layers,
        width=arguments.width,
        sequence=arguments.sequence,
        global_batch=2 * arguments.batch,
        pause_s=arguments.pause_s,
    )
    dist.init_process_group("gloo")
    groups = {name: dist.new_group(backend=name) for name in ("holmes", "gloo")}
    batches = Batches(settings)
    chosen = make_variants(settings, batches, groups, arguments.bucket_bytes, arguments.only)
    ours = next(v for v in chosen if isinstance(v, Ours))
    for variant in chosen:  # warms up, records the order of use
        for _ in range(3):
            variant.step()
    for _ in range(arguments.rounds):
        for variant in chosen:
            dist.barrier()
            variant.turn(arguments.steps)
    if arguments.trace:
        with ours.optimizer.tracing(f"{arguments.trace}-{dist.get_rank()}.json"):
            for _ in range(3):
                ours.step()
    communication = communication_s(ours.optimizer, arguments.rounds)
    if dist.get_rank() == 0:
        tell_result({"rows": rows_of(chosen, communication)})
    dist.barrier()
    dist.destroy_process_group()


def rows_of(variants: list[Variant], communication: float) -> list[dict]:
    """Each variant's figures beside the compute and communication of the same run."""
    compute = typical(variants[0].step_s, variants[0].others_cores)
    rows = []
    for variant in variants[1:]:
        step = typical(variant.step_s, variant.others_cores)
        row = {
            "title": variant.title,
            "step_s": step,
            "compute_s": compute,
            "communication_s": communication,
            "times_bound": step / max(compute, communication),
            "hidden": 1 - (step - compute) / communication,
            "cpu_s": typical(variant.cpu_s, variant.others_cores),
            "compute_cpu_s": typical(variants[0].cpu_s, variants[0].others_cores),
            "turns_s": variant.step_s,
            "compute_turns_s": variants[0].step_s,
            "others_cores": variant.others_cores,
            "calm_turns": min(calm_turns(variant.others_cores), calm_turns(variants[0].others_cores)),
            "date": time.strftime("%Y-%m-%d %H:%M"),
        }
        if isinstance(variant, Ours):
            steady = variant.reports[5:]
            row["reported"] = {
                "communication_s": statistics.median(r.communication_s for r in steady),
                "exposed_s": statistics.median(r.exposed_s for r in steady),
                "last": steady[-1].summary(),
                "buckets": len(variant.optimizer._runtime.storages),
                "bucket_bytes": variant.optimizer._bucket_bytes,
                "checks_s": checks_s(variant.optimizer),
            }
        rows.append(row)
    return rows


def calm_turns(others_cores: list[float]) -> int:
    return sum(cores <= CALM_CORES for cores in others_cores)


def typical(values: list[float], others_cores: list[float]) -> float:
    """The median over the calm turns, or over all where none was."""
    calm = [v for v, cores in zip(values, others_cores, strict=True) if cores <= CALM_CORES]
    return statistics.median(calm or values)


def table(rows: list[dict]) -> str:
    lines = [
        "| variant | step (ms) | compute, communication (ms) | times bound | hidden | processor time: step, compute "
        "(ms) | reported: communication, exposed (ms) | calm turns |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        reported = row.get("reported")
        own = f"{1e3 * reported['communication_s']:.0f}, {1e3 * reported['exposed_s']:.1f}" if reported else "-"
        lines.append(
            f"| {row['title']} | {1e3 * row['step_s']:.0f} | {1e3 * row['compute_s']:.0f}, "
            f"{1e3 * row['communication_s']:.0f} | {row['times_bound']:.2f} | {row['hidden']:.0%} | "
            f"{1e3 * row['cpu_s']:.0f}, {1e3 * row['compute_cpu_s']:.0f} | {own} "
            f"| {row['calm_turns']} of {len(row['turns_s'])} |"
        )
    return "\n".join(lines)


def goals_met(rows: list[dict]) -> bool:
    ours = [row for row in rows if row["title"] == OURS]
    others = [row["times_bound"] for row in rows if row["title"] != OURS]
    return bool(ours) and all(
        row["calm_turns"]
        and row["hidden"] >= HIDDEN_GOAL
        and row["times_bound"] <= BOUND_GOAL
        and row["times_bound"] < min(others, default=1e9)
        for row in ours
    )


def with_kept(name: str, rows: list[dict], settings: dict) -> list[dict]:
    """`rows` and those of the result file whose variants were not run now, where its settings are the same."""
    if not (RESULTS / f"{name}.json").exists():
        return rows
    kept = json.loads((RESULTS / f"{name}.json").read_text())
    if any(kept["settings"].get(key) != value for key, value in settings.items()):
        raise SystemExit(f"--keep: {name}.json was measured with {kept['settings']}, not {settings}; run all again")
    titles = [row["title"] for row in rows]
    return [*rows, *(row for row in kept["rows"] if row["title"] not in titles)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each variant (default 5)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a turn (default 4)")
    parser.add_argument("--batch", type=int, default=2, help="samples per rank (default 2)")
    parser.add_argument("--sequence", type=int, default=32)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rate-gbps", type=float, default=0.25, help="of the link (default 0.25)")
    parser.add_argument(
        "--pause-s", type=float, default=0.85, help="of a step, spent without a processor (default 0.85)"
    )
    parser.add_argument("--bucket-bytes", type=int, help="of DistributedOptimizer (default: from the measured link)")
    parser.add_argument("--only", nargs="*", help="these, besides ours: titles that hold one of the words")
    parser.add_argument("--trace", help="writes Chrome traces of three steps to TRACE-<rank>.json")
    parser.add_argument("--keep", action="store_true", help="keeps the result file's rows of variants not run now")
    parser.add_argument("--dry", action="store_true", help="writes no result files")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        work(arguments)
        return 0
    rows = run_pair(__file__, arguments.rate_gbps, timeout_s=900)["rows"]
    settings = {key: value for key, value in vars(arguments).items() if key in SETTINGS}
    name = "overlap" if arguments.pause_s else "overlap-cores"
    if arguments.keep:
        rows = with_kept(name, rows, settings)
    text, met = table(rows), goals_met(rows)
    print(text)
    for row in rows:
        if "reported" in row:
            checks_ms = 1e3 * row["reported"]["checks_s"]
            print(f"{row['title']}: {row['reported']['buckets']} buckets, checks {checks_ms:.2f} ms a step")
            print(row["reported"]["last"])
    if not arguments.dry:
        write_pair_results(__file__, name, "2 ranks", settings, text, {"rows": rows})
    print("all goals met" if met else "a goal is missed")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
