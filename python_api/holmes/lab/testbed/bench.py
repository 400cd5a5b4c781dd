"""Starts the ranks of a benchmark on emulated nodes, as one MPI job where a peer needs it."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from holmes.lab.testbed.check import slowness, too_slow
from holmes.lab.testbed.fabric import enter_node, node_env
from holmes.lab.testbed.launch import RunningJob, Testbed, TestbedSession, place_ranks, rank_environment
from holmes.lab.testbed.spec import load_spec
from holmes.tools.bench.job_network import FD_VARIABLE
from holmes.tools.bench.launch import MPI_ENVIRONMENT, mpirun, rank_arguments
from holmes.tools.bench.settings import Output, Settings

# Any free descriptor that no program in between uses.
_JOB_NETWORK_FD = 9


def launch_on_testbed(
    settings: Settings,
    output: Output,
    spec_name: str,
    nproc_per_node: int = 1,
    congestion_control: str | None = None,
    name_clusters: bool = False,
) -> int:
    """Builds the testbed, runs the ranks on its nodes, and returns the exit status.

    `spec_name`: a built-in one's name or a file; `congestion_control`: TCP's default on the nodes, for all libraries
    alike (None: as the spec says); `name_clusters`: ours knows the spec's clusters. Where links with delay or loss were
    slower than they should be, a line on standard error says so. Raises SpecError, TestbedError where it cannot be
    built, PeerError where there is no mpirun and a peer needs it.
    """

    def show(line: str) -> None:
        print(line, flush=True)

    arguments = rank_arguments(settings, output)
    spec = load_spec(spec_name)
    if congestion_control is not None:
        spec = replace(spec, congestion_control=congestion_control)
    with Testbed(spec).session() as session:
        if settings.mpi_peers:
            session.exec(None, ["ip", "link", "set", "dev", "lo", "up"])  # where mpirun listens
            argv = _mpi_job(session, arguments, nproc_per_node, name_clusters)
            process = session.spawn(None, argv, MPI_ENVIRONMENT, on_line=show)
            job = RunningJob([process], ["all nodes"], session)
        else:
            job = session.launch(
                arguments,
                nproc_per_node=nproc_per_node,
                on_line=lambda rank, node, line: show(line),
                name_clusters=name_clusters,
            )
        returncode = job.wait().returncode
        if slow := too_slow(*slowness([], session.line_counters())):
            print(f"holmes bench: {slow}", file=sys.stderr)
        return returncode


def _mpi_job(session: TestbedSession, arguments: list[str], nproc_per_node: int, name_clusters: bool) -> list[str]:
    """Returns one mpirun for all nodes: each rank starts beside mpirun and enters its node before it runs anything."""
    places = place_ranks(session.spec, nproc_per_node)
    ranks = []
    for rank, (node, _) in enumerate(places):
        variables = {
            **node_env(session.spec.node(node)),
            **rank_environment(session.spec, places, rank, name_clusters),
            FD_VARIABLE: str(_JOB_NETWORK_FD),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        inside = enter_node(node, str(Path.cwd()), arguments)
        script = f"exec {_JOB_NETWORK_FD}< /proc/self/ns/net; exec {shlex.join(inside)}"
        ranks.append(["env", *(f"{name}={value}" for name, value in variables.items()), "sh", "-c", script])
    return mpirun(ranks)
