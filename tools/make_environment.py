"""Writes docs/environment.md from the engine's table of variables; with --check it only says whether it differs."""

import argparse
import sys
from pathlib import Path

from holmes_comm import _C

FILE = Path(__file__).parent.parent / "docs" / "environment.md"
HEAD = """# Environment variables

Everything Holmes reads from the environment; nothing is ever written to it. A value that is not allowed raises
`UsageError` naming the variable, the value and the rule. An argument in the code wins over the variable unless the table
says otherwise. `holmes env` shows this table in a terminal, and what is set. A variable that begins with `HOLMES_` and whose
name is nearly one of these is told in a warning, once. (Made by `make stubs` from
csrc/holmes/core/env.cpp.)

| variable | values | default | meaning |
| --- | --- | --- | --- |
"""  # noqa: E501


def generate() -> str:
    """Returns the page."""
    rows = [f"| `{v.name}` | {v.values} | {v.default} | {v.meaning} |\n" for v in _C.env_variables()]
    return HEAD + "".join(rows)


def main() -> int:
    """Returns 1 where --check finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    page = generate()
    if not parser.parse_args().check:
        FILE.write_text(page)
    elif FILE.read_text() != page:
        print(f"{FILE.name} is not what csrc/holmes/core/env.cpp says: run `make stubs`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
