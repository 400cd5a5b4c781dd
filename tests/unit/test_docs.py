"""The documentation against what it is about: messages, navigation, names of the API."""

from __future__ import annotations

import importlib
import re

import pytest
import yaml
from paths import ROOT

DOCS = ROOT / "docs"


def sources() -> str:
    """The text of everything that can say a message, with literals that go on in the next line joined."""
    files = [
        file
        for folder in ("csrc", "holmes_comm", "python_api")
        for pattern in ("*.cpp", "*.hpp", "*.py")
        for file in (ROOT / folder).rglob(pattern)
    ]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(file.read_text() for file in files))


def test_every_message_of_the_troubleshooting_page_is_said():
    said = sources()
    messages = re.findall(r"^### (.*)$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(messages) > 25
    assert [message for message in messages if message not in said] == []


def test_every_page_is_in_the_navigation():
    text = re.sub(r"(?m)^ +docstring_style: null.*$", "", (ROOT / "mkdocs.yml").read_text())
    sections = yaml.safe_load(text)["nav"]
    pages = [page for section in sections for pages in section.values() for page in pages]
    assert sorted(pages) == sorted(file.name for file in DOCS.glob("*.md"))


def test_the_page_of_variables_names_ours_rightly():
    known = set(re.findall(r"`(HOLMES_\w+)`", (DOCS / "environment.md").read_text()))
    pages = [file for file in DOCS.glob("*.md") if file.name != "environment.md"]
    used = {(file.name, name) for file in pages for name in re.findall(r"\bHOLMES_[A-Z_]+\b", file.read_text())}
    build_time = {"HOLMES_CMAKE_ARGS", "HOLMES_CUDA", "HOLMES_TEST_CRDS"}
    of_tests = {"HOLMES_TEST_RDMA_PORTS", "HOLMES_TEST_RDMA_SEEDS", "HOLMES_UML_KERNEL", "HOLMES_VERBS_ROOT"}
    assert sorted((page, name) for page, name in used if name not in known | build_time | of_tests) == []


@pytest.mark.parametrize("package", ["holmes", "holmes_comm"])
def test_every_public_name_is_in_the_reference(package):
    pytest.importorskip("torch", reason="needs torch: some names are of modules that import it")
    shown = set(re.findall(rf"^::: {package}\.(\S+)$", (DOCS / "api.md").read_text(), re.MULTILINE))
    names = set(importlib.import_module(package).__all__) - {"__version__"}
    modules = {name.removeprefix("planning.") for name in shown if name.startswith("planning.")}
    assert names - modules == shown - {
        name for name in shown if name.startswith(("planning.", "torch_backend", "launch"))
    }
