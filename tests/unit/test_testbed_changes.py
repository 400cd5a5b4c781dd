"""Changes of a testbed's links while it runs: which are allowed, and the file of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from holmes.lab.testbed import SpecError, load_spec
from holmes.lab.testbed.changes import Change, load_changes


def _loaded(text: str, folder: Path, spec: str = "far-clusters") -> list[Change]:
    path = folder / "changes.yaml"
    path.write_text(text)
    return load_changes(path, load_spec(spec))


def test_changes_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    text = "changes: [{at_s: 2, link: eth/a, up: false}, {at_s: 1, link: a0.ib0, rate_gbps: 0.5, queue_ms: 5}]"
    changes = _loaded(text, tmp_path)
    assert changes == [
        Change(1, "a0.ib0", {"rate_gbps": 0.5, "queue_ms": 5}),
        Change(2, "eth/a", {"up": False}),
    ]
    assert str(changes[0]) == "a0.ib0: rate_gbps 0.5, queue_ms 5"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("7", r"changes.yaml: changes\[0\] is 7; it must be such as {at_s: 5,"),
        ("{at_s: 1, link: eth/a}", r"changes\[0\] is .* it must be such as"),
        ("{at_s: -1, link: eth/a, delay_ms: 1}", r"changes\[0\].at_s is -1; it must be a number from 0 to 21"),
        ("{at_s: 1.0e+12, link: eth/a, delay_ms: 1}", r"at_s is 1000000000000.0; it must be a number from 0 to 21"),
        (f"{{at_s: {10**400}, link: eth/a, delay_ms: 1}}", "at_s is 1000.*; it must be a number from 0 to 21"),
        ("{at_s: 1, link: eth/c, delay_ms: 1}", "far-clusters has no link 'eth/c'; it has a0.ib0, a0.eth0, .*eth/b"),
        ("{at_s: 1, link: eth/a, loss: 1}", "eth/a has an unknown key 'loss'; allowed are rate_gbps"),
        ("{at_s: 1, link: eth/a, loss_percent: 100}", "eth/a.loss_percent is 100; it must be a number from 0 to 99"),
        ("{at_s: 1, link: eth/a, jitter_ms: 30}", "eth/a.jitter_ms is 30, more than delay_ms"),
        ("{at_s: 1, link: a0.ib0, rate_gbps: null}", "a0.ib0.rate_gbps is None; a limit cannot go"),
        ("{at_s: 1, link: eth/a, up: 0}", "eth/a.up is 0; it must be true or false"),
        ("{at_s: 1, link: a0.ib0, delay_ms: 1}", "a0.ib0 has no delay and no loss .* give it a little there"),
    ],
)
def test_a_wrong_change_is_refused_before_anything_runs(entry: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message):
        _loaded(f"changes: [{entry}]", tmp_path)


def test_a_change_is_judged_by_what_those_before_it_left(tmp_path: Path) -> None:
    later = "{at_s: 2, link: eth/a, jitter_ms: 30}"
    assert len(_loaded(f"changes: [{later}, {{at_s: 1, link: eth/a, delay_ms: 50}}]", tmp_path)) == 2
    with pytest.raises(SpecError, match="jitter_ms is 30"):
        _loaded(f"changes: [{later}, {{at_s: 3, link: eth/a, delay_ms: 50}}]", tmp_path)


def test_a_file_without_changes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"changes.yaml: changes is None; it must be a list of such as"):
        _loaded("links: []", tmp_path)
