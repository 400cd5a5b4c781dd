"""The Grafana board and the Prometheus files of examples/monitoring: they ask for series that ranks really have."""

from __future__ import annotations

import errno
import json
import re
import shutil
import socket
import socketserver
import struct
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from paths import ROOT

from holmes.tools.top.sources import source_of
from holmes_comm.metrics_server import serve_metrics
from holmes_comm.process_metrics import Metrics, NicMetrics, OperationMetrics, Wait

FOLDER = ROOT / "examples" / "monitoring"
NAMES = re.compile(r"holmes_\w+")


def served() -> dict[str, set[str]]:
    """Series and their labels, of a rank that has everything."""
    nics = (NicMetrics("dp", "ib0", 1, 1, 1, 1, 1, "inter", 0.04, 1, 2.0, 0.5, 0.5, 1, 0.4),)
    operations = (OperationMetrics("dp", "all_reduce", 1, 1, 1, 1.0),)
    failures = {("dp", "TimeoutError"): 1}
    labels = {"rank": "0", "host": "a0"}
    waits = (Wait("dp", "send", 3, 1.5),)
    lines = Metrics(nics, operations, failures, {"dp": 1}, labels, waits).to_prometheus().splitlines()
    series = [re.fullmatch(r"(\w+)\{(.*)\} \S+", line) for line in lines if not line.startswith("#")]
    assert all(series)
    return {found[1]: set(re.findall(r'(\w+)="', found[2])) for found in series if found}


def expressions() -> list[str]:
    board = json.loads((FOLDER / "grafana-board.json").read_text())
    alerts = yaml.safe_load((FOLDER / "alerts.yml").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    found += [variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    return found + [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]


def test_every_query_asks_for_series_and_labels_that_are_there() -> None:
    series = served()
    for expression in expressions():
        names = set(NAMES.findall(expression))
        assert names <= series.keys(), expression
        labels = set().union(*(series[name] for name in names), {"job"})
        assert set(re.findall(r"(\w+)=~?\"", expression)) <= labels, expression
    used = {name for expression in expressions() for name in NAMES.findall(expression)}
    assert used >= series.keys() - {"holmes_connections", "holmes_communicators", "holmes_operation_bytes_total",
                                    "holmes_operations_failed_total"}  # fmt: skip


def test_the_board_is_one_that_grafana_imports() -> None:
    board: dict[str, Any] = json.loads((FOLDER / "grafana-board.json").read_text())
    assert {"title", "uid", "panels", "templating", "schemaVersion"} <= board.keys()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, panel["title"]
        assert all(0 <= x < 24 for x, _ in cells)
        taken |= cells
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])


needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus"
)


@needs_promtool
@pytest.mark.parametrize(
    ("values", "alerts"),
    [
        ("_x8 1+0x60", {"1m45s": 0, "2m": 1, "6m30s": 1, "7m15s": 0}),  # the first failure, and no other
        ("1+0x40 2+0x60", {"9m": 0, "10m30s": 1, "16m": 0}),  # a later one
        ("_x60", {"5m": 0}),
    ],
)
def test_a_groups_first_failure_is_an_alert_and_so_is_a_later_one(
    values: str, alerts: dict[str, int], tmp_path: Path
) -> None:
    """A series of failures is not there before the first one: its labels name the error."""
    none = Metrics((), (), {}, {"dp": 1}, {"rank": "0", "host": "a0"}).to_prometheus()
    assert not re.search(r"^holmes_failures_total\{", none, re.MULTILINE)
    labels = {"group": "dp", "error": "TimeoutError", "rank": "0", "host": "a0"}
    said = "group dp of rank 0 failed: TimeoutError; run `holmes debug`"
    alert = {"exp_labels": labels, "exp_annotations": {"summary": said}}
    series = "holmes_failures_total{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"
    rules = [
        {"eval_time": time, "alertname": "HolmesCommunicatorFailed", "exp_alerts": [alert] * count}
        for time, count in alerts.items()
    ]
    test = {"interval": "15s", "input_series": [{"series": series, "values": values}], "alert_rule_test": rules}
    file = tmp_path / "alerts_test.yml"
    rules_of = {"rule_files": [str(FOLDER / "alerts.yml")], "evaluation_interval": "15s", "tests": [test]}
    file.write_text(yaml.safe_dump(rules_of))
    run = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@needs_promtool
def test_prometheus_accepts_its_files() -> None:
    run = subprocess.run(
        ["promtool", "check", "config", str(FOLDER / "prometheus.yml")], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "SUCCESS: 3 rules found" in run.stdout


@pytest.fixture
def port() -> Iterator[int]:
    server = serve_metrics(0)
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def serving() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def page(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return str(answer.read().decode())


def test_a_query_is_no_other_page(port: int) -> None:
    assert "holmes_communicators" in page(port, "/metrics?module=holmes")
    assert "communicators" in json.loads(page(port, "/metrics.json?"))


def test_a_health_check_asks_for_the_head_only(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as scraper:
        scraper.sendall(b"HEAD /metrics HTTP/1.0\r\n\r\n")
        head = b"".join(iter(lambda: scraper.recv(4096), b""))
    assert b" 200 " in head
    assert b"Content-Length: " in head
    assert head.endswith(b"\r\n\r\n")


def test_a_scraper_that_goes_away_prints_nothing(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    for sent in (b"", b"GET /met", b"GET /metrics HTTP/1.0\r\n\r\n"):
        with closing(socket.create_connection(("127.0.0.1", port))) as connection:
            connection.sendall(sent)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close: a reset
    page(port)  # accepted after the others
    until_s = time.monotonic() + 30
    while serving() and time.monotonic() < until_s:
        time.sleep(0.01)
    assert capfd.readouterr() == ("", "")


def test_connections_that_ask_nothing_hold_few_threads_and_descriptors(port: int) -> None:
    held = []
    try:
        for _ in range(200):
            held.append(socket.create_connection(("127.0.0.1", port)))
            time.sleep(0.005)
        assert "holmes_communicators" in page(port)
        until_s = time.monotonic() + 3  # an idle one has 5 s
        while serving() > 64 and time.monotonic() < until_s:
            time.sleep(0.01)
        assert serving() <= 64
    finally:
        for connection in held:
            connection.close()


def test_where_no_descriptor_is_left_the_server_does_not_spin(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def none_left(_: Any) -> Any:
        nonlocal calls
        calls += 1
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socketserver.TCPServer, "get_request", none_left)
        with closing(socket.create_connection(("127.0.0.1", port))):
            time.sleep(0.5)
            assert calls <= 10
    assert "holmes_communicators" in page(port)


def test_a_page_without_end_is_no_answer() -> None:
    """holmes top at a port where something streams."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def stream() -> None:
            connection, _ = listener.accept()
            with closing(connection), suppress(OSError):
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                for _ in range(600):
                    connection.sendall(b"[")
                    time.sleep(0.1)

        threading.Thread(target=stream, daemon=True).start()
        began_s = time.monotonic()
        ((sample,),) = source_of([f"127.0.0.1:{listener.getsockname()[1]}"])()
    assert sample.metrics is None
    assert "does not end" in sample.problem
    assert time.monotonic() - began_s < 30
