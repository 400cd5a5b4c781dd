"""Every option that takes a number, as the commands' own parsers tell them, with numbers that cannot be meant."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from commands import numeric_options
from topologies import topology_of

from holmes.planning.plan import plan_for
from holmes.tools.cli import main

NUMBERS = ("0", "-1", "nan", "inf", "1e308", "99999999999999999999", str(10**400), "", "x")
WITHIN_S = 20.0  # some tenths of a second where a processor is free

#: A command line of each command that is right but for the number; its options follow the name.
LINES = {
    "topology": "{topology}",
    "doctor": "",
    "store": "",
    "stress": "--testbed --faults kill --seconds 1",
    "debug": "{folder}",
    "top": "127.0.0.1:1",
    "testbed run": "-- true",
    "testbed check": "pair",
    "bench": "barrier --peers none --ranks 2 --seconds 0.01 --rounds 1",
    "bench compute": "--hidden 64 --heads 4 --sequence 16",
    "plan": "--topology {topology} --model gpt-3.6b --gpu A100-80GB --global-batch 64",
    "plan show": "{plan}",
    "simulate": "{plan} --topology {topology} --rates {rates}",
    "simulate calibrate": "{folder}/rates.yaml --link ethernet={folder}/nowhere.json",
    "demo": "--testbed nosuchspec",
}
#: Where 0 is meant: no time, no rest, a free port, as many as fit, the first one.
ZERO_IS_MEANT = {
    ("topology", "--measure-s"),
    ("doctor", "--measure-s"),
    ("store", "--port"),
    ("debug", "--wait-s"),
    ("stress", "--seed"),
    ("stress", "--tensor"),
    ("stress", "--pipeline"),
    ("stress", "--first-round"),
    ("stress", "--episode"),
    ("testbed run", "--shuffle-ranks"),
    ("testbed run", "--grace-s"),
    ("plan", "--reserve-gib"),
    ("plan show", "--rank"),
}
CASES = [
    (command, option, number)
    for command, option in numeric_options()
    for number in NUMBERS
    if not (number == "0" and (command, option) in ZERO_IS_MEANT)
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files that are right."""
    folder = tmp_path_factory.mktemp("numbers")
    places = {"folder": folder} | {name: folder / f"{name}.yaml" for name in ("topology", "plan", "rates")}
    machines = topology_of([[2, 2], [2, 2]])
    machines.save(places["topology"])
    sizes = {"layers": 4, "hidden": 64, "heads": 4, "sequence": 16, "vocabulary": 64}
    plan_for(machines, model_layers=4, pipeline=2, micro_batch=1, global_batch=8, model=sizes).save(places["plan"])
    places["rates"].write_text(
        "kind: holmes rates\nversion: 1\ncompute_tflops: 100\nlinks:\n"
        + "".join(f"  {name}: {{gbps: 100}}\n" for name in ("infiniband", "roce_v2", "ethernet"))
    )
    return places


def test_every_command_with_numbers_has_a_line() -> None:
    assert {command for command, _ in numeric_options()} == LINES.keys()
    assert set(numeric_options()) >= ZERO_IS_MEANT


@pytest.mark.parametrize(("command", "option", "number"), CASES, ids=[" ".join(case)[:60] for case in CASES])
def test_a_number_that_cannot_be_meant_is_refused_by_its_options_name(
    command: str,
    option: str,
    number: str,
    places: dict[str, Path],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(places["folder"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    words = LINES[command].format(**places).split()
    given = [option, number]  # the last one counts, before what is a command of its own
    at = words.index("--") if "--" in words else len(words)
    began_s = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), *words[:at], *given, *words[at:]])
    took_s = time.monotonic() - began_s
    said = capfd.readouterr().err
    assert ended.value.code == 2, said
    assert len(said.splitlines()) == 1, said
    assert option.strip("-").replace("-", " ") in said.replace("-", " ").replace("_", " "), said
    assert took_s < WITHIN_S
