"""What the testbed needs of the machine, and what to tell the user where it is missing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import holmes_comm
from holmes.lab.testbed.spec import TestbedError

_PACKAGES = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "util-linux (Debian, Ubuntu: mount)",
    "ip": "iproute2",
    "tc": "iproute2 (Fedora: iproute-tc)",
}
_ADMIN_FOLDERS = ("/usr/sbin", "/sbin", "/usr/local/sbin")  # often not in a user's PATH
# A kernel switch, the value that forbids user namespaces, and how to allow them.
_SWITCHES = {
    "/proc/sys/user/max_user_namespaces": ("0", "sudo sysctl -w user.max_user_namespaces=15000"),
    "/proc/sys/kernel/unprivileged_userns_clone": ("0", "sudo sysctl -w kernel.unprivileged_userns_clone=1"),
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
}


def find_tools() -> dict[str, str]:
    """Returns the path of each program that the testbed runs. Raises TestbedError naming the package to install."""
    folders = os.pathsep.join([os.environ.get("PATH", os.defpath), *_ADMIN_FOLDERS])
    found = {tool: shutil.which(tool, path=folders) for tool in _PACKAGES}
    missing = [tool for tool, path in found.items() if path is None]
    if missing:
        wanted = ", ".join(f"`{tool}` from {_PACKAGES[tool]}" for tool in missing)
        raise TestbedError(
            f"the testbed needs {wanted}, not found in PATH or {', '.join(_ADMIN_FOLDERS)}. "
            "Install them, for example with: sudo apt install iproute2 util-linux mount"
        )
    return {tool: path for tool, path in found.items() if path is not None}


def find_line_program() -> str:
    """Returns the path of `holmes-line`. Raises TestbedError where the installation has none."""
    program = Path(holmes_comm.__file__).parent / "bin" / "holmes-line"
    if not program.is_file():
        raise TestbedError(
            f"links with delay or loss need {program}, which this installation lacks: install Holmes again"
        )
    return str(program)


def explain_refusal(reason: str) -> str:
    """Says why no user and network namespace could be made and what to do, given the output of `unshare`."""
    hints = []
    for file, (forbidding, command) in _SWITCHES.items():
        path = Path(file)
        if path.is_file() and path.read_text().strip() == forbidding:
            hints.append(f"{path.name} is {forbidding}: run `{command}`")
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        hints.append(
            "this is a container: start it with --privileged, or with --security-opt seccomp=unconfined "
            "--security-opt apparmor=unconfined --security-opt systempaths=unconfined --cap-add SYS_ADMIN"
        )
    if not hints:
        hints.append(
            "ask the administrator to allow user namespaces; the switches are sysctl user.max_user_namespaces, "
            "kernel.unprivileged_userns_clone and kernel.apparmor_restrict_unprivileged_userns, inside a container "
            "--privileged or --security-opt seccomp=unconfined"
        )
    return (
        "cannot make the testbed's namespaces (unprivileged user namespaces seem forbidden): "
        f"{reason or 'unshare gave no reason'}. What to do: {'; or '.join(hints)}. "
        "To check: unshare -Urnm true"
    )
