"""`make test-torch`: what its table says of pytest's report, and how it is written into the page."""

import importlib.util
import xml.etree.ElementTree as ElementTree

import pytest
from paths import ROOT

SPEC = importlib.util.spec_from_file_location("torch_versions", ROOT / "tools" / "torch_versions.py")
tool = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tool)

REFUSED = '<properties><property name="gloo" value="refuses"/></properties>'


class Reported:
    """An environment whose pytest said this."""

    def __init__(self, *inner):
        self.cases = [ElementTree.fromstring(f'<testcase name="t[s{n}]">{text}</testcase>') for n, text in inner]

    def tests(self, *arguments):
        return self.cases


def test_what_gloo_refuses_is_not_counted_as_the_same():
    said = tool.compared(Reported((1, ""), (2, REFUSED), (3, "")))
    assert said == ("4 of 4 the same; Gloo cannot: s2", True)


def test_a_step_that_differs_is_named():
    said = tool.compared(Reported((1, ""), (2, "<failure/>"), (3, "<error/>")))
    assert said == ("2 of 6 the same; not: s2, s3", False)


def test_other_tests_are_counted():
    cases = Reported((1, ""), (2, "<skipped/>"), (3, ""))
    assert tool.tested(cases, []) == ("2 passed, 0 failed, 1 skipped", True)
    assert tool.tested(Reported((1, "<failure/>")), []) == ("0 passed, 1 failed, 0 skipped", False)


@pytest.fixture
def page(tmp_path, monkeypatch):
    file = tmp_path / "install.md"
    file.write_text(f"before\n{tool.BEGIN}{tool.HEAD}| 2.9.1 | old |\n| 2.13.0 | kept |\n{tool.END}after\n")
    monkeypatch.setattr(tool, "PAGE", file)
    return file


def test_a_version_that_ran_again_takes_the_place_of_its_line(page):
    tool.save(["| 2.15.0 | new |\n", "| 2.9.1 | new |\n"])
    rows = "| 2.9.1 | new |\n| 2.13.0 | kept |\n| 2.15.0 | new |\n"
    assert page.read_text() == f"before\n{tool.BEGIN}{tool.HEAD}{rows}{tool.END}after\n"


def test_the_page_has_the_table():
    text = tool.PAGE.read_text()
    assert text.index(tool.BEGIN) < text.index(tool.END)
