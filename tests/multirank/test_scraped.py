"""Debian's Prometheus scrapes a job of two ranks by our file: what the Grafana board and alerts ask for is there."""

from __future__ import annotations

from pathlib import Path

import prometheus
import pytest
from ports import free_ports

pytestmark = pytest.mark.skipif(not prometheus.is_here(), reason=prometheus.WHAT_BRINGS_IT)


def test_every_query_of_the_board_and_the_alerts_is_answered(tmp_path: Path) -> None:
    ports = free_ports(2)
    with prometheus.scraped_ranks(ports[0]), prometheus.scraping(tmp_path, ports) as server:
        assert server.wait_for(lambda: server.ask("holmes_failures_total"), 60)
        queries = {
            f"{panel['title']}: {target['expr']}": prometheus.filled_in(target["expr"], 1)
            for panel in prometheus.board()["panels"]
            for target in panel["targets"]
        }
        silent = {name for name, query in queries.items() if not server.wait_for(lambda q=query: server.ask(q), 10)}
        assert silent == set()
        assert server.ask('sum(up{job="holmes"})')[0]["value"][1] == "2"
        assert {one["metric"]["rank"] for one in server.ask("holmes_sent_bytes_total")} == {"0", "1"}
        for variable in ("rank", "group", "nic"):  # the board's drop-down lists
            assert server.get(f"api/v1/label/{variable}/values", **{"match[]": "holmes_sent_bytes_total"})
        (group,) = server.get("api/v1/rules")["groups"]
        assert [(rule["name"], rule["health"]) for rule in group["rules"]] == [
            (rule["alert"], "ok") for rule in prometheus.rules()
        ]


def test_the_first_failure_of_a_group_is_told_at_once(tmp_path: Path) -> None:
    """The series of a failure begins with it, at 1: what only looks for an increase does not see it."""
    ports = free_ports(2)
    with prometheus.scraped_ranks(ports[0]), prometheus.scraping(tmp_path, ports) as server:
        assert server.wait_for(lambda: server.ask("holmes_failures_total"), 60)

        def told() -> list[str]:
            alerts = server.get("api/v1/alerts")["alerts"]
            return [
                alert["annotations"]["summary"] for alert in alerts if alert["labels"]["alertname"].endswith("Failed")
            ]

        assert server.wait_for(told, 15)
        assert "group short of rank 0 failed: " in " ".join(told())
