"""Drives CMake; everything else is in pyproject.toml."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


def has_torch() -> bool:
    """Whether the environment that Holmes is installed into has torch.

    -E: pip's build isolation hides that environment's packages behind PYTHONPATH, and the c10d backend must be built
    against exactly its torch. AUTOLOAD=0: torch would import a Holmes that is just being built. The CMakeLists.txt of
    csrc/c10d asks in the same way.
    """
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    query = [sys.executable, "-E", "-c", "import torch"]
    return subprocess.run(query, env=environment, capture_output=True).returncode == 0


class CMakeBuild(build_ext):
    """Configures and builds with CMake + ninja, then installs libholmes and the modules into holmes_comm/."""

    def run(self) -> None:
        # setuptools' own run builds elsewhere and copies only the modules back in place; lib/ and include/ belong too.
        for ext in self.extensions:
            self.build_extension(ext)

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        package_dir = Path(self.get_ext_fullpath(ext.name)).parent.resolve()
        tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
        # An in-place build keeps its tree for the next, incremental one; a wheel's never mixes with it.
        build_dir = ROOT / "build" / tag if self.inplace else Path(self.build_temp).resolve() / "cmake"
        configure = [
            "cmake",
            f"-S{ROOT}",
            f"-B{build_dir}",
            "-GNinja",
            # Named, as the paths of an isolated build's tools are gone in the next one.
            f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}",
            "-DHOLMES_PYTHON=ON",
            f"-DHOLMES_TORCH={'ON' if has_torch() else 'OFF'}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DCMAKE_INSTALL_PREFIX={package_dir}",
            *os.environ.get("HOLMES_CMAKE_ARGS", "").split(),
        ]
        print(f"configuring in {build_dir}", flush=True)
        subprocess.run(configure, check=True)
        print("compiling: minutes the first time (pip shows this with -v)", flush=True)
        # How many of how many files, and for how long.
        status = {"NINJA_STATUS": "[%f of %t, %e s] ", **os.environ}
        subprocess.run(["cmake", "--build", str(build_dir)], check=True, env=status)
        # What an older version installed must neither stay nor be overwritten while a process has it mapped.
        for stale in ("bin", "lib", "include", "c10d"):
            shutil.rmtree(package_dir / stale, ignore_errors=True)
        for module in package_dir.glob("_*.so"):
            module.unlink()
        strip = [] if self.inplace else ["--strip"]
        subprocess.run(["cmake", "--install", str(build_dir), *strip], check=True, stdout=subprocess.DEVNULL)


setup(ext_modules=[Extension("holmes_comm._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
