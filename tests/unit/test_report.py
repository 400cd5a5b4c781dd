"""`holmes report`: one file that needs no other, with what was named in it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from paths import ROOT
from topologies import topology_of
from typer.testing import CliRunner

from holmes.planning.plan import plan_for
from holmes.tools.cli import load
from holmes.tools.report.page import table

VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Fails where tags do not close; gathers headings and what is fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.headings: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["h2"]:
            self.headings.append(data)


@pytest.fixture
def inputs(tmp_path: Path) -> list[str]:
    """A topology, a plan, and a file of `holmes bench`."""
    topology = topology_of([[2, 2], [2, 2]])
    topology.save(tmp_path / "topology.yaml")
    plan_for(topology, model_layers=4, pipeline=2, micro_batch=1, global_batch=8).save(tmp_path / "plan.yaml")
    measured = ROOT / "benchmarks" / "results" / "link-2.json"
    places = ["--topology", str(tmp_path / "topology.yaml"), "--plan", str(tmp_path / "plan.yaml")]
    return [*places, "--bench", str(measured)]


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(load("tools.cli.report:report"), list(arguments))
    return done.exit_code, done.output


def test_everything_is_in_one_file(tmp_path: Path, inputs: list[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "report.html"
    code, said = run(str(path), *inputs, "--title", "Job <7> & more")
    assert code == 0, said
    text = path.read_text()
    page = Page(text)
    assert page.headings == ["This machine", "Topology", "Plan", "Measured: link-2"]
    assert all(source.startswith(("#s", "data:image/svg+xml;base64,")) for source in page.sources)
    assert sum(source.startswith("data:") for source in page.sources) == 2
    assert "<h1>Job &lt;7&gt; &amp; more</h1>" in text
    for words in ("c0h0", "infiniband", "reduce_scatter", "holds", "(200)"):
        assert words in text
    assert "http" not in re.sub(r'src="data:[^"]+"', "", text)


def test_this_machine_alone(tmp_path: Path) -> None:
    assert run(str(tmp_path / "report.html"))[0] == 0
    assert Page((tmp_path / "report.html").read_text()).headings == ["This machine"]


def test_a_file_that_is_no_measurement_is_named(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(json.dumps({"rows": [{"operation": "all_reduce"}]}))
    code, said = run(str(tmp_path / "report.html"), "--bench", str(tmp_path / "b.json"))
    assert code == 2
    assert "b.json is no file of `holmes bench --json`: it has no 'peer'" in said
    assert not (tmp_path / "report.html").exists()


def test_numbers_stand_right_and_texts_are_escaped() -> None:
    made = table(("name", "value"), [("<b>", 1.23456), ("", None)])
    assert '<td>&lt;b&gt;</td><td class="n">1.235</td>' in made
    assert made.count('<span class="dim">-</span>') == 2
    assert table(("name",), []) == ""
