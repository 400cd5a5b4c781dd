"""PyTorch's own DistributedTest (of the installed torch) over ProcessGroupNCCL and over "holmes", on a fake CUDA and a
fake NCCL: `make suite-cuda-fake SUITE_ARGS='--save'`.

Each test starts three processes, each with a fake GPU; where it names "nccl" the second pass takes "holmes". A kernel
that the fake has no stand-in for ends a test in both. Exits with 1 where a test passes over ProcessGroupNCCL only, and
it is not said here why.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from pytorch_suite import forked_from, limit_tests

RESULTS = Path(__file__).parent / "results" / "gpu-pytorch-suite.md"
BACKENDS = ("nccl", "holmes")
SIZE = 3
#: How a kernel without a stand-in ends a test (tests/fake_cuda_torch).
NO_KERNEL = ("NO_BINARY_FOR_GPU", "no kernel image", "device kernel image")
#: What passes over ProcessGroupNCCL only, and why.
OTHERWISE = {
    "test_get_backend": "the name of the backend",
    "test_batch_isend_irecv_self_nccl": "a barrier before the group's first use of a GPU is one of the hosts and sets "
    "up no NCCL communicator, so rank 0's message to itself waits for the others' first use (docs/nccl.md)",
    "test_monitored_barrier_allreduce_hang": "other words: the wait says that its time is over and that the operation "
    "goes on, ProcessGroupNCCL 'caught collective operation timeout'",
    "test_monitored_barrier_allreduce_hang_wait_all_ranks": "the same words",
}


def replace_nccl() -> None:
    """Where a test names "nccl" it gets "holmes"."""
    import holmes_comm.torch_backend
    from holmes_comm import replace_gloo

    os.environ["HOLMES_REPLACES"] = "gloo"  # what installs it; replaced is "nccl" alone
    replace_gloo.replaced = lambda backend: backend and str(backend).replace("nccl", "holmes")
    replace_gloo.install()
    holmes_comm.torch_backend.register()


def prepare(rank: int) -> None:
    """In a process of a test: a host of its own for NCCL, and "holmes" for "nccl" in the second pass."""
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    if os.environ["SUITE_OVER"] == "holmes":
        replace_nccl()


#: Not yet the tests: they ask for GPUs, which no fork can use.
PRELOADED = ("torch", "torch.distributed", "torch._dynamo")

if "SUITE_OVER" in os.environ:  # torch's module reads the environment where it is imported
    from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

    class Suite(TestDistBackend, DistributedTest._DistTestBase):
        """torch's; here, so that its processes find it."""

        def setUp(self) -> None:
            """As torch's, forked."""
            super().setUp()
            self._start_processes(forked_from(PRELOADED, prepare))


def outcome_of(result: unittest.TestResult) -> tuple[str, str]:
    """One word, and why."""
    bad = [text for _, text in (*result.errors, *result.failures)]
    if not bad:
        return ("skipped", result.skipped[0][1]) if result.skipped else ("passed", "")
    said = [line.strip() for line in bad[0].splitlines() if line.strip()]
    if any(word in bad[0] for word in NO_KERNEL):
        return "no kernel", ""
    causes = [line for line in said if "Error" in line.split(":")[0] and "exited with error code" not in line]
    return "failed", (causes or said)[-1][:300]


def run_over(pattern: str) -> None:
    """All tests, in an environment that says over what; a line of JSON each."""
    limit_tests()
    for name in sorted(name for name in dir(Suite) if name.startswith("test_") and pattern in name):
        result = unittest.TestResult()
        unittest.TestSuite([Suite(name)]).run(result)
        outcome, why = outcome_of(result)
        print(json.dumps({"test": name, "outcome": outcome, "why": why}), flush=True)


def outcomes_over(backend: str, pattern: str) -> dict[str, tuple[str, str]]:
    """By test."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "SUITE_OVER": backend, "BACKEND": "nccl", "WORLD_SIZE": str(SIZE), "TEMP_DIR": folder}
        env |= {"FAKE_CUDA_DEVICES": str(SIZE), "INIT_METHOD": "env://"}
        command = [sys.executable, __file__, "--over", backend, "-k", pattern]
        run = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"test"')]
    return {line["test"]: (line["outcome"], line["why"]) for line in lines}


def page(found: dict[str, dict[str, tuple[str, str]]], worse: list[str]) -> str:
    """The table that is kept."""
    both = Counter(tuple(found[backend][name][0] for backend in BACKENDS) for name in found["nccl"])
    version = importlib.metadata.version("torch")
    lines = [
        "# PyTorch's own DistributedTest over ProcessGroupNCCL and over holmes, on a fake GPU",
        "",
        f"`python benchmarks/gpu_pytorch_suite.py --save`, torch {version}, {SIZE} ranks. No GPU was there: a test "
        "whose kernels have no stand-in cannot be told.",
        "",
        "| ProcessGroupNCCL | holmes | tests |",
        "| --- | --- | ---: |",
        *(f"| {nccl} | {holmes} | {number} |" for (nccl, holmes), number in both.most_common()),
        "",
        "Passed over ProcessGroupNCCL only:",
        "",
        *(worse or ["- none"]),
        "",
        "Other outcomes that differ, and what fails over both:",
        "",
        *(
            f"- {name}: {theirs}; holmes: {outcome} {why}".rstrip()
            for name, (outcome, why) in found["holmes"].items()
            if (theirs := found["nccl"][name][0]) != "passed" and (theirs != outcome or outcome == "failed")
        ),
        "",
        "Passed over both: "
        + ", ".join(
            name.removeprefix("test_")
            for name in found["nccl"]
            if all(found[backend][name][0] == "passed" for backend in BACKENDS)
        )
        + ".",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Runs both, compares, prints and keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", help="only tests with this in their name")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--over", choices=BACKENDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.over:
        return run_over(arguments.k)
    with ThreadPoolExecutor() as beside:  # they wait more than they compute
        found = dict(zip(BACKENDS, beside.map(outcomes_over, BACKENDS, [arguments.k] * 2), strict=True))
    if not found["nccl"] or found["nccl"].keys() != found["holmes"].keys():
        raise SystemExit(f"of {len(found['nccl'])} and {len(found['holmes'])} tests there are results; see --over nccl")
    worse = {
        name: f"{outcome}: {why}"
        for name, (outcome, why) in found["holmes"].items()
        if found["nccl"][name][0] == "passed" and outcome != "passed"
    }
    text = page(found, [f"- {name}: {OTHERWISE.get(name, why)}" for name, why in worse.items()])
    print(text)
    if arguments.save:
        RESULTS.write_text(text)
    raise SystemExit(1 if worse.keys() - OTHERWISE.keys() else 0)


if __name__ == "__main__":
    main()
