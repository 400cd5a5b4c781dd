"""`holmes top` on emulated nodes: from this machine by sockets, and from a node by the other nodes' metrics pages."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from namespaces import needs_namespaces
from paths import WORKERS

from holmes.lab.testbed import Testbed

pytestmark = pytest.mark.alone  # asks all processes of this user


@needs_namespaces
def test_two_nodes_by_sockets_and_by_addresses() -> None:
    """1 Gbit/s links: each direction's rate stays below it. A third address is nobody's."""
    with Testbed("pair").session() as session:
        nodes = [(node.name, str(node.nics[0].address.ip)) for node in session.spec.nodes]
        pages = {"HOLMES_METRICS_PORT": "9400", "HOLMES_METRICS_ADDRESS": "0.0.0.0"}
        job = session.launch([sys.executable, str(WORKERS / "busy_worker.py")], env=pages)
        command = [sys.executable, "-m", "holmes", "top", "--every", "1", "--json", "-"]
        places = [f"{nodes[0][1]}:9400", f"{nodes[1][1]}:9400-9401"]
        wait = (
            "import sys, time, urllib.request\n"
            "for place in sys.argv[1:]:\n"
            "    for _ in range(200):\n"
            "        try:\n"
            "            page = urllib.request.urlopen(f'http://{place}/metrics.json', timeout=5).read()\n"
            "            if b'all_reduce' in page: break\n"
            "        except OSError: pass\n"
            "        time.sleep(0.1)\n"
        )
        pages_there = [f"{address}:9400" for _, address in nodes]
        assert session.spawn(nodes[0][0], [sys.executable, "-c", wait, *pages_there]).wait(60) == 0
        inside = session.spawn(nodes[0][0], [*command, *places])
        assert inside.wait(60) == 0, inside.lines
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        outside = subprocess.run([*command, "--testbed"], capture_output=True, text=True, timeout=60, env=env)
        job.stop()
    assert outside.returncode == 0, outside.stderr
    (by_pages,) = json.loads("\n".join(inside.lines))["jobs"]
    by_sockets = next(rows for rows in json.loads(outside.stdout)["jobs"] if {row["group"] for row in rows} == {"dp"})
    silent = [row for row in by_pages if row["problem"]]
    assert [(row["host"], row["problem"]) for row in silent] == [
        (f"{nodes[1][1]}:9401", "no answer: Connection refused")
    ]
    for rows in ([row for row in by_pages if not row["problem"]], by_sockets):
        assert [(row["rank"], row["host"], row["nic"]) for row in rows] == [
            (rank, name, "eth0") for rank, (name, _) in enumerate(nodes)
        ]
        for row in rows:
            assert 0.005 < row["sent_gbps"] < 1.0
            assert row["received_gbps"] == pytest.approx(row["sent_gbps"], rel=0.3)
