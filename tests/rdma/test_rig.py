"""The rig itself: hosts that are user-mode Linux with Soft-RoCE."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rig

from holmes.lab.testbed import uml

PING = "ibv_rc_pingpong -g 1 -e -m 4096 -d rxe0 -n 100"

pytestmark = pytest.mark.usefixtures("hosts")


def test_the_rig_gives_output_and_status() -> None:
    (result,) = rig.run(["ls /sys/class/infiniband; exit 3"])
    assert result == rig.Result(3, "rxe0\nrxe1\n")


def test_registers_survive_on_every_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where processors have registers that the kernel does not know of, a library adds them; it is harmless elsewhere.
    monkeypatch.setattr(uml, "has_wide_registers", lambda: True)
    code = "import numpy as np; a = np.arange(4096.0); s = {float(a @ a) for _ in range(20000)}; print(s, len(s))"
    both = f'for i in 1 2; do "$RIG_PYTHON" -c "{code}" & done; wait'
    (result,) = rig.run([both])
    assert result == rig.Result(0, f"{{{float(sum(i * i for i in range(4096)))}}} 1\n" * 2)


def test_verbs_work_on_two_hosts() -> None:
    one, two = rig.run([PING, f"sleep 1; {PING} 10.0.0.1"])
    assert (one.status, two.status) == (0, 0), one.output + two.output
    assert "100 iters in" in two.output


def test_a_host_that_hangs_is_ended() -> None:
    (result,) = rig.run(["echo begun; sleep 1000"], timeout_s=8)
    assert result.status is None
    assert result.output.startswith("begun")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_kernels_end_with_the_rig(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, rig.__file__, "sleep 100"]) as process:
        until = time.monotonic() + 20
        while len(kernels := kernels_of(process.pid)) < 3 and time.monotonic() < until:
            time.sleep(0.05)
        assert len(kernels) >= 3
        process.send_signal(number)
        process.wait(20)
    while any(is_running(pid) for pid in kernels) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in kernels)


def kernels_of(pid: int) -> list[int]:
    """Processes of the kernels that the process `pid` has started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [one for child in map(int, children) for one in [child, *kernels_of(child)]]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLMES_UML_KERNEL", "/nowhere/linux")
    with pytest.raises(rig.Missing, match=r"no kernel at /nowhere/linux.*HOLMES_UML_KERNEL"):
        rig.run(["true"])
