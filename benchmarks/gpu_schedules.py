"""Training's schedules over several NCCL libraries on a device with few multiprocessors, as a picture:
`python benchmarks/gpu_schedules.py [--save]`.

The schedules of tests/gpu/test_gpu_schedules.py on the tests' fakes: a kernel holds its multiprocessors until those of
all its ranks are there, and takes the time that the schedule says. What is drawn is which library's kernels were on
which device when, and what is printed how long two libraries' ran side by side. It shows no GPU's time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))
RESULT = ROOT / "benchmarks" / "results" / "gpu-schedules.png"
COLORS = {
    "compute": "#b8bcc4",
    "tensor": "#d55e00",
    "data": "#0072b2",
    "pipeline": "#009e73",
    "shard": "#0072b2",
    "replica": "#cc79a7",
    "one": "#0072b2",
    "two": "#d55e00",
    "three": "#009e73",
}


class Case(NamedTuple):
    """A schedule of schedule_worker.py and the devices of it that are drawn."""

    name: str
    title: str
    multiprocessors: int
    devices: tuple[int, ...]


CASES = (
    Case("ring", "a ring of irecv and isend, a library for each pair; 48 multiprocessors", 48, (0, 1, 2)),
    Case("interleaved", "Megatron's interleaved 1F1B, one rank of each stage; 48 multiprocessors", 48, (0, 2, 4, 6)),
    Case("sharded", "FSDP2 with tensor parallelism and replicas; 132 multiprocessors", 132, (0, 7)),
)


def trace_of(case: Case) -> Any:
    """What ran where, from a run of the schedule; SystemExit where it is a deadlock."""
    import fake_gpu
    from device_trace import run_watched

    environment = fake_gpu.environment(fake_gpu.VERSIONS[-1])
    environment["FAKE_CUDA_MULTIPROCESSORS"] = str(case.multiprocessors)
    environment["PYTHONPATH"] = str(ROOT / "tests" / "helpers")
    command = [sys.executable, str(ROOT / "tests" / "workers" / "schedule_worker.py"), case.name]
    with tempfile.TemporaryDirectory() as folder:
        trace, deadlock = run_watched(command, environment, Path(folder))
    if deadlock:
        raise SystemExit(deadlock)
    return trace


def draw(axes: Any, case: Case, trace: Any) -> None:
    """A lane for each library of each device."""
    kernels = [kernel for kernel in trace.kernels() if kernel.device[1] in case.devices]
    start = min(kernel.begin for kernel in kernels)
    libraries = [name for name in COLORS if any(kernel.name == name for kernel in kernels)]
    lane, places, labels = 0, [], []
    for device in case.devices:
        places.append(lane + (len(libraries) - 1) / 2)
        labels.append(f"GPU {device}")
        for library in libraries:
            bars = [
                (1e3 * (kernel.begin - start), 1e3 * (kernel.end - kernel.begin))
                for kernel in kernels
                if (kernel.device[1], kernel.name) == (device, library)
            ]
            axes.broken_barh(bars, (lane - 0.4, 0.8), facecolors=COLORS[library], label=library)
            lane += 1
        lane += 1
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.set_title(case.title, loc="left", fontsize=9)
    axes.margins(x=0)
    axes.spines[["top", "right"]].set_visible(False)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(
        handles.values(), handles.keys(), ncols=len(handles), fontsize=8, loc="lower right", bbox_to_anchor=(1, 1)
    )


def main() -> None:
    """Runs all, prints what overlapped, draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    arguments = parser.parse_args()
    traces = [trace_of(case) for case in CASES]
    for case, trace in zip(CASES, traces, strict=True):
        print(f"{case.title}: {len(trace.kernels())} kernels, no deadlock")
        for (one, other), (both, least) in trace.overlaps().items():
            print(f"  {one} beside {other}: {1e3 * both:.1f} ms of {1e3 * least:.1f}")
    if not arguments.save:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    libraries = [len({kernel.name for kernel in trace.kernels()}) for trace in traces]
    lanes = [len(case.devices) * (1 + each) for case, each in zip(CASES, libraries, strict=True)]
    figure, rows = pyplot.subplots(len(CASES), figsize=(10, 8), height_ratios=lanes, layout="constrained")
    for axes, case, trace in zip(rows, CASES, traces, strict=True):
        draw(axes, case, trace)
    rows[-1].set_xlabel("ms")
    figure.savefig(RESULT, dpi=90)
    print(f"picture: {RESULT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
