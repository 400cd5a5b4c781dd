"""The rig itself: hosts that are user-mode Linux with Soft-RoCE."""

from __future__ import annotations

import pytest
import rig

PING = "ibv_rc_pingpong -g 1 -e -m 4096 -d rxe0 -n 100"

pytestmark = pytest.mark.usefixtures("hosts")


def test_the_rig_gives_output_and_status() -> None:
    (result,) = rig.run(["ls /sys/class/infiniband; exit 3"])
    assert result == rig.Result(3, "rxe0\nrxe1\n")


def test_verbs_work_on_two_hosts() -> None:
    one, two = rig.run([PING, f"sleep 1; {PING} 10.0.0.1"])
    assert (one.status, two.status) == (0, 0), one.output + two.output
    assert "100 iters in" in two.output


def test_a_host_that_hangs_is_ended() -> None:
    (result,) = rig.run(["echo begun; sleep 1000"], timeout_s=8)
    assert result.status is None
    assert result.output.startswith("begun")


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLMES_UML_KERNEL", "/nowhere/linux")
    with pytest.raises(rig.Missing, match=r"no kernel at /nowhere/linux.*HOLMES_UML_KERNEL"):
        rig.run(["true"])
