"""The demo itself: three runs, their comparison, the files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from holmes.lab.demo.comparison import Check, check_runs, print_report, write_result
from holmes.lab.demo.runs import Launch, Run, launch_here
from holmes.lab.demo.settings import Settings
from holmes.lab.demo.timeline import draw_timeline
from holmes.planning.plan.plan import Plan
from holmes_comm.errors import UsageError

RANKS = 4
RUN_TIMEOUT_S = 240.0
_KERNELS_TIMEOUT_S = 900.0  # of nodes that are kernels of their own: torch alone takes them minutes to load

_EMULATED = (
    "Emulated: the 4 nodes are network namespaces of this machine, their links veth pairs limited by tc tbf "
    "(InfiniBand-like and RoCE-like: 1 Gbit/s, Ethernet: 0.1 Gbit/s); the NIC classes come from a fake sysfs, the fast "
    "links carry TCP, not RDMA; all compute runs on this machine's {}, which the nodes share."
)


_KERNELS = (
    "Emulated: the 4 nodes are user-mode Linux kernels on this machine, their HCAs are Soft-RoCE without IP address; "
    "verbs, packets and the HCAs' counters are real, the speed is not (Ethernet: limited to 0.1 Gbit/s, RDMA: what "
    "this machine's CPU cores, which the nodes share, give)."
)


def emulated(device: str, kernel: str = "host") -> str:
    """What of the demo is not real, in a sentence; `device` as in Settings, `kernel` as in the testbed's spec."""
    return _KERNELS if kernel == "uml" else _EMULATED.format("CPU cores" if device == "cpu" else "GPU")


def make_runs(backend: str, ethernet: str | None) -> list[Run]:
    """The single process, Gloo on the network all share (`ethernet`; None: its default) and Holmes."""
    gloo_title, env = "DDP over Gloo", {}
    if ethernet:
        gloo_title, env = f"DDP over Gloo, {ethernet}", {"GLOO_SOCKET_IFNAME": ethernet}
    return [
        Run("single", "one process", "holmes.lab.demo.train_single", "none", ranks=1),
        Run("gloo", gloo_title, "holmes.lab.demo.train_gloo", "gloo", RANKS, env),
        Run("holmes", "Holmes", "holmes.lab.demo.train_holmes", backend, RANKS),
    ]


def planned_settings(path: Path, steps: int, device: str = "cpu") -> Settings:
    """Settings for a saved plan. Raises ValueError where the demo's model and four ranks cannot follow it."""
    plan = Plan.load(path)
    sizes = {name: getattr(plan, name) for name in ("tensor", "context", "expert", "chunks")}
    if plan.world_size != RANKS or set(sizes.values()) != {1}:
        given = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise UsageError(
            f"{path} is a plan for {plan.world_size} ranks with {given}, but the demo has {RANKS} ranks and only data "
            f"and pipeline parallelism; plan for {RANKS} ranks with these sizes 1"
        )
    layers = sum(plan.layers_per_stage)
    return Settings(steps=steps, layers=layers, pipeline=plan.pipeline, plan=str(path.resolve()), device=device)


@contextmanager
def testbed_launch(spec: str) -> Iterator[Launch]:
    """A testbed, up for the duration of the context; yields what runs a command on each of its nodes.

    Raises TestbedError, which says what to do, where this machine forbids it.
    """
    from holmes.lab.testbed import Testbed

    testbed = Testbed(spec)
    timeout_s = _KERNELS_TIMEOUT_S if testbed.spec.kernel == "uml" else RUN_TIMEOUT_S
    with testbed.session() as session:

        def launch(command: Sequence[str], env: Mapping[str, str], on_line: Callable[[str], None]) -> int:
            job = session.launch(command, env=env, on_line=lambda rank, node, line: on_line(line))
            return job.wait(timeout_s).returncode

        yield launch


def progress_note(run: Run) -> str:
    """What stands beside a run's bar: at its end the same step as in the table."""
    loss = next(report["loss"] for report in reversed(run.steps) if report["loss"] is not None)
    return f"loss {loss:.3f}, {1000 * run.step_s():.0f} ms/step"


def run_demo(
    settings: Settings,
    out: Path,
    console: Console,
    *,
    backend: str,
    launch: Launch,
    ethernet: str | None,
    kernel: str = "host",
) -> list[Check]:
    """Trains three times, prints the tables and writes `out`/timeline.png and `out`/result.json; returns the checks.

    `kernel`: of the nodes, as in their spec. Raises RunFailed where a run ends with an error.
    """
    console.print(emulated(settings.device, kernel), highlight=False)
    runs = make_runs(backend, ethernet)
    note = TextColumn("{task.fields[note]}")
    columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), note)
    with Progress(*columns, console=console) as progress:
        for run in runs:
            task = progress.add_task(run.title, total=settings.steps, note="starting")

            def show(done: int, run: Run = run, task: int = task) -> None:
                progress.update(task, completed=done, note=progress_note(run))  # type: ignore[arg-type]

            run.execute(settings, launch_here if run.ranks == 1 else launch, show)
    single, gloo, ours = runs
    console.print(Plan.from_dict(ours.plan() or {}).describe(), highlight=False, markup=False)
    checks = check_runs(settings, single, gloo, ours)
    print_report(console, settings, runs, checks)
    out.mkdir(parents=True, exist_ok=True)
    draw_timeline(out / "timeline.png", gloo, ours)
    write_result(out / "result.json", settings, runs, checks, emulated(settings.device, kernel))
    console.print(f"picture: {out / 'timeline.png'}   numbers: {out / 'result.json'}", markup=False, highlight=False)
    return checks
