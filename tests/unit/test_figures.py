"""`benchmarks/figures.py`: its table of goals, verdicts and report."""

import pytest
from figure_runs import Goal, Run, load_runs, merge
from figures import judge, matrix_section, report

from holmes.lab.testbed import builtin_specs
from holmes.tools.bench import OPERATIONS, parse_bytes


def row(**changes):
    whole = {
        "operation": "all_reduce",
        "peer": "holmes",
        "size_bytes": 1 << 20,
        "time_us": 100.0,
        "p50_us": 100.0,
        "p99_us": 120.0,
        "algorithm_gb_per_s": 4.0,
        "bus_gb_per_s": 4.0,
        "cores": 1.5,
        "gb_per_core_s": 1.0,
        "foreign_cores": 0.05,
        "calls": 10,
        "wrong_elements": 0,
        "ratios": {"gloo": 3.0},
    }
    return {**whole, **changes}


def document(*rows):
    hardware = {"processor": "x", "cores": 2, "memory_gib": 8, "kernel": "6.1"}
    return {"date": "2026-01-01", "command": "holmes bench", "hardware": hardware, "versions": {}, "rows": list(rows)}


def test_every_run_of_the_table_is_measurable():
    runs = load_runs()
    assert len({run.name for run in runs}) == len(runs)
    for run in runs:
        assert set(run.operations) <= set(OPERATIONS)
        assert run.testbed is None or run.testbed in builtin_specs()
        assert all(parse_bytes(size) > 0 for size in run.sizes())
        command = " ".join(run.command(1.0, 5))
        for reference in run.goals:
            assert reference in ("iperf3", "time_us", "cores") or reference in command, run.name


@pytest.mark.parametrize(
    ("reference", "bound", "changes", "met"),
    [
        ("gloo", 3.0, {}, True),
        ("gloo", 3.1, {}, False),
        ("gloo", 3.0, {"wrong_elements": 1}, False),
        ("time_us", 100, {}, True),
        ("cores", 1.4, {}, False),
        ("iperf3", 0.9, {"share_of_iperf3": 0.95}, True),
    ],
)
def test_goals_are_lower_bounds_but_for_time_and_cores(reference, bound, changes, met):
    assert Goal(reference, "all_reduce", "1M", bound).met(row(**changes)) is met


def test_report_counts_what_is_met_and_refuses_missing_rows():
    run = Run("one", "One", ["all_reduce"], {"gloo": {"1M": 2}, "time_us": {"1M": 50}})
    text = report([(run, document(row(), row(peer="gloo", ratios={})))])
    assert "1 of 2 goals met" in text
    assert "| all_reduce | 1M | 100.0 | 4.000 | 1.50 | 0.05 | gloo | 3 | 2 | met |" in text
    with pytest.raises(ValueError, match="one: no row of all_reduce at 1M"):
        judge(run, document(row(size_bytes=1 << 10)))


def test_the_matrix_is_told_by_what_was_lost():
    cells = [
        {
            "layout": "tcp-2",
            "operation": "reduce",
            "size_bytes": size,
            "time_us": 9.0,
            "ratios": {"gloo": 2.0, "ucx": ratio},
        }
        for size, ratio in ((8, 0.8), (1024, 0.99))
    ]
    document = {"date": "2026-01-01", "command": "it", "noise": 0.05, "failures": ["no mpirun"], "cells": cells}
    text = matrix_section(document)
    assert text.startswith("## Every operation and size against the best of all: tcp-2\n")
    assert "(matrix.png)" in text
    assert "(matrix-links.png)" in matrix_section(document, "matrix-links.png")
    assert "Of 2 cells 1 were lost by more than 5% in two" in text
    assert "| tcp-2 | reduce | 8 | 9.0 | ucx | 0.80 |" in text
    assert "| 1024 |" not in text
    assert "Not measured: no mpirun." in text


def test_rounds_beside_iperf3_become_one_document():
    merged = merge([document(row(time_us=1.0, bus_gb_per_s=4.0)), document(row(time_us=3.0, bus_gb_per_s=2.0))], [4, 4])
    assert merged["rows"][0]["time_us"] == 2.0
    assert merged["rows"][0]["share_of_iperf3"] == 0.75
    assert merged["rows"][0]["calls"] == 20
    assert merged["iperf3_gb_per_s"] == [4, 4]
