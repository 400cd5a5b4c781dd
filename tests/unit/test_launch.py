"""What each launcher's environment says, and what is said where it says too little."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import holmes_comm
from holmes.tools.cli import load
from holmes_comm.errors import UsageError
from holmes_comm.launch import first_host, recognize, task_counts

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
    "SLURM_STEP_NODELIST": "gpu[003-005,9]",
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
KUBERNETES = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"} | {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1"
}
#: A pod of a JobSet's Indexed Job: the index comes from Kubernetes, the rest from the manifest.
JOBSET = {
    "JOB_COMPLETION_INDEX": "3",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "holmes-a-0-0.holmes",
    "MASTER_PORT": "29500",
} | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
#: Variables, and launcher, rank, size, local rank, local size and address that they mean.
MEANT = [
    (SLURM, ("Slurm", 5, 8, 1, 2, "gpu003")),
    (SLURM | {"MASTER_ADDR": "head"}, ("Slurm", 5, 8, 1, 2, "head")),
    (OPEN_MPI, ("Open MPI", 1, 2, 1, 2, "127.0.0.1")),
    (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, ("Open MPI", 1, 2, 1, 1, None)),
    (OPEN_MPI | SLURM, ("Open MPI", 1, 2, 1, 2, "127.0.0.1")),  # mpirun's daemons are srun's
    (MPICH, ("MPICH", 3, 4, 1, 2, None)),
    (MPICH | {"MASTER_ADDR": "head"}, ("MPICH", 3, 4, 1, 2, "head")),
    (TORCHRUN, ("torchrun", 3, 4, 1, 2, "head")),
    (TORCHRUN | OPEN_MPI | SLURM, ("torchrun", 3, 4, 1, 2, "head")),
    (KUBERNETES, ("Kubernetes", 0, 2, None, None, "job-master-0")),
    (JOBSET, ("Kubernetes Job", 3, 4, None, None, "holmes-a-0-0.holmes")),
    # Ray sets RAY_JOB_ID in its workers, and Ray Train torchrun's variables.
    ({name: TORCHRUN[name] for name in list(TORCHRUN)[:6]} | {"RAY_JOB_ID": "1"}, ("Ray Train", 3, 4, 1, 2, "head")),
    (JOBSET | {"RANK": "3"}, ("Kubernetes Job", 3, 4, None, None, "holmes-a-0-0.holmes")),
    # torchrun in a pod of an Indexed Job: the index is the node's.
    (TORCHRUN | {"JOB_COMPLETION_INDEX": "3"}, ("torchrun", 3, 4, 1, 2, "head")),
]


@pytest.mark.parametrize(("variables", "meant"), MEANT)
def test_a_launcher_is_recognized(variables, meant):
    found = recognize(variables)
    assert found is not None
    place = (found.launcher, found.rank, found.size, found.local_rank, found.local_size, found.address)
    assert place == meant
    assert found.is_served == ("TORCHELASTIC_RUN_ID" in variables)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"JOB_COMPLETION_INDEX": "1"},  # where torchrun will be started
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # a batch script, which is no rank
        SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
        OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_a_single_process_is_no_job(variables):
    assert recognize(variables) is None


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but not RANK"),
        (TORCHRUN | {"RANK": "4"}, "RANK=4 is none of WORLD_SIZE=4's ranks, 0 to 3"),
        (TORCHRUN | {"RANK": "one"}, "must be numbers"),
        (SLURM | {"SLURM_PROCID": "8"}, "SLURM_PROCID=8 is none of SLURM_STEP_NUM_TASKS=8's ranks"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "x"}, "OMPI_COMM_WORLD_RANK='x' is not a whole number"),
    ],
)
def test_contradictions_are_named(variables, words):
    with pytest.raises(UsageError, match=words):
        recognize(variables)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (MPICH, "MPICH started 4 ranks on several hosts and does not say where they meet; set MASTER_ADDR"),
        ({name: text for name, text in TORCHRUN.items() if name != "MASTER_ADDR"}, "but not MASTER_ADDR"),
        ({name: text for name, text in TORCHRUN.items() if name != "MASTER_PORT"}, "but not MASTER_PORT"),
        ({name: text for name, text in JOBSET.items() if name != "MASTER_ADDR"}, "in the manifest .MASTER_ADDR: pod 0"),
    ],
)
def test_a_missing_address_is_named(variables, words):
    with pytest.raises(UsageError, match=words):
        recognize(variables).store_address()


def test_ranks_of_a_job_meet_at_one_port_and_other_jobs_at_another():
    def port(**variables):
        return recognize(SLURM | variables).port

    assert port() == port(SLURM_PROCID="1") != port(SLURM_STEP_ID="1")
    assert 10000 <= port() < 30000
    assert port(MASTER_PORT="77") == 77


def test_lists_of_slurm():
    assert [first_host(text) for text in ("n1", "n1,n2", "n[1-3]", "n[07,09-11]-ib,m1")] == ["n1", "n1", "n1", "n07-ib"]
    assert task_counts("2(x3),1") == [2, 2, 2, 1]
    assert task_counts("") == []
    for text in ("[1-2]", "gpu[003-004"):
        with pytest.raises(UsageError, match="set MASTER_ADDR"):
            first_host(text)


RANK = """
import os, sys, numpy, holmes_comm
comm = holmes_comm.init(transport="tcp", connect_timeout_s=30)
total = numpy.array([comm.rank + 1.0])
comm.all_reduce(total)
other = holmes_comm.init(transport="tcp", connect_timeout_s=30)  # a second one beside it
other.barrier()
del comm, other
comm = holmes_comm.init(transport="tcp", connect_timeout_s=30)  # and one after all others have ended
comm.barrier()
if (child := os.fork()) == 0:  # the children of all ranks meet as well
    inner = holmes_comm.init(transport="tcp", connect_timeout_s=30)
    inner.barrier()
    os._exit(0 if inner.size == comm.size else 1)
assert os.waitpid(child, 0)[1] == 0
sys.stdout.write(f"{comm.rank} {comm.size} {total[0]}\\n")
"""


def test_ranks_without_torchruns_variables_meet():
    """As srun on one host starts them: a communicator, and torch's default group."""
    clean = {name: text for name, text in os.environ.items() if name not in TORCHRUN}
    variables = SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    variables |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid())}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env=clean | variables | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60) for rank in ranks]
    assert [out.split() for out, _ in said] == [["0", "2", "3.0"], ["1", "2", "3.0"]], said


def test_env_says_what_was_recognized(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    shown = CliRunner().invoke(load("tools.cli.env:env"), ["--set"]).output
    assert shown.splitlines()[0] == "launcher: none; this process is not of a job"
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    shown = " ".join(CliRunner().invoke(load("tools.cli.env:env"), ["--set"]).output.split())
    assert "launcher: Slurm: rank 5 of 8, 1 of 2 on this host; the ranks meet at gpu003:" in shown
    monkeypatch.setenv("SLURM_PROCID", "8")
    shown = " ".join(CliRunner().invoke(load("tools.cli.env:env"), ["--set"]).output.split())
    assert "launcher: SLURM_PROCID=8 is none of SLURM_STEP_NUM_TASKS=8's ranks" in shown


#: A wait in the job's store does not end with the time that its ranks had to meet. They have met before, so that both
#: have loaded torch, whose store torchrun's is: on a busy machine one needs seconds longer for it.
LATE_RANK = """
import sys, time
from holmes.tools.job_store import join_job
with join_job("first", 50.0):
    pass
with join_job("late", 4.0) as job:
    if job.rank == 0:
        time.sleep(5.0)
        job.store.set("late", "came")
    sys.stdout.write(bytes(job.store.get("late")).decode() + "\\n")  # at once: ranks share the pipe
"""


def run_by_torchrun(folder, program):
    pytest.importorskip("torch", reason="needs torchrun")
    path = folder / "rank.py"
    path.write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_a_wait_in_the_store_is_longer_than_the_meeting(tmp_path):
    run = run_by_torchrun(tmp_path, LATE_RANK)
    assert run.stdout.split() == ["came", "came"], run.stdout + run.stderr


def test_ranks_of_torchrun_meet_in_its_store(tmp_path):
    run = run_by_torchrun(tmp_path, RANK)
    assert sorted(run.stdout.split()) == sorted(["0", "2", "3.0", "1", "2", "3.0"]), run.stdout + run.stderr


def test_env_says_which_variables_nothing_reads(monkeypatch):
    monkeypatch.setenv("HOLMES_TLSS", "all")
    monkeypatch.setenv("HOLMES_SOMETHING_ELSE", "1")
    monkeypatch.setenv("HOLMES_TLS", "all")
    lines = CliRunner().invoke(load("tools.cli.env:env"), ["--set"]).output.splitlines()
    said = [line for line in lines if "nothing reads it" in line]
    assert said == [
        "HOLMES_SOMETHING_ELSE: Holmes has no such variable, nothing reads it; unset it; docs/environment.md lists all",
        "HOLMES_TLSS: Holmes has no such variable, nothing reads it; write HOLMES_TLS",
    ]


def test_a_port_that_only_rank_0_would_know_is_refused() -> None:
    launch = recognize({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "0"})
    assert launch is not None
    with pytest.raises(UsageError, match=r"MASTER_PORT=0 is any free port.*give all ranks the same one"):
        launch.store_address()
    alone = recognize({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "head", "MASTER_PORT": "0"})
    assert alone is not None
    assert alone.store_address() == ("head", 0)


def test_a_second_rank_0_is_told_what_it_is() -> None:
    store = holmes_comm.TcpStore("127.0.0.1", 0, is_server=True)
    with pytest.raises(holmes_comm.SystemError, match=r"another process serves there: give rank 0 \(RANK\) to one"):
        holmes_comm.TcpStore("127.0.0.1", store.port, is_server=True)


def test_wrong_nics_are_told_before_the_store_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOLMES_NICS", "class:foo")
    with pytest.raises(UsageError, match="NIC class 'foo' does not exist"):
        holmes_comm.init(connect_timeout_s=1.0)
