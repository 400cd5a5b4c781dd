"""The README's snippets, as printed, on the default testbed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from namespaces import needs_namespaces
from paths import ROOT

from holmes.lab.testbed import Testbed

MODEL = "import torch\nmodel = torch.nn.Linear(4, 4)\n"
STEP = "model(torch.ones(2, 4)).sum().backward()\nassert next(model.parameters()).grad is not None\n"
#: What stands around a snippet in a program: before it, and after it.
AROUND = {"NicSelection": (MODEL, STEP), "make_plan": ("", "")}
DONE = "the snippet ran"


def snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@needs_namespaces
@pytest.mark.parametrize("words", AROUND)
def test_a_snippet_runs_on_the_default_testbed(words: str, tmp_path: Path) -> None:
    (snippet,) = [text for text in snippets() if words in text]
    program = tmp_path / "snippet.py"
    program.write_text(AROUND[words][0] + snippet + AROUND[words][1] + f"print({DONE!r})\n")
    result = Testbed("two-clusters").run([sys.executable, str(program)], timeout_s=100)
    assert result.returncode == 0, result.outputs
    assert all(DONE in lines for lines in result.outputs.values()), result.outputs
