"""`holmes bench compute` and `holmes simulate calibrate`, on this machine's real torch."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from paths import BENCHMARKS
from typer.testing import CliRunner

from holmes.planning.simulate import Rates, compute_from_bench
from holmes.tools.cli import load

pytest.importorskip("torch", reason="needs torch: it times torch's modules")

SIZES = ["--hidden", "64", "--heads", "4", "--sequence", "16", "--vocabulary", "50", "--layers", "2"]


def test_measured_times_become_rates(tmp_path: Path) -> None:
    found, rates = tmp_path / "compute.json", tmp_path / "rates.yaml"
    options = ["--ranks", "1,2", "--rounds", "1", "--seconds", "0.05", "--json", str(found)]
    done = CliRunner().invoke(load("tools.cli.bench_compute:compute"), [*SIZES, *options])
    assert done.exit_code == 0, done.output
    document = json.loads(found.read_text())
    assert [(row["ranks"], row["part"]) for row in document["rows"]] == [
        (ranks, part) for ranks in (1, 2) for part in ("embedding", "layer", "head", "optimizer", "sharding")
    ]
    measured, cores = compute_from_bench(found)
    assert (measured.hidden, measured.vocabulary, measured.micro_batch) == (64, 50, 1)
    assert measured.times.layer.forward_s > 0 < measured.times.layer.backward_s
    assert measured.optimizer_ns_per_parameter > 0
    assert measured.sharding_ns_per_parameter > 0  # dozens of hooks and small updates beside one
    assert cores[1] == 1.0
    link = BENCHMARKS / "results" / "link-2.json"
    arguments = [str(rates), "--compute", str(found), "--link", f"ethernet={link}:holmes", "--shared-cores"]
    done = CliRunner().invoke(load("tools.cli.simulate:calibrate"), arguments)
    assert done.exit_code == 0, done.output
    assert "core-seconds per GB" in done.output
    loaded = Rates.load(rates)
    assert loaded.measured == measured
    assert loaded.link("ethernet").core_s_per_gb > 0
    assert set(loaded.cores) == {1, 2}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--heads", "5"], "heads=5 must divide hidden=64"),
        (["--ranks", "0"], r"ranks=\[0\] must be numbers of at least 1"),
        (["--dtype", "int8"], "dtype='int8' is unknown"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(load("tools.cli.bench_compute:compute"), [*SIZES, *arguments], env={"COLUMNS": "300"})
    assert done.exit_code == 2
    assert re.search(words, done.output), done.output


def test_a_rank_that_fails_ends_the_run_with_its_error() -> None:
    done = CliRunner().invoke(load("tools.cli.bench_compute:compute"), [*SIZES, "--device", "cuda:99"])
    assert done.exit_code == 1
    assert "a rank of 1 failed: " in done.output


def test_shared_cores_need_a_measurement(tmp_path: Path) -> None:
    arguments = [str(tmp_path / "rates.yaml"), "--compute-tflops", "100", "--shared-cores"]
    done = CliRunner().invoke(load("tools.cli.simulate:calibrate"), arguments)
    assert done.exit_code == 2
    assert "--shared-cores needs --compute FILE" in done.output
