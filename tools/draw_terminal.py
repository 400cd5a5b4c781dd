#!/usr/bin/env python3
"""Turns a command's output into a picture for the docs: its colours, in a terminal's frame.

usage: FORCE_COLOR=1 COLUMNS=80 holmes ... | tools/draw_terminal.py TITLE OUTPUT.png

Needs chromium, which draws what rich makes of it.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 80


def main() -> int:
    """Returns 0 where the picture was made."""
    title, output = sys.argv[1], Path(sys.argv[2])
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(sys.stdin.read().rstrip()), soft_wrap=True)
    svg = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title=title), flags=re.DOTALL)  # they are fetched
    svg = svg.replace("Fira Code", "DejaVu Sans Mono")
    width, height = (round(float(number)) for number in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0])
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(f"<body style='margin:0'>{svg}</body>")
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/chromium"]
        command += [f"--window-size={width},{height}", f"--screenshot={output.absolute()}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    return 0


if __name__ == "__main__":
    sys.exit(main())
