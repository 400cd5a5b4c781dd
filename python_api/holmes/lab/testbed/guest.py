"""First process of a node that is a kernel of its own (uml.py): makes its NICs and HCAs, then becomes the agent.

Standard library only and run by path, in isolated mode. Its argument is the file of what to make.
"""

import json
import os
import socket
import subprocess
import sys
import termios
import time
import tty
from pathlib import Path

PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
GID_WAIT_S = 3.0
MOUNTS = (("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"), ("tmpfs", "/dev/shm"), ("tmpfs", "/run"))


def run(*words: str, libraries: str = "") -> None:
    """Runs a program that must succeed; where it does not the kernel's console says so, and the kernel ends."""
    environment = {"PATH": PATH, **({"LD_LIBRARY_PATH": libraries} if libraries else {})}
    subprocess.run(words, check=True, env=environment)


def make_nic(number: int, nic: dict[str, object], settings: dict[str, str]) -> None:
    """Gives a NIC its name, address and HCA."""
    name = str(nic["name"])
    run("ip", "link", "set", f"vec{number}", "name", name)
    # Of packets that leave the cutting to the NIC most are lost.
    run("ip", "link", "set", name, "mtu", str(nic["mtu"]), "gso_max_segs", "1", "up")
    if nic["address"]:
        run("ip", "address", "add", str(nic["address"]), "broadcast", "+", "dev", name)
    if nic["hca"]:
        run(
            settings["rdma"],
            "link",
            "add",
            str(nic["hca"]),
            "type",
            "rxe",
            "netdev",
            name,
            libraries=settings["libraries"],
        )
        await_gids(Path(f"/sys/class/infiniband/{nic['hca']}/ports/1"), 2 if nic["address"] else 1)


def await_gids(port: Path, count: int) -> None:
    """A GID follows its address a little later."""
    end_s = time.monotonic() + GID_WAIT_S
    while time.monotonic() < end_s:
        gids = [(port / "gids" / str(index)).read_text().strip() for index in range(count)]
        if all(gid.strip("0:") for gid in gids):
            return
        time.sleep(0.05)


def cpuinfo(clock_mhz: str) -> list[str]:
    """The file, if any, that is to stand for /proc/cpuinfo: with the processor's rate, as other kernels tell it.
    perftest measures no time without."""
    if not clock_mhz:
        return []
    told = Path("/dev/shm/cpuinfo")
    told.write_text(Path("/proc/cpuinfo").read_text() + f"cpu MHz\t\t: {clock_mhz}\n")
    return [str(told)]


def become_agent(settings: dict[str, str]) -> None:
    """The serial line is its standard input and output from now on."""
    line = os.open("/dev/ttyS0", os.O_RDWR | os.O_NOCTTY)
    tty.setraw(line, termios.TCSANOW)
    os.dup2(line, 0)
    os.dup2(line, 1)
    words = [settings["python"], "-IS", settings["agent"], *cpuinfo(settings["clock_mhz"])]
    os.execve(settings["python"], words, {"PATH": PATH, "HOME": "/run"})


def main() -> None:
    """Never returns."""
    for kind, place in MOUNTS:
        if not (place == "/dev" and os.path.exists("/dev/ttyS0") and os.path.ismount("/dev")):
            Path(place).mkdir(exist_ok=True)
            run("mount", "-t", kind, kind, place)
    settings = json.loads(Path(sys.argv[1]).read_text())
    socket.sethostname(settings["node"])
    run("ip", "link", "set", "lo", "up")
    for number, nic in enumerate(settings["nics"]):
        make_nic(number, nic, settings)
    etc = Path("/run/etc")
    (etc / "libibverbs.d").mkdir(parents=True)  # libibverbs warns where there is none
    (etc / "hosts").write_text(settings["hosts"])
    run("mount", "-t", "overlay", "-o", f"lowerdir={etc}:/etc", "overlay", "/etc")
    become_agent(settings)


if __name__ == "__main__":
    try:
        main()
    except BaseException as error:
        print(f"guest: {error}", file=sys.stderr, flush=True)
        raise
