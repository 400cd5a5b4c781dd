"""The runtime without its lab: training, planning and doctor run where `holmes.lab` is not installed at all."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import holmes
import holmes_comm

TRAIN = """
import sys
import torch, torch.distributed as dist
import holmes

rank = int(sys.argv[1])
dist.init_process_group("holmes", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
replica = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = holmes.DistributedOptimizer(model, torch.optim.SGD, lr=0.1, group=dist.group.WORLD)
for trained in (model, replica):
    trained(torch.full((4, 3), float(rank))).sum().backward()
optimizer.step()
plan = holmes.make_plan(model_layers=2)
groups = holmes.process_groups(plan, kinds=["dp"])
print(plan.world_size, groups.dp.size(), [p.grad.sum().item() for p in replica.parameters()])
dist.destroy_process_group()
assert not [name for name in sys.modules if name.startswith("holmes.lab")]
"""


#: An editable installation finds what PYTHONPATH lacks.
NO_EDITABLE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Variables of processes whose `holmes` is the installed one without its lab."""
    folder = tmp_path_factory.mktemp("without-lab")
    without_lab = shutil.ignore_patterns("lab", "__pycache__")
    shutil.copytree(Path(holmes.__file__).parent, folder / "holmes", ignore=without_lab)
    (folder / "holmes_comm").symlink_to(Path(holmes_comm.__file__).parent)
    (folder / "sitecustomize.py").write_text(NO_EDITABLE)
    return {**os.environ, "PYTHONPATH": str(folder)}


def holmes_command(environment, *arguments):
    command = [sys.executable, "-m", "holmes", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


def test_training_needs_no_lab(environment, tmp_path):
    pytest.importorskip("torch")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TRAIN, str(rank), tmp_path / "store"],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert outputs[0][0].split() == outputs[1][0].split()
    assert outputs[0][0].startswith("2 2 [")


def test_plan_and_doctor_need_no_lab(environment, tmp_path):
    topology = tmp_path / "topology.yaml"
    found = holmes_command(environment, "topology", "--save", str(topology))
    assert found.returncode == 0, found.stderr
    options = ["--model", "gpt-3.6b", "--global-batch", "8", "--gpu", "A100-80GB"]
    planned = holmes_command(environment, "plan", "--topology", str(topology), *options)
    assert planned.returncode == 0, planned.stderr
    doctor = holmes_command(environment, "doctor", "--json", "-")
    assert doctor.returncode in (0, 1), doctor.stderr  # 1: it found something on this machine
    assert "findings" in doctor.stdout


@pytest.mark.parametrize("command", ["demo", "stress", "testbed", "bench --testbed pair --peers none"])
def test_a_command_of_the_lab_says_how_to_install_it(environment, command):
    run = holmes_command(environment, *command.split())
    assert run.returncode in (1, 2)
    assert "pip install 'holmes-comm[lab]'" in run.stderr
    assert "Traceback" not in run.stderr
