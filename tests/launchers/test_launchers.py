"""The recipes of docs/launchers.md, each by its real launcher on this machine: two ranks train a step.

`make test-launchers` installs the launchers first; what is not here is skipped.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import slurm
from paths import ROOT

pytest.importorskip("torch", reason="needs torch: the recipes train")

SCRIPT = str(ROOT / "examples" / "any_launcher.py")
LIMIT_S = 120
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def clean() -> dict[str, str]:
    """This process's environment without any launcher's."""
    kept = {name: text for name, text in os.environ.items() if name not in PLACE and not name.startswith("SLURM_")}
    # MPI refuses root and more ranks than cores without these.
    allowed = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    return kept | allowed | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}


def run(command: list[str], env: dict[str, str] | None = None, cwd: Path = ROOT) -> str:
    """Its standard output. All that it started ends with it, also where it takes too long."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    started = subprocess.Popen(command, env=env or clean(), cwd=cwd, **options)
    try:
        out, err = started.communicate(timeout=LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode == 0, out + err
    return out


def assert_trained(output: str, launcher: str) -> None:
    wanted = {f"{launcher}: rank {rank} of 2, backend holmes, weights equal: True" for rank in range(2)}
    assert wanted <= set(re.findall(r"[A-Z][\w -]*: rank \d of \d.*(?:True|False)|torchrun: .*", output)), output


def shown_by_env(prefix: list[str], env: dict[str, str] | None = None) -> list[str]:
    """What `holmes env` says on both ranks."""
    output = run([*prefix, sys.executable, "-m", "holmes", "env", "--set"], env)
    return sorted(re.findall(r"launcher: .*", output))


def needs(program: str, package: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not here: make test-launchers installs it (Debian: {package})")


def test_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT]
    assert_trained(run(command), "torchrun")


def test_open_mpi():
    needs("mpirun", "openmpi-bin")
    if "Open MPI" not in run(["mpirun", "--version"]):
        pytest.skip("mpirun is not Open MPI's here")
    assert_trained(run(["mpirun", "-n", "2", sys.executable, SCRIPT]), "Open MPI")
    shown = shown_by_env(["mpirun", "-n", "2"])
    assert len(shown) == 2
    assert shown[0].startswith("launcher: Open MPI: rank 0 of 2, 0 of 2 on this host; the ranks meet at 127.0.0.1:")
    assert shown[0].replace("rank 0 of 2, 0", "rank 1 of 2, 1") == shown[1]


def test_mpich():
    needs("mpiexec.hydra", "mpich")
    assert_trained(run(["mpiexec.hydra", "-n", "2", sys.executable, SCRIPT]), "MPICH")
    shown = shown_by_env(["mpiexec.hydra", "-n", "2"])
    assert len(shown) == 2
    assert shown[0].startswith("launcher: MPICH: rank 0 of 2, 0 of 2 on this host; the ranks meet at 127.0.0.1:")


def test_slurm(tmp_path):
    if not slurm.is_here():
        pytest.skip("needs Debian's slurm-wlm and munge, and root to start them: make test-launchers installs them")
    with slurm.one_node(tmp_path) as slurms:
        env = slurms | clean() | {"PATH": slurms["PATH"]}
        srun = ["srun", "--ntasks", "2", "--overcommit"]
        assert_trained(run([*srun, sys.executable, SCRIPT], env), "Slurm")
        shown = shown_by_env(srun, env)
        assert len(shown) == 2
        assert shown[0].startswith("launcher: Slurm: rank 0 of 2, 0 of 2 on this host; the ranks meet at localhost:")
        # sbatch: the batch script itself is no rank, and torchrun in it is as anywhere.
        script = tmp_path / "job.sh"
        script.write_text(
            f"#!/bin/sh\n{sys.executable} -m holmes env --set\nsrun --overcommit {sys.executable} {SCRIPT}\n"
        )
        output = tmp_path / "job.out"
        run(["sbatch", "--wait", "--ntasks", "2", "--overcommit", "--output", str(output), str(script)], env)
        assert "launcher: none" in output.read_text()
        assert_trained(output.read_text(), "Slurm")


def test_ray_train():
    if importlib.util.find_spec("ray") is None:  # an import of it would leave environment variables behind
        pytest.skip("needs Ray: make test-launchers installs it")
    command = [sys.executable, str(ROOT / "examples" / "ray_train.py"), "--workers", "2"]
    # Not tmp_path: Ray's sockets are there, and a socket's name has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        env = clean() | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder, "RAY_DEDUP_LOGS": "0"}
        assert_trained(run(command, env | {"PYTHONPATH": f"{ROOT}/examples:{env['PYTHONPATH']}"}), "Ray Train")
