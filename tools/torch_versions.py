"""Holmes' backend for several versions of torch: builds it for each, compares it with Gloo, runs its tests.

    python tools/torch_versions.py 2.9.1 2.15.0 --save  (make test-torch VERSIONS="2.9.1 2.15.0" TORCH_TEST_ARGS=--save)

Each version has an environment of its own, build/torch-VERSION, which is removed afterwards. torch comes without what
it requires of NVIDIA, gigabytes: of those libraries only the CUDA runtime is real, the others are stand-ins that say
who called them. The engine is this tree's, as built; the backend is made as a user makes it, by `holmes build-torch`.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "install.md"
BEGIN, END = "<!-- versions: make test-torch -->\n", "<!-- end of versions -->\n"
HEAD = "| torch | Python | backend | compared with Gloo, 2 ranks | tests/torch |\n| --- | --- | --- | --- | --- |\n"
STEPS = "tests/torch/test_gloo_steps.py"
# The same for pipelines and layouts: among the training programs, as they train for minutes.
TRAINING = [
    f"tests/differential/test_{name}.py" for name in ("optimizer_layouts", "pipeline_programs", "pipeline_steps")
]
RANKS = 2
LIMIT_S = 3600


class Failed(Exception):
    """What could not be done for a version; its row says so."""


class Environment:
    """A version's own folder, with torch and what the tests need."""

    def __init__(self, version: str) -> None:
        self.version, self.folder = version, ROOT / "build" / f"torch-{version}"
        self.python = self.folder / "bin" / "python"

    def run(self, *command: str | Path, log: str) -> int:
        """Its output goes to a file of the folder."""
        environment = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environment |= {
            "PATH": f"{self.python.parent}:{environment['PATH']}",
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        with (self.folder / f"{log}.log").open("a") as file:
            done = subprocess.run(
                [str(word) for word in command],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
            )
        return done.returncode

    def need(self, what: str, *command: str | Path, log: str) -> None:
        """As run; a failure is this version's."""
        if self.run(*command, log=log) != 0:
            tail = (self.folder / f"{log}.log").read_text().splitlines()[-5:]
            raise Failed(f"{what} failed: " + "\n".join(tail))

    def pip(self, *arguments: str | Path) -> None:
        """Installs."""
        self.need("pip install", self.python, "-m", "pip", "install", "--quiet", "--no-compile", *arguments, log="pip")

    def make(self) -> None:
        """Installs torch beside this tree."""
        if not self.python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True)
            self.pip("-r", ROOT / "requirements-cuda-fake.txt", "hypothesis")
            try:
                self.pip("--no-deps", f"torch=={self.version}+cpu")
            except Failed:  # only some indexes have the CPU build
                self.pip("--no-deps", f"torch=={self.version}")
        (packages,) = self.folder.glob("lib/python*/site-packages")
        (packages / "holmes-tree.pth").write_text(f"{ROOT}\n{ROOT / 'python_api'}\n")
        # torch finds the backend by the entry points.
        self.need("egg_info", self.python, "setup.py", "-q", "egg_info", "--egg-base", packages, log="pip")
        if (packages / "torch" / "lib" / "libtorch_cuda.so").exists():
            self.stand_in(packages / "torch" / "lib")

    def stand_in(self, libraries: Path) -> None:
        """NVIDIA's libraries, without which the CUDA build is not imported, into torch's own folder of libraries."""
        needed = subprocess.run(["objdump", "-p", libraries / "libtorch_cuda.so"], capture_output=True, text=True)
        found = re.search(r"libcudart\.so\.(\d+)", needed.stdout)
        if found is None:
            raise Failed("libtorch_cuda.so names no libcudart")
        runtime = "nvidia-cuda-runtime-cu12" if found[1] == "12" else f"nvidia-cuda-runtime=={found[1]}.*"
        self.pip("--no-deps", runtime)
        sources = self.folder / "stand-ins"
        script = ROOT / "tests" / "fake_cuda_torch" / "stand_ins.py"
        self.need("stand_ins.py", self.python, script, libraries, sources, log="stand-ins")
        for source in sources.glob("*.c"):
            library = source.stem
            if library.startswith("libcudart") or library == "libcuda.so.1":  # real; no driver is here
                continue
            symbols = source.with_suffix(".map")
            versions = [f"-Wl,--version-script,{symbols}"] if symbols.exists() else []
            command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library}", *versions]
            self.need(library, *command, source, "-o", libraries / library, log="stand-ins")

    def build(self) -> str:
        """The backend; says how it came."""
        load = "import torch; from holmes_comm import c10d_module; print(c10d_module.load().__file__)"
        minor = ".".join(self.version.split(".")[:2])
        self.need("import torch", self.python, "-c", "import torch; print(torch.__version__)", log="build")
        if not list((ROOT / "holmes_comm" / "c10d" / minor).glob("*.so")):
            self.need("holmes build-torch", self.python, "-m", "holmes", "build-torch", log="build")
        self.need("loading the backend", self.python, "-c", load, log="build")
        return "built"

    def tests(self, name: str, *arguments: str) -> list[ElementTree.Element]:
        """pytest's cases."""
        report = self.folder / f"{name}.xml"
        report.unlink(missing_ok=True)
        options = ["-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        self.run(self.python, "-m", "pytest", *options, log=name)
        if not report.exists():
            raise Failed(f"pytest did not end: {self.folder / name}.log")
        return list(ElementTree.parse(report).iter("testcase"))


def outcome(case: ElementTree.Element) -> str:
    """passed, failed, skipped; or that Gloo could not do it."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    if case.find("skipped") is not None:
        return "skipped"
    return "refused" if case.find("properties/property[@name='gloo']") is not None else "passed"


def names_of(cases: list[ElementTree.Element], wanted: str) -> str:
    """Of those with this outcome."""
    return ", ".join(case.get("name", "").partition("[")[2].rstrip("]") for case in cases if outcome(case) == wanted)


def compared(environment: Environment) -> tuple[str, bool]:
    """What the table says of the steps; whether all are as they should be."""
    cases = environment.tests("steps", STEPS)
    counts = Counter(map(outcome, cases))
    both = len(cases) - counts["refused"]
    said = f"{counts['passed'] * RANKS} of {both * RANKS} the same"
    if counts["failed"]:
        said += f"; not: {names_of(cases, 'failed')}"
    if counts["refused"]:
        said += f"; Gloo cannot: {names_of(cases, 'refused')}"
    return said, counts["passed"] + counts["refused"] == len(cases)


def tested(environment: Environment, arguments: list[str]) -> tuple[str, bool]:
    """What the table says of the other tests of the backend; whether none failed."""
    cases = environment.tests("tests", "tests/torch", *TRAINING, f"--ignore={STEPS}", *arguments)
    counts = Counter(map(outcome, cases))
    return ", ".join(f"{counts[each]} {each}" for each in ("passed", "failed", "skipped")), not counts["failed"]


def row(version: str, arguments: argparse.Namespace) -> tuple[str, bool]:
    """The version's line of the table; whether all is as it should be."""
    environment = Environment(version)
    python = ".".join(map(str, sys.version_info[:2]))
    built, steps, tests, is_good = "not built", "", "", False
    try:
        print(f"torch {version}: installing it", flush=True)
        environment.make()
        print(f"torch {version}: building the backend", flush=True)
        built = environment.build()
        print(f"torch {version}: comparing it with Gloo", flush=True)
        steps, is_good = compared(environment)
        print(f"torch {version}: {steps}", flush=True)
        if arguments.steps_only:
            tests = "not run"
        else:
            tests, none_failed = tested(environment, arguments.pytest)
            is_good &= none_failed
    except Failed as error:
        print(f"torch {version}: {error}", file=sys.stderr)
    if not arguments.keep and is_good:
        shutil.rmtree(environment.folder)
    elif not is_good:
        print(f"torch {version}: what was said is in {environment.folder}", file=sys.stderr)
    return f"| {version} | {python} | {built} | {steps} | {tests} |\n", is_good


def save(rows: list[str]) -> None:
    """Into the page, in the place of these versions' lines."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    old, _, after = rest.partition(END)
    kept = {line.split("|")[1].strip(): line for line in old.removeprefix(HEAD).splitlines(keepends=True)}
    kept |= {line.split("|")[1].strip(): line for line in rows}
    lines = sorted(kept.items(), key=lambda item: [int(part) for part in item[0].split(".")])
    PAGE.write_text(before + BEGIN + HEAD + "".join(line for _, line in lines) + END + after)


def main() -> int:
    """Returns 1 where a version is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("versions", nargs="+", help="of torch, as 2.15.0")
    parser.add_argument("--keep", action="store_true", help="leave the environments, build/torch-VERSION")
    parser.add_argument("--save", action="store_true", help="write the table into docs/install.md")
    parser.add_argument("--steps-only", action="store_true", help="only the comparison with Gloo")
    parser.add_argument("--pytest", nargs=argparse.REMAINDER, default=[], help="last: arguments for the other tests")
    arguments = parser.parse_args()
    results = [row(version, arguments) for version in arguments.versions]
    rows = [line for line, _ in results]
    print(HEAD + "".join(rows), end="")
    if arguments.save:
        save(rows)
    return 0 if all(is_good for _, is_good in results) else 1


if __name__ == "__main__":
    sys.exit(main())
