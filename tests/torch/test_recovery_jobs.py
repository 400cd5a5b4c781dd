"""Whole jobs of one rank with run_elastic: several on one store, one after another, a store that is started again; and
generations that not all ranks tried to begin.

The rank, the store and the folder are what users have; only the network is this machine's.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from elastic import train_elastic  # noqa: E402
from torch import nn  # noqa: E402
from torch_ranks import run_ranks  # noqa: E402

from holmes.training.recovery import Rules  # noqa: E402
from holmes.training.recovery.rebuild import abort_groups, drop_groups, start_groups  # noqa: E402
from holmes.training.recovery.rendezvous import Rendezvous  # noqa: E402
from holmes_comm.errors import HolmesError, PeerLostError, UnreachableError  # noqa: E402


def run(store, folder, until, after_step=lambda generation, step: None, **options):
    """The steps that a job of one rank did, and its generations."""
    done, numbers = [], []

    def train(generation):
        numbers.append(generation.number)
        assert generation.world_size == 1
        generation.restore(model=nn.Linear(2, 2))
        for step in generation.steps(until):
            done.append(step)
            after_step(generation, step)
        return "trained"

    usual = {"rules": Rules(1, join_timeout_s=30), "heartbeat_s": 0.1, "dead_after_s": 2.0, "timeout_s": 20.0}
    value = train_elastic(train, store, folder, place=0, **{**usual, **options})
    return value, done, numbers


class StoreProcess:
    """`holmes store` on a port; leave it to end it."""

    def __init__(self, port=0, **options):
        ready = "lambda p: print(p, flush=True)"
        command = f"import holmes.training.recovery.store as s; s.serve_store({port}, {ready}, **{options})"
        self.process = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True)
        self.port = int(self.process.stdout.readline())
        self.address = f"127.0.0.1:{self.port}"

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.communicate()


def jobs_one_after_another(rank, size, _, folder):
    folder = Path(folder)
    said = []
    with StoreProcess() as store:
        said.append(run(store.address, folder / "a", 4))
        said.append(run(store.address, folder / "b", 2))
        said.append(run(store.address, folder / "a", 6))
        port = store.port
    with StoreProcess(port) as again:
        said.append(run(again.address, folder / "a", 8))
    return said, sorted(path.name for path in (folder / "a").iterdir() if path.name.startswith("step"))


def test_a_store_serves_one_job_after_another_and_may_be_started_again(tmp_path):
    ((said, kept),) = run_ranks(jobs_one_after_another, 1, str(tmp_path))
    assert said == [
        ("trained", [0, 1, 2, 3], [1]),
        ("trained", [0, 1], [1]),
        ("trained", [4, 5], [2]),
        ("trained", [6, 7], [3]),
    ]
    assert kept == ["step-00000006-generation-0002", "step-00000008-generation-0003"]


def jobs_side_by_side(rank, size, _, address, folder):
    def wait_for_other(generation, step):  # both train at once
        Path(folder, f"{rank}-{step}").touch()
        deadline_s = time.monotonic() + 30
        while not Path(folder, f"{1 - rank}-{step}").exists():
            assert time.monotonic() < deadline_s, "the other job does not train"
            time.sleep(0.01)

    return run(address, Path(folder) / f"job-{rank}", 4, wait_for_other)


def test_two_jobs_on_one_store_do_not_merge(tmp_path):
    with StoreProcess() as store:
        for said in run_ranks(jobs_side_by_side, 2, store.address, str(tmp_path)):
            assert said == ("trained", [0, 1, 2, 3], [1])


def two_in_one_folder(rank, size, _, address, folder):
    """Rank 1's job begins while rank 0's trains, on a store of its own; as after a store was lost and started again."""

    def wait_for_other(generation, step):
        if step == 2:
            Path(folder, "first").touch()
            deadline_s = time.monotonic() + 30
            while not Path(folder, "second").exists():
                assert time.monotonic() < deadline_s
                time.sleep(0.01)

    def say(generation, step):
        Path(folder, "second").touch()

    if rank == 1:
        while not Path(folder, "first").exists():
            time.sleep(0.01)
        with StoreProcess() as store:
            return run(store.address, Path(folder) / "run", 8, say)
    with pytest.raises(HolmesError) as caught:
        run(address, Path(folder) / "run", 8, wait_for_other)
    return type(caught.value).__name__, str(caught.value)


def test_of_two_jobs_in_one_folder_the_earlier_one_ends(tmp_path):
    with StoreProcess() as store:
        first, second = run_ranks(two_in_one_folder, 2, store.address, str(tmp_path))
    assert first[0] == "FencedError"
    assert "two jobs train into one folder, so this one ends" in first[1]
    assert second == ("trained", [2, 3, 4, 5, 6, 7], [2])
    assert sorted(path.name for path in (tmp_path / "run").glob("step*")) == [
        "step-00000006-generation-0002",
        "step-00000008-generation-0002",
    ]


def a_store_that_stops(rank, size, _, folder):
    with StoreProcess() as store:

        def stop(generation, step):
            if step == 2:
                store.process.send_signal(signal.SIGSTOP)  # as does a network that swallows all
            time.sleep(0.05)

        rules = Rules(1, join_timeout_s=2.0, lease_s=1.0)
        began_s = time.monotonic()
        with pytest.raises(HolmesError) as caught:
            run(store.address, folder, 10_000, stop, rules=rules)
        steps = [int(path.name[5:13]) for path in Path(folder).glob("step*")]
        return type(caught.value).__name__, str(caught.value), max(steps), time.monotonic() - began_s


def test_without_the_store_a_rank_stops_when_its_lease_is_over(tmp_path):
    ((kind, said, last_step, took_s),) = run_ranks(a_store_that_stops, 1, str(tmp_path))
    assert kind == "StoreLostError"
    assert "its lease of 1 s is over" in said
    assert "rank 0 on " in said
    assert "127.0.0.1:" in said
    assert last_step < 200
    assert took_s < 30


def half_dead(rank, size, _, address, folder):
    """Host n2's network swallows what it carries of training, in every generation that it is in."""
    os.environ["HOLMES_HOSTNAME"] = f"n{rank}"
    numbers = []

    def train(generation):
        numbers.append(generation.number)
        generation.restore(model=nn.Linear(2, 2))
        for _ in generation.steps(4):
            if generation.world_size == size:
                with contextlib.suppress(HolmesError, dist.DistError):  # that a faster rank has aborted
                    dist.barrier()  # all find out by themselves, nobody because its generation is over
                lost = 0 if rank == 2 else 2
                if generation.number == 1 and rank == 0:  # as where it was aborted before it found out
                    raise PeerLostError("aborted: the generation is over")
                kind = PeerLostError if generation.number == 1 else UnreachableError  # as where groups are made
                raise kind(f"rank {lost} (host n{lost}) on NIC eth0 is lost", peer=lost, host=f"n{lost}")
        return "trained"

    try:
        rules = Rules(size, join_timeout_s=60, lease_s=2.0)
        value = train_elastic(train, address, folder, place=rank, rules=rules)
    except HolmesError as error:
        return type(error).__name__, str(error), numbers
    return value, "", numbers


def test_a_half_dead_host_is_left_out_before_nobody_progresses(tmp_path):
    with StoreProcess() as store:
        *others, (error, message, numbers) = run_ranks(half_dead, 3, store.address, str(tmp_path))
    assert others == [("trained", "", [1, 2, 3, 4])] * 2
    assert (error, numbers) == ("LeftOutError", [1, 2, 3])
    assert "rank 2 on n2 is left out" in message


def reaches(host, port):
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5):
        return True
    return False


def test_a_store_listens_where_it_is_told_and_by_default_on_this_host_only():
    with StoreProcess() as store:
        assert reaches("127.0.0.1", store.port)
        assert not reaches("127.0.0.2", store.port)
    with StoreProcess(address="127.0.0.2") as store:
        assert not reaches("127.0.0.1", store.port)
        rendezvous = Rendezvous(f"127.0.0.2:{store.port}", 20)
        assert rendezvous.settle("name", "value") == "value"
        taken = subprocess.run(
            [sys.executable, "-m", "holmes", "store", "--listen", "127.0.0.2", "--port", str(store.port)],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert taken.returncode == 2
    assert f"cannot serve a store on 127.0.0.2, port {store.port}: " in taken.stderr
    with StoreProcess(address="0.0.0.0") as store:
        assert reaches("127.0.0.2", store.port)


def groups_tried_alone_before(rank, size, store):
    if rank == 0:  # which thought that a generation was to begin; rank 1 waited to be let in
        with pytest.raises(HolmesError, match="rank 1 of 2 did not take part"):
            start_groups(dist.PrefixStore("1", store), rank, size, "holmes", 2.0)
        abort_groups()
        drop_groups()
    start_groups(dist.PrefixStore("2", store), rank, size, "holmes", 20.0)
    value = torch.ones(1)
    dist.all_reduce(value)
    drop_groups()
    return value.item()


def test_groups_begin_though_one_rank_alone_has_tried_before():
    assert run_ranks(groups_tried_alone_before, 2) == [2.0, 2.0]


def unequal_steps(rank, size, _, address, folder, what):
    """Two ranks that would save after different steps: one of them waits for the other until its deadline else."""

    def train(generation):
        generation.restore(model=nn.Linear(2, 2))
        for _ in generation.steps(4 + rank if what == "until" else 4):
            pass
        return "trained"

    rules = Rules(size, join_timeout_s=60, lease_s=2.0)
    every = 2 + rank if what == "every_steps" else 2
    try:
        return train_elastic(train, address, folder, place=rank, rules=rules, every_steps=every)
    except HolmesError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(("what", "values"), [("until", "4 on rank 0"), ("every_steps", "2 on rank 0")])
def test_ranks_that_would_save_after_other_steps_are_told(tmp_path, what, values):
    with StoreProcess() as store:
        begin_s = time.monotonic()
        for said in run_ranks(unequal_steps, 2, store.address, str(tmp_path), what):
            assert re.search(rf"UnequalStepsError: {what} of \w+.* is {values} on .* and . on rank 1 on", said), said
        assert time.monotonic() - begin_s < 25
