"""Every example runs on the emulated nodes by one command, and its losses are those of the same trainer over Gloo."""

import importlib.util
import os
import re
import sys

import pytest
from paths import ROOT

pytest.importorskip("torch")

from holmes.lab.testbed import Testbed, TestbedError

EXAMPLES = ROOT / "examples"
STEPS = 3
RELATIVE = 1e-4


@pytest.fixture(scope="module")
def testbed():
    try:
        with Testbed("two-clusters").session() as session:
            yield session
    except TestbedError as error:
        pytest.skip(f"needs unprivileged namespaces: {error}")


def losses(testbed, script, package, backend, *options):
    lines = []
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / script), "--backend", backend, "--steps", str(STEPS)]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    if package == "accelerate":  # nothing in the script names a backend
        environment["HOLMES_REPLACES"] = "gloo" if backend == "holmes" else ""
    job = testbed.launch([*command, *options], env=environment, on_line=lambda rank, node, line: lines.append(line))
    result = job.wait(150)
    # Gloo's threads sometimes abort a process that is at its end.
    assert result.returncode == 0 or backend == "gloo", "\n".join(lines[-40:])
    found = [float(match[1]) for line in lines if (match := re.match(r"step \d+ loss ([\d.]+)$", line))]
    assert len(found) == STEPS, lines[-40:]
    assert package != "accelerate" or f"groups are made by {backend}" in lines
    return found


@pytest.mark.parametrize(
    ("script", "options", "package"),
    [
        ("ddp.py", [], None),
        ("ddp.py", ["--bf16"], None),
        ("fsdp2.py", [], None),
        ("megatron_gpt.py", [], "megatron.core"),
        ("deepspeed_zero.py", ["--stage", "1"], "deepspeed"),
        ("deepspeed_zero.py", ["--stage", "2"], "deepspeed"),
        ("deepspeed_pipeline.py", [], "deepspeed"),
        ("accelerate_gpt.py", [], "accelerate"),
    ],
)
@pytest.mark.timeout(320)
def test_example_matches_gloo(testbed, script, options, package):
    # Not imported here: some leave environment variables behind.
    if package is not None and importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"needs {package}: make test-trainers")
    ours = losses(testbed, script, package, "holmes", *options)
    relative = 1e-3 if "--bf16" in options else RELATIVE  # sums are rounded in another order
    assert ours == pytest.approx(losses(testbed, script, package, "gloo", *options), rel=relative)
    assert ours[-1] < ours[0]  # it trains


def test_every_example_has_its_section():
    text = (EXAMPLES / "README.md").read_text()
    for script in EXAMPLES.glob("*.py"):
        assert script.name == "common.py" or f"examples/{script.name}" in text
