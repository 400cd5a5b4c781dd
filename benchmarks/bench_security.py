"""What security costs: TLS and integrity against plain connections, and a running job among hostile traffic.

    python benchmarks/bench_security.py                 # writes benchmarks/results/security.json
    python benchmarks/bench_security.py --only tls      # or integrity, hostile

`tls`: two emulated nodes, one NIC; communicators with and without TLS take turns, call by call; medians over all calls
of the slower rank, on a link of 1 Gbit/s and on one without a rate limit (where only the processors limit).
`integrity`: the same with every byte compared by CRC32C; in shared memory too.
`hostile`: two ranks all-reduce over 1 Gbit/s; on a third node an attacker scans, floods, replays and lies at the
store's port (the only open one) in every other interval. The rate under attack over the quiet one, per round; every
result is checked. Exits with 1 where one is wrong or the rate falls by more than a tenth.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import hostile_traffic as hostile
import numpy as np
from rank_jobs import parse_or_work
from timed_call import timed_call

import holmes_comm

_SPEC = """description: nodes on one network
networks:
  eth: {{class: ethernet, rate_gbps: {rate_gbps}}}
clusters:
  a:
    nodes: {nodes}
    nics:
      - {{name: eth0, network: eth}}
"""
_UNLIMITED_GBPS = 100.0
_OPERATIONS = ("all_reduce", "all_gather", "send")
_SIZES_BYTES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)
_SECRET = "the secret of the job"
_VARIANTS = {"tls": {"plain": {"tls": "off"}, "tls": {"tls": "all"}},
             "integrity": {"plain": {"integrity": False}, "integrity": {"integrity": True}}}  # fmt: skip
_LINKS = [("link of 1 Gbit/s", "tcp", 1.0), ("unlimited link", "tcp", _UNLIMITED_GBPS)]
_PLACES = {"tls": _LINKS, "integrity": [*_LINKS, ("shared memory", "shm", 0.0)]}
_MOST_LOST = 0.1  # of the rate, under attack


# --- a rank ---


def _compare(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    store = holmes_comm.TcpStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_server=rank == 0, secret=_SECRET
    )
    transport, checked = job["transport"], job["case"]
    options = {
        name: holmes_comm.CommunicatorOptions(transport=transport, secret=_SECRET, timeout_s=60.0, **changes)
        for name, changes in _VARIANTS[checked].items()
    }
    comms = {name: holmes_comm.init(store, rank, 2, name=name, options=options[name]) for name in options}
    rows = []
    for size_bytes in _SIZES_BYTES:
        data, part = np.ones(size_bytes // 4, "float32"), np.ones(size_bytes // 8, "float32")
        for operation in _OPERATIONS:
            times_s: dict[str, list[float]] = {name: [] for name in comms}
            wrong = 0
            for number in range(job["rounds"] + 1):
                for name, comm in comms.items():
                    data.fill(1)
                    slowest = np.array([timed_call(comm, operation, data, part)])
                    wrong += int((data != (2 if operation == "all_reduce" else 1)).sum())
                    comm.all_reduce(slowest, op="max")
                    if number > 0:  # the first warms up
                        times_s[name].append(float(slowest[0]))
            plain_s, checked_s = statistics.median(times_s["plain"]), statistics.median(times_s[checked])
            # Of the fastest calls: on a machine that others use too medians say when they ran.
            least_ratio = min(times_s[checked]) / min(times_s["plain"])
            rows.append({"operation": operation, "bytes": size_bytes, "plain_s": plain_s, f"{checked}_s": checked_s,
                         "ratio": checked_s / plain_s, "least_ratio": least_ratio, "wrong": wrong})  # fmt: skip
    encryption = sorted({c["encryption"] for c in comms[checked].connections()})
    for comm in comms.values():
        comm.barrier()
    return {"rows": rows, "encryption": encryption}


def _reduce_for(comm: Any, seconds: float) -> tuple[float, int, int]:
    """All-reduces for so long; bytes per second, operations, wrong elements."""
    count, wrong, operations = 1 << 20, 0, 0
    expected = np.arange(count, dtype="float32") * 2 + 1
    go_on = np.ones(1)
    comm.barrier()
    start_s = time.perf_counter()
    while go_on[0] > 0:
        data = np.arange(count, dtype="float32") + comm.rank
        comm.all_reduce(data)
        wrong += int((data != expected).sum())
        operations += 1
        go_on[0] = 1.0 if time.perf_counter() - start_s < seconds else 0.0
        comm.all_reduce(go_on, op="min")
    return 4.0 * count * operations / (time.perf_counter() - start_s), operations, wrong


def _be_attacked(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = holmes_comm.TcpStore(host, port, is_server=rank == 0, secret=_SECRET)
    # The attacker hears on this one when its turn begins and ends; it knows no secret.
    signals = holmes_comm.TcpStore(host, port + 1, is_server=rank == 0)
    comm = holmes_comm.init(store, rank, 2, transport="tcp", name="job", secret=_SECRET, timeout_s=60.0)
    _reduce_for(comm, job["interval_s"])
    rounds = []
    for number in range(job["rounds"]):
        rates = {}
        for phase in ("quiet", "hostile") if number % 2 == 0 else ("hostile", "quiet"):
            if phase == "hostile" and rank == 0:
                signals.set(f"begin {number}", b"")
            rates[phase], operations, wrong = _reduce_for(comm, job["interval_s"])
            if phase == "hostile" and rank == 0:
                signals.set(f"end {number}", b"")
                signals.wait(f"ended {number}", 60.0)
            rates[f"{phase}_operations"], rates[f"{phase}_wrong"] = operations, wrong
            comm.barrier()
        rounds.append({**rates, "ratio": rates["hostile"] / rates["quiet"]})
    # Only now: the others are served until they have said that they are done.
    attempts = json.loads(signals.get("attempts", 60.0)) if rank == 0 else {}
    comm.barrier()
    return {"rounds": rounds, "attempts": attempts}


def _attack(job: dict[str, Any]) -> None:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    address = (host, port)
    signals = holmes_comm.TcpStore(host, port + 1)
    outcomes: Counter[str] = Counter()
    per_interval = -(-job["connections"] // job["rounds"])
    for number in range(job["rounds"]):
        signals.wait(f"begin {number}", 120.0)
        end_s = time.monotonic() + job["interval_s"]
        left = per_interval
        while left > 0 or time.monotonic() < end_s:
            # The connections are spread over the interval, between everything else.
            burst = min(left, max(per_interval // 20, 1))
            left -= burst
            outcomes.update(hostile.flood(address, burst))
            for attack in hostile.attacks(address, _SECRET.encode()):
                try:
                    attack()
                    outcomes["other attacks"] += 1
                except OSError as error:
                    outcomes[type(error).__name__] += 1
            time.sleep(job["interval_s"] / 40)
            if time.monotonic() > end_s + job["interval_s"]:
                break
        signals.set(f"ended {number}", b"")
    signals.set("attempts", json.dumps(outcomes))


def _run_rank(job: dict[str, Any]) -> None:
    rank = int(os.environ["RANK"])
    if rank == 2:
        _attack(job)
        return
    result = _be_attacked(rank, job) if job["case"] == "hostile" else _compare(rank, job)
    print("result " + json.dumps(result), flush=True)


# --- the testbed ---


def _run_here(job: dict[str, Any]) -> Any:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    command = [sys.executable, __file__, "--rank", json.dumps(job)]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **address, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    if any(rank.returncode != 0 for rank in ranks):
        raise SystemExit("".join(outputs))
    return next(json.loads(line[7:]) for line in outputs[0].splitlines() if line.startswith("result "))


def _run_case(job: dict[str, Any], nodes: int, rate_gbps: float) -> Any:
    from holmes.lab.testbed import Testbed

    if job.get("transport") == "shm":
        return _run_here(job)

    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as spec:
        spec.write(_SPEC.format(nodes=nodes, rate_gbps=rate_gbps))
        spec.flush()
        testbed = Testbed(Path(spec.name))
    outcome = testbed.run([sys.executable, __file__, "--rank", json.dumps(job)], timeout_s=600.0)
    if outcome.returncode != 0:
        raise SystemExit("\n".join(line for lines in outcome.outputs.values() for line in lines))
    return next(json.loads(line[7:]) for line in outcome.outputs[0] if line.startswith("result "))


def _machine() -> dict[str, Any]:
    model = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "unknown")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return {
        "processor": model.split(":")[-1].strip(),
        "cores": os.cpu_count(),
        "kernel": os.uname().release,
        "python": sys.version.split()[0],
        "commit": commit.stdout.strip(),
        "load_average": [round(load, 1) for load in os.getloadavg()],  # what else ran: above 1 or so, ratios waver
        "links": "emulated (token buckets on veth pairs)",
        "date": time.strftime("%Y-%m-%d"),
        "command": "python benchmarks/bench_security.py " + " ".join(sys.argv[1:]),
    }


def main() -> int:
    """Runs the cases, prints tables, writes JSON. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["tls", "integrity", "hostile"], help="this part only")
    parser.add_argument("--rounds", type=int, default=7, help="calls of each operation; rounds under attack")
    parser.add_argument("--interval-s", type=float, default=2.0, help="length of a quiet or hostile interval")
    parser.add_argument("--connections", type=int, default=10_000, help="connection attempts in all")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("results") / "security.json")
    arguments = parse_or_work(parser, _run_rank)
    results = json.loads(arguments.json.read_text())["results"] if arguments.json.exists() else {}
    bad = False
    for checked in _VARIANTS:
        if arguments.only not in (None, checked):
            continue
        results[checked] = {}
        for name, transport, rate_gbps in _PLACES[checked]:
            job = {"case": checked, "rounds": arguments.rounds, "transport": transport}
            case = results[checked][name] = _run_case(job, 2, rate_gbps)
            for row in case["rows"]:
                bad |= row["wrong"] > 0
                print(f"{name:17} {row['operation']:11} {row['bytes'] >> 10:6} KiB  plain {row['plain_s'] * 1e3:8.2f} "
                      f"ms  {checked} {row[checked + '_s'] * 1e3:8.2f} ms  "
                      f"ratio {row['ratio']:5.2f}, of the fastest {row['least_ratio']:5.2f}", flush=True)  # fmt: skip
    if arguments.only in (None, "hostile"):
        job = {"case": "hostile", "rounds": arguments.rounds, "interval_s": arguments.interval_s,
               "connections": arguments.connections}  # fmt: skip
        hostile_result = results["hostile"] = _run_case(job, 3, 1.0)
        ratio = hostile_result["ratio"] = statistics.median(r["ratio"] for r in hostile_result["rounds"])
        wrong = sum(r["quiet_wrong"] + r["hostile_wrong"] for r in hostile_result["rounds"])
        bad |= wrong > 0 or ratio < 1 - _MOST_LOST
        print(f"hostile: rate {ratio:.3f} of the quiet one, {wrong} wrong elements, {hostile_result['attempts']}")
    arguments.json.parent.mkdir(exist_ok=True)
    arguments.json.write_text(json.dumps({"machine": _machine(), "results": results}, indent=1) + "\n")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
