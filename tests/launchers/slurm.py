"""A Slurm of one node for the tests: munged, slurmctld and slurmd of this process, in a folder, on free ports."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ports import free_ports

CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
NodeName=localhost NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=test Nodes=localhost Default=YES MaxTime=INFINITE State=UP
"""


def is_here() -> bool:
    """Whether Debian's slurm-wlm and munge are installed and may be started: slurmd wants root."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    return os.geteuid() == 0 and all(shutil.which(name, path=path) for name in ("munged", "slurmctld", "slurmd"))


@contextmanager
def one_node(folder: Path) -> Iterator[dict[str, str]]:
    """Yields the environment in which `srun` asks this Slurm; ends its processes afterwards."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    folder.chmod(0o711)  # munge's clients reach its socket
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    text = CONFIGURATION.format(user="root", ports=free_ports(2), folder=folder, cpus=os.cpu_count())
    (folder / "slurm.conf").write_text(text)
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    munge = [f"--{name}={folder}/munge.{end}" for name, end in (("socket", "socket"), ("key-file", "key"))]
    munge += [f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]
    daemons = [
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D", "-i"],
        ["slurmd", "-D", "-N", "localhost"],
    ]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for daemon in daemons:
            with (folder / f"{daemon[0]}.out").open("wb") as out:
                running.append(subprocess.Popen(daemon, env=env, stdout=out, stderr=out, stdin=subprocess.DEVNULL))
            wait_for(lambda: (folder / "munge.socket").exists(), running, folder)
        wait_for(lambda: is_idle(env), running, folder)
        yield env
    finally:
        if (folder / "slurmd.pid").exists():  # what a failed test left running
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(["scancel", "--signal=KILL", "--user=root"], env=env, capture_output=True, timeout=30)
        for process in reversed(running):
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def is_idle(env: dict[str, str]) -> bool:
    """Whether the node takes jobs."""
    asked = subprocess.run(["sinfo", "-h", "-o", "%t"], env=env, capture_output=True, text=True)
    return asked.stdout.strip() == "idle"


def wait_for(is_so: object, running: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Until `is_so()`, a minute at most; with the daemons' logs where one has ended."""
    assert callable(is_so)
    deadline = time.monotonic() + 60
    while not is_so():
        ended = [process.args for process in running if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            logs = "\n".join(file.read_text(errors="replace")[-1500:] for file in folder.glob("*.[lo][ou][gt]"))
            raise AssertionError(f"Slurm does not start ({ended or 'no node is idle'}):\n{logs}")
        time.sleep(0.1)
