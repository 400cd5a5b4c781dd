"""Whether this machine can emulate nodes, and the environment of programs that tests start."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest


def _namespaces_allowed() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-Urnm", "true"], capture_output=True, check=False).returncode == 0


needs_namespaces = pytest.mark.skipif(
    not _namespaces_allowed(), reason="this machine forbids unprivileged user namespaces (unshare -Urnm true fails)"
)


def child_env() -> dict[str, str]:
    """For a `holmes` started as a program: it finds the same packages as this process."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path)}


def unprivileged_python() -> list[str]:
    """The command of a Python that user nobody can run and that finds Holmes; skips the test where there is none."""
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "sh", "-c", 'exec "$@"', "sh"]
    # This process's Python may lie in root's home.
    for python in (sys.executable, "/usr/bin/python3"):
        probe = [*nobody, python, "-m", "holmes", "testbed", "specs"]
        if subprocess.run(probe, check=False, env=child_env(), cwd="/", capture_output=True).returncode == 0:
            return [*nobody, python]
    pytest.skip("user nobody can read no Python that has Holmes' dependencies")
