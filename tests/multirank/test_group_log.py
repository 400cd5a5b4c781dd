"""HOLMES_LOG=info: a healthy run says of each group which NICs it is on, and why."""

import os
import re
import subprocess
import sys

import pytest

HOST = """
import threading, holmes_comm
from holmes_comm import NicSelection
store = holmes_comm.LocalStore()
made = lambda rank: holmes_comm.init(store, rank, 2, name="pair", nics=NicSelection(nic_class="loopback"))
ranks = [threading.Thread(target=made, args=(rank,)) for rank in range(2)]
for rank in ranks: rank.start()
for rank in ranks: rank.join()
"""
TORCH = """
import torch, torch.distributed as dist
from holmes_comm import NicSelection
options = NicSelection(nic_class="loopback")
dist.init_process_group("holmes", store=dist.HashStore(), rank=0, world_size=1, pg_options=options)
dist.new_group([0], backend="holmes", pg_options=options)
dist.destroy_process_group()
"""
LINE = re.compile(r"\[holmes rank (\d)/\S+\] info: group '(\S+)': rank (\d) of (\d) on (.+?): (.+)")


def lines(program, level):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    env.pop("RANK", None)
    env["HOLMES_LOG"] = level
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=True)
    return [match.groups() for line in run.stderr.splitlines() if (match := LINE.fullmatch(line))], run.stderr


@pytest.mark.parametrize("level", ["info", "debug"])
def test_each_rank_says_its_nics_and_why(level):
    found, said = lines(HOST, level)
    assert sorted(row[1:5] for row in found) == [
        ("holmes/pair", "0", "2", "lo 127.0.0.1"),
        ("holmes/pair", "1", "2", "lo 127.0.0.1"),
    ], said
    assert all("loopback" in reason or "lo" in reason.split() for *_, reason in found), said


def test_groups_of_torch_say_it_too():
    pytest.importorskip("torch", reason="needs torch: its groups")
    found, said = lines(TORCH, "info")
    assert [(name, rank, size) for _, name, rank, size, _, _ in found] == [("0", "0", "1"), ("1", "0", "1")], said
    assert all(reason for *_, reason in found)


def test_the_default_level_says_nothing():
    assert lines(HOST, "")[1] == ""
