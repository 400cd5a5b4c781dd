"""Nodes that are kernels of their own (`kernel: uml`): user-mode Linux with Soft-RoCE, as ordinary processes, no root.

A kernel runs in its node's network namespace and has the NICs there through TAP devices, so that bridges, rates and
delays are those of every testbed (fabric.py). It sees this machine's files. `guest.py` is its first process, which
makes its NICs and HCAs and becomes an agent like the testbed's own; requests and events go by a serial line.
"""

from __future__ import annotations

import contextlib
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from holmes.lab.preload import build_library
from holmes.lab.testbed import fabric
from holmes.lab.testbed.spec import Node, Spec, TestbedError

#: Debian packages with libibverbs, Soft-RoCE's provider, its tools, and `rdma`.
PACKAGES = ["ibverbs-utils", "ibverbs-providers", "libibverbs1", "libnl-3-200", "libnl-route-3-200", "iproute2"]
MEMORY_MIB = 1024  # of a kernel; it takes what it uses
_LIBRARIES = "usr/lib/x86_64-linux-gnu"
_RUN = 'fifo=$1 log=$2; shift 2; exec "$@" <>"$fifo" 2>"$log"'


class Missing(TestbedError):
    """What such nodes need and this machine does not have."""


def cache_folder() -> Path:
    """Where an unpacked kernel and downloaded tools are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holmes" / "rdma"


def kernel(folder: Path) -> Path:
    """The built kernel, HOLMES_UML_KERNEL; where that is packed (.xz), unpacked into `folder`. Raises Missing."""
    given = os.environ.get("HOLMES_UML_KERNEL")
    if not given or not Path(given).is_file():
        raise Missing(
            f"no kernel {f'at {given}' if given else 'given'}: build Linux for ARCH=um with rdma_rxe (docs/rdma.md), "
            "and name it with HOLMES_UML_KERNEL"
        )
    packed = Path(given)
    if packed.suffix != ".xz":
        return packed.absolute()
    unpacked = folder / "linux"
    if not unpacked.is_file() or unpacked.stat().st_mtime < packed.stat().st_mtime:
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / f"linux.{os.getpid()}"
        fresh.write_bytes(lzma.decompress(packed.read_bytes()))
        fresh.chmod(0o755)
        fresh.replace(unpacked)
    return unpacked


def has_wide_registers() -> bool:
    """Whether the processor has registers (AMX) that Linux 6.1 as a process does not know of and ends at."""
    return " amx_tile" in Path("/proc/cpuinfo").read_text()


def kernel_environment(folder: Path) -> dict[str, str]:
    """What a kernel's process needs in its environment on this machine; a library is built into `folder`.

    Raises Missing without a C compiler where one is needed: on processors with AMX (wide_registers.c).
    """
    if not has_wide_registers():
        return {}
    source = Path(__file__).with_name("wide_registers.c")
    library = (folder / "wide_registers.so").absolute()
    if any(split in os.fspath(library) for split in " :"):
        raise Missing(
            f"a kernel as a process does not boot on a processor with AMX without a preloaded library, but '{library}' "
            "cannot be preloaded: its path may hold no space and no colon (testbeds: set XDG_CACHE_HOME)"
        )
    if not library.is_file() or library.stat().st_mtime < source.stat().st_mtime:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            build_library(source, library)
        except OSError as error:
            raise Missing(
                f"a kernel as a process does not boot on a processor with AMX without a library: {error}"
            ) from None
    return {"LD_PRELOAD": os.fspath(library)}


def verbs_root(folder: Path, more: Sequence[str] = ()) -> Path:
    """Folder with Debian's verbs library and tools below usr/: HOLMES_VERBS_ROOT, else downloaded into `folder`.

    `more`: packages beside these. Raises Missing.
    """
    packages = [*PACKAGES, *more]
    given = os.environ.get("HOLMES_VERBS_ROOT")
    root = Path(given).absolute() if given else folder / "root"
    if (root / "usr/bin/ibv_rc_pingpong").exists():
        return root
    if given or not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise Missing(f"no {root}/usr/bin/ibv_rc_pingpong: unpack {', '.join(packages)} there (dpkg -x, needs no root)")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        got = subprocess.run(["apt-get", "download", *packages], cwd=place, capture_output=True, text=True, timeout=300)
        if got.returncode != 0:
            raise Missing(f"apt-get download {' '.join(packages)} failed: {got.stderr.strip()[-300:]}")
        fresh = folder / f"root.{os.getpid()}"
        for package in Path(place).glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, fresh], check=True, timeout=60)
    with contextlib.suppress(OSError):  # another one was faster
        fresh.rename(root)
    return root


def verbs_environment(root: Path) -> dict[str, str]:
    """What a process on such a node needs to find libibverbs and Soft-RoCE's provider, whose name has its version."""
    libraries = root / _LIBRARIES
    return {
        "LD_LIBRARY_PATH": f"{libraries}:{root / 'lib/x86_64-linux-gnu'}",
        "RDMAV_DRIVERS": str(libraries / "libibverbs/librxe"),
    }


class Guest:
    """One node's kernel. `heard` says of an output line whether it was an event, which `on_event` then has.

    `send` blocks while the kernel takes nothing. Not thread-safe.
    """

    def __init__(self, spec: Spec, node: Node, folder: Path, on_event: Callable[[dict[str, Any]], None]) -> None:
        self.node = node
        self.is_ready = False
        self._spec = spec
        self._folder = folder / node.name
        self._folder.mkdir()
        self._on_event = on_event
        self._root = verbs_root(cache_folder())
        os.mkfifo(self._folder / "requests")
        self._requests = os.open(self._folder / "requests", os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        """Requests end here."""
        os.close(self._requests)

    def environment(self) -> dict[str, str]:
        """What every process on the node finds in its environment."""
        path = os.pathsep.join([str(self._root / "usr/bin"), os.environ.get("PATH", os.defpath)])
        return {
            "HOLMES_TESTBED": "1",
            "XDG_RUNTIME_DIR": "/run",
            "HOLMES_HOSTNAME": self.node.name,
            "HOLMES_SPIN_US": "0",  # there time is counted in ticks of 10 ms: who polls for 150 us takes as long
            "PATH": path,
            **verbs_environment(self._root),
        }

    def command(self) -> list[str]:
        """What runs the kernel, in the node's namespaces."""
        settings = self._folder / "settings"
        settings.write_text(json.dumps(self._settings()))
        words = [str(kernel(cache_folder())), f"mem={MEMORY_MIB}M", "root=/dev/root", "rootfstype=hostfs"]
        words += ["rootflags=/", "rw", "quiet", "panic=1", "con=null", "con0=null,fd:2", "ssl=null", "ssl0=fd:0,fd:1"]
        for number, nic in enumerate(self.node.nics):
            tap = fabric.tap_of(self.node, nic)
            words.append(f"vec{number}:transport=tap,ifname={tap},mac={self._mac(number)},depth=128,mtu={nic.mtu}")
        words += [f"init={sys.executable}", "--", "-IS", str(Path(__file__).with_name("guest.py")), str(settings)]
        run = ["sh", "-c", _RUN, "sh", str(self._folder / "requests"), str(self._folder / "console"), *words]
        variables = {"TMPDIR": "/dev/shm", "HOME": "/dev/shm", **kernel_environment(cache_folder())}
        return fabric.enter_node(self.node.name, "/dev/shm", ["env", *(f"{k}={v}" for k, v in variables.items()), *run])

    def send(self, request: dict[str, Any]) -> None:
        """One request to the node's agent."""
        data = json.dumps(request).encode() + b"\n"
        while data:
            data = data[os.write(self._requests, data) :]

    def heard(self, line: str) -> None:
        """One line that the kernel's process wrote."""
        if not line.startswith('{"event"'):
            return  # the kernel's own, before there is a console
        event = json.loads(line)
        if event["event"] == "ready":
            self.is_ready = True
        self._on_event(event)

    def last_words(self) -> str:
        """The end of what the kernel wrote on its console."""
        console = self._folder / "console"
        return console.read_text(errors="replace")[-1000:].strip() if console.exists() else ""

    def _settings(self) -> dict[str, Any]:
        """What `guest.py` makes of a kernel."""
        return {
            "node": self.node.name,
            "agent": str(Path(__file__).with_name("agent.py")),
            "python": sys.executable,
            "rdma": str(
                next((p for p in (self._root / "bin/rdma", self._root / "usr/bin/rdma") if p.exists()), "rdma")
            ),
            "libraries": verbs_environment(self._root)["LD_LIBRARY_PATH"],
            "hosts": fabric.hosts_text(self._spec),
            "clock_mhz": next(iter(re.findall(r"^cpu MHz\s*: (\S+)", Path("/proc/cpuinfo").read_text(), re.M)), ""),
            "nics": [
                {
                    "name": nic.name,
                    "mtu": nic.mtu,
                    "address": str(nic.address) if nic.has_ip else "",
                    "hca": nic.hca if nic.nic_class == "roce_v2" else "",
                }
                for nic in self.node.nics
            ],
        }

    def _mac(self, number: int) -> str:
        place = [node.name for node in self._spec.nodes].index(self.node.name)
        return f"02:00:00:{place >> 8:02x}:{place & 255:02x}:{number:02x}"
