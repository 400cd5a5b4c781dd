"""What torch asks of a backend from 2.14 on."""

import os
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
from paths import ROOT

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])

LAZY = """
import torch, torch.distributed as dist
dist.init_process_group("holmes", store=dist.HashStore(), rank=0, world_size=1)
print(dist.get_backend())
"""


@pytest.mark.skipif(VERSION < (2, 14), reason=f"needs torch 2.14 or later, this is {torch.__version__}")
def test_the_backend_is_found_where_torch_loads_no_extensions():
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run([sys.executable, "-c", LAZY], env=env, capture_output=True, text=True)
    assert run.stdout.split() == ["holmes"], run.stderr


def test_the_lazy_entry_point_registers_the_backend():
    """As torch 2.14 does it: loads what the entry point names, calls it, and looks for the backend."""
    text = (ROOT / "pyproject.toml").read_text().partition('[project.entry-points."torch.distributed.backends"]\n')[2]
    name, _, value = text.splitlines()[0].partition(" = ")
    registrar = EntryPoint(name, value.strip('"'), "torch.distributed.backends").load()
    assert callable(registrar)
    registrar()
    assert name.upper() in dist.Backend._plugins
