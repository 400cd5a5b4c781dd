"""`holmes demo`."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from holmes.files import make_folder
from holmes.interrupt import ending_early
from holmes_comm.errors import UsageError

if TYPE_CHECKING:
    from holmes.lab.demo.comparison import Check
    from holmes.lab.testbed import Spec


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture and the numbers.")] = Path("demo-output"),
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps of each run; 20, of the ablation 12.")
    ] = None,
    testbed: Annotated[str, typer.Option(help="Spec of 4 nodes: a built-in name or a YAML file.")] = "two-clusters",
    ethernet: Annotated[str, typer.Option(help="The interface that all nodes share.")] = "eth0",
    plan: Annotated[Path | None, typer.Option(help="A saved plan for the Holmes run to follow.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; where left out cuda if torch has a GPU.")] = "",
    backend: Annotated[str, typer.Option(help="torch.distributed backend of the Holmes run.")] = "holmes",
    ablation: Annotated[
        bool,
        typer.Option(
            "--ablation", help="Instead: Holmes without each of its parts, a Megatron-LM-like layout, one fast cluster."
        ),
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Of the ablation: its rows take turns so many times.")] = 3,
) -> None:
    """Train a small GPT over two emulated clusters: one process, torch DDP over Gloo, and Holmes.

    Exit code 1 where losses differ or bytes took a wrong NIC, 2 where a run cannot be made, 130 after Ctrl-C, 143 after
    SIGTERM.
    """
    console = Console()
    if missing := [name for name in ("torch", "matplotlib") if find_spec(name) is None]:
        raise UsageError(f"the demo needs {' and '.join(missing)}; run: pip install 'holmes-comm[lab]'")
    from holmes.lab.demo.run_demo import planned_settings, run_demo, testbed_launch
    from holmes.lab.demo.settings import Settings, choose_device
    from holmes.lab.testbed import load_spec

    make_folder(out)
    if ablation and device == "cuda":
        raise UsageError("the ablation slows nodes down on the CPU; leave --device out")
    device = choose_device(device)
    settings = (
        Settings(steps=steps or 20, device=device) if plan is None else planned_settings(plan, steps or 20, device)
    )
    with ending_early():
        if ablation:
            checks = _ablation(console, out, steps, rounds)
        else:
            spec = load_spec(testbed)
            _check(spec, ethernet, backend)
            with testbed_launch(testbed) as launch:
                checks = run_demo(
                    settings, out, console, backend=backend, launch=launch, ethernet=ethernet, kernel=spec.kernel
                )
    if any(check.required and not check.passed for check in checks):
        raise typer.Exit(1)


def _check(spec: Spec, ethernet: str, backend: str) -> None:
    """Before the first run, which takes a while."""
    import torch.distributed as dist

    from holmes.lab.demo.run_demo import RANKS

    if len(spec.nodes) != RANKS:
        raise UsageError(
            f"--testbed {spec.name} has {len(spec.nodes)} nodes; the demo is made for {RANKS}, for example two-clusters"
        )
    for node in spec.nodes:
        if ethernet not in (names := [nic.name for nic in node.nics if nic.has_ip]):
            raise UsageError(
                f"--ethernet {ethernet}: node {node.name} of testbed {spec.name} has {', '.join(names)}; name one that "
                "all nodes have"
            )
    if backend != "holmes" and ":" not in backend and not dist.is_backend_available(backend):
        raise UsageError(f"--backend {backend} is none that this torch has; leave it out, or give gloo")


def _ablation(console: Console, out: Path, steps: int | None, rounds: int) -> list[Check]:
    from holmes.lab.demo.ablation import SETTINGS, run_ablation
    from holmes.lab.demo.ablation_table import checks_of, print_ablation, rows_of, write_ablation
    from holmes.lab.demo.run_demo import testbed_launch

    found = run_ablation(replace(SETTINGS, steps=steps or SETTINGS.steps), rounds, testbed_launch, console)
    rows = rows_of(found)
    checks = checks_of(rows)
    print_ablation(console, rows, checks)
    write_ablation(out, found, rows, checks)
    console.print(f"table: {out / 'ablation.md'}   picture: {out / 'ablation.png'}", markup=False, highlight=False)
    return checks
