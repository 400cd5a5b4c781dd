"""`holmes top` on a real job of two ranks: rates, waits, who is silent, in 80 columns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from paths import WORKERS
from ports import free_port, free_ports
from rich.console import Console

from holmes.tools.top.rates import rows_of
from holmes.tools.top.sources import Sample, source_of
from holmes.tools.top.table import table_of
from holmes_comm.process_metrics import Metrics, NicMetrics, OperationMetrics, Wait


@contextmanager
def job(**more: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks that exchange, once they have begun."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **more}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKERS / "busy_worker.py")],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "HOLMES_HOSTNAME": f"node{rank}"},
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def top(*arguments: str) -> str:
    command = [sys.executable, "-m", "holmes", "top", *arguments]
    env = {**os.environ, "COLUMNS": "80", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_rates_of_a_running_job_by_sockets_and_by_pages(tmp_path: Path) -> None:
    port = free_ports(2)[0]
    with job(HOLMES_METRICS_PORT=str(port)) as ranks:
        time.sleep(0.3)
        pids = [str(rank.pid) for rank in ranks]
        found = tmp_path / "top.json"
        shown = top("--every", "1", "--json", str(found), *pids)
        (by_sockets,) = json.loads(found.read_text())["jobs"]
        (by_pages,) = json.loads(top("--every", "1", "--json", "-", f"127.0.0.1:{port}-{port + 1}"))["jobs"]
    assert max(map(len, shown.splitlines())) <= 80
    assert "2 ranks on 2 hosts; Gbit/s" in shown
    for rows in (by_sockets, by_pages):
        assert [(row["rank"], row["host"], row["group"], row["nic"]) for row in rows] == [
            (0, "node0", "dp", "lo"),
            (1, "node1", "dp", "lo"),
        ]
        for row in rows:
            # 0.4 MB each way in an all_reduce of two ranks, headers aside.
            expected = row["operations_per_s"] * 400_000 * 8 / 1e9
            assert row["operations_per_s"] > 5
            assert row["sent_gbps"] == pytest.approx(expected, rel=0.3)
            assert row["received_gbps"] == pytest.approx(expected, rel=0.3)


def test_who_waits_and_who_is_silent() -> None:
    with job(STALL="5") as ranks:
        time.sleep(1.5)
        pids = [str(rank.pid) for rank in ranks]
        (rows,) = json.loads(top("--every", "0.2", "--json", "-", *pids))["jobs"]
        assert rows[0]["waits_in"] == "all_reduce #5"
        assert rows[0]["waits_s"] > 1
        assert rows[1]["waits_in"] == ""
        ranks[1].send_signal(signal.SIGSTOP)
        try:
            shown = top("--once", "--every", "0.2", *pids)
        finally:
            ranks[1].send_signal(signal.SIGCONT)
        assert "2 ranks on 2 hosts, 1 silent" in shown
        assert "rank 1 (node1): it is stopped (SIGSTOP or a debugger)" in shown
        assert "s all_reduce" in shown


def test_an_address_that_does_not_answer_is_shown_as_such() -> None:
    port = free_ports(2)[0]
    with job(HOLMES_METRICS_PORT=str(port)) as ranks:
        source = source_of([f"127.0.0.1:{port}-{port + 1}"])
        before = source()[0]
        ranks[1].send_signal(signal.SIGSTOP)
        (alive, stopped) = rows_of(before, source()[0])
    assert (alive.rank, alive.problem) == (0, "")
    assert (stopped.rank, stopped.host, stopped.problem) == (1, "node1", "no answer: timed out")


def sample(taken_s: float, sent: int, done: int, again: int, *waits: Wait) -> Sample:
    nics = (NicMetrics("dp", "ib0", sent, 2 * sent, again, 0, 1), NicMetrics("old", "ib0", 9, 9, 9, 0, 0))
    operations = (
        OperationMetrics("dp", "all_reduce", done, 0, 0, 0.0),
        OperationMetrics("dp", "send", done, 0, 0, 0.0),
    )
    return Sample("a", 3, "a", taken_s, Metrics(nics, operations, {}, {"dp": 1, "gpu": 1}, {}, waits))


def test_rates_are_differences_and_groups_that_ended_are_left_out() -> None:
    now = sample(12.0, 10**9, 30, 7, Wait("gpu", "recv", 4, 3.5))
    dp, gpu = rows_of([sample(10.0, 5 * 10**8, 10, 4)], [now])
    assert (dp.group, dp.nic, dp.sent_gbps, dp.received_gbps, dp.operations_per_s) == ("dp", "ib0", 2.0, 4.0, 20.0)
    assert (dp.retransmitted, dp.all_retransmitted, dp.waits_in) == (3, 7, "")
    assert (gpu.group, gpu.nic, gpu.sent_gbps, gpu.waits_in, gpu.waits_s) == ("gpu", None, None, "recv #4", 3.5)
    assert rows_of([], [now])[0].sent_gbps == 0  # there is no time to divide by


def test_what_is_between_clusters_is_a_row_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    def taken(taken_s: float, inside: int, between: int) -> Sample:
        nics = (
            NicMetrics("pp", "eth0", inside, 0, 0, 0, 1),
            NicMetrics("pp", "eth0", between, 0, 0, 0, 1, "inter", 0.0412, 2, stalls=between // 10**9),
        )
        return Sample("a", 3, "a", taken_s, Metrics(nics, (), {}, {"pp": 1}, {}))

    rows = rows_of([taken(10.0, 0, 10**9)], [taken(18.0, 2 * 10**9, 2 * 10**9)])
    assert [(row.path, row.nic, row.sent_gbps) for row in rows] == [("intra", "eth0", 2.0), ("inter", "eth0", 1.0)]
    Console(width=80).print(table_of(rows, 8.0, 80))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[3] for line in lines if line.startswith("   3 ")] == ["eth0"]
    assert [line.split()[:2] for line in lines if "*eth0" in line] == [["pp", "*eth0"]]
    assert lines[-2] == "* between clusters; round trip up to 41.2 ms, 2 changes of rate"
    assert lines[-1] == "1 stall: bytes were under way and none arrived"


@pytest.mark.parametrize("gbps", [0.00123, 0.00999, 0.0123, 1.0, 999.7, 12345.0])
def test_a_rate_fits_its_column(gbps: float, capsys: pytest.CaptureFixture[str]) -> None:
    bits = int(gbps * 1e9)
    rows = rows_of([sample(10.0, 0, 0, 0)], [sample(18.0, bits, 0, 0)])
    Console(width=80).print(table_of(rows, 8.0, 80))
    _, header, *lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if "ib0" in line]
    assert header.split() == ["rank", "host", "group", "NIC", "out", "in", "op/s", "retr", "in", "operation"]
    sent, received = line.split()[4:6]
    assert float(sent) == pytest.approx(gbps, rel=0.05)
    assert float(received) == pytest.approx(2 * gbps, rel=0.05)
    assert "e" not in sent + received
