"""A plain job on machines whose InfiniBand has no IP: NCCL gets every port of it, sockets the Ethernet NIC."""

from __future__ import annotations

import json
import sys

import fake_gpu
import pytest
import torch
from namespaces import needs_namespaces
from paths import WORKERS

from holmes.lab.testbed import Testbed

pytestmark = [
    needs_namespaces,
    pytest.mark.skipif(
        fake_gpu.find("fake_cuda") is None or fake_gpu.find_module("fake_torch_cuda") is None,
        reason="needs the fake NCCL and the fake torch device: configure the build with -DHOLMES_TESTS=ON and torch",
    ),
    pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch without CUDA: the fake takes its place"),
]

SPEC = """
networks:
  management: {class: ethernet, rate_gbps: 1}
clusters:
  a:
    nodes: 2
    nics:
      - {name: e0, network: management}
"""


def test_a_plain_group_uses_all_eight_ports(tmp_path):
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC)
    environment = fake_gpu.environment(fake_gpu.VERSIONS[-1])
    command = [sys.executable, str(WORKERS / "bare_infiniband_worker.py")]
    result = Testbed(spec).run(command, env=environment, timeout_s=100)
    assert result.returncode == 0, result.outputs
    for lines in result.outputs.values():
        found = next(json.loads(line) for line in lines if line.startswith("{"))
        (description,) = found["nccl"]
        ports = ", ".join(f"mlx5_{number}:1" for number in range(8))
        assert f"IB over {ports}, handshake on e0" in description, description
        assert found["sockets"] == ["e0"]
