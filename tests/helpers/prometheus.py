"""Debian's Prometheus on ranks of this machine, by the files of examples/monitoring; what the Grafana board asks it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from paths import ROOT, WORKERS
from ports import free_port

FOLDER = ROOT / "examples" / "monitoring"
WHAT_BRINGS_IT = "needs prometheus: apt-get install prometheus"


def is_here() -> bool:
    return shutil.which("prometheus") is not None


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "grafana-board.json").read_text())
    return found


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def filled_in(expression: str, every_s: float) -> str:
    """As Grafana asks it with every variable at "All"; its rate interval is four scrapes."""
    expression = expression.replace("$__rate_interval", f"{4 * every_s:g}s")
    return re.sub(r"\$(rank|group|nic)\b", ".*", expression)


def legend(pattern: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), pattern)


@contextmanager
def scraped_ranks(first_port: int) -> Iterator[None]:
    """A job of two ranks (scraped_worker.py) that serve their metrics on ports in a row."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"HOLMES_METRICS_PORT": str(first_port)}
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKERS / "scraped_worker.py")],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        for one in started:
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n"
        yield
    finally:
        for one in started:
            one.kill()
            one.communicate()


class Server:
    """A Prometheus that scrapes."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **asked: str | float) -> Any:
        """The data of an answer of its HTTP API."""
        query = urllib.parse.urlencode(asked)
        with urllib.request.urlopen(f"{self.url}/{path}?{query}", timeout=10) as answer:
            return json.load(answer)["data"]

    def ask(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("api/v1/query", query=expression)["result"]
        return found

    def wait_for(self, is_so: Callable[[], object], limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            try:
                if is_so():
                    return True
            except OSError:  # it does not listen yet
                pass
            time.sleep(0.2)
        return False


@contextmanager
def scraping(folder: Path, ports: Sequence[int], every_s: int = 1) -> Iterator[Server]:
    """Prometheus with our scrape file and alerts, but on these ports and as often; its data and log are in `folder`."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": f"{every_s}s", "evaluation_interval": f"{every_s}s"}
    config["rule_files"] = [str(FOLDER / name) for name in config["rule_files"]]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{port}" for port in ports]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    listens = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={listens}"], stdout=log, stderr=log)
    try:
        server = Server(f"http://{listens}")
        is_ready = server.wait_for(lambda: server.get("api/v1/status/buildinfo"), 30)
        assert is_ready, (folder / "prometheus.log").read_text()[-2000:]
        yield server
    finally:
        process.terminate()
        process.wait(20)
