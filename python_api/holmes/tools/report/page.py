"""The page: sections of tables, texts and pictures, all of it in one file."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["matrix", "page", "paragraphs", "picture", "section", "table"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b2530; background: #fff; max-width: 64rem; margin: 2rem auto;
  padding: 0 1.5rem }
h1 { font-size: 1.7rem; margin: 0 } h2 { font-size: 1.25rem; margin: 2.4rem 0 .6rem; padding-bottom: .25rem;
  border-bottom: 2px solid #4c78a8 } h3 { font-size: 1rem; margin: 1.4rem 0 .4rem }
nav { margin: .6rem 0 0; color: #5b6b7b } nav a { color: #2f5f94; margin-right: 1rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .88rem; margin: .4rem 0 }
th { text-align: left; background: #eef2f6 }
th, td { padding: .28rem .7rem .28rem .5rem; border-bottom: 1px solid #dde4ea; vertical-align: top }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
.bad { color: #b3261e; font-weight: 600 } .dim { color: #7a8896 } img { max-width: 100%; height: auto; margin: .6rem 0 }
pre { background: #f6f8fa; padding: .7rem .9rem; white-space: pre-wrap; font-size: .82rem; overflow-wrap: anywhere }
@media print { body { margin: 0; max-width: none } h2 { break-after: avoid } table, img { break-inside: avoid } }
"""


def page(title: str, made: str, sections: Sequence[tuple[str, str]]) -> str:
    """The whole file; `sections` are headings and what `section` and the others made."""
    links = "".join(f'<a href="#s{number}">{escape(name)}</a>' for number, (name, _) in enumerate(sections))
    body = "".join(f'<h2 id="s{number}">{escape(name)}</h2>\n{text}' for number, (name, text) in enumerate(sections))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>"
        f"<h1>{escape(title)}</h1><nav>{escape(made)}<br>{links}</nav>\n{body}</body></html>\n"
    )


def section(heading: str, *parts: str) -> str:
    """A smaller heading over its parts; nothing where there are none."""
    return f"<h3>{escape(heading)}</h3>{''.join(parts)}" if any(parts) else ""


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Numbers to the right, None as a dash; empty where there are no rows."""
    listed = [list(row) for row in rows]
    if not listed:
        return ""
    numeric = [all(isinstance(row[i], (int, float, type(None))) for row in listed) for i in range(len(headers))]
    head = "".join(f"<th{_class(numeric[i])}>{escape(text)}</th>" for i, text in enumerate(headers))
    lines = [
        "<tr>" + "".join(f"<td{_class(numeric[i])}>{_text(value)}</td>" for i, value in enumerate(row)) + "</tr>"
        for row in listed
    ]
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(lines)}</table></div>\n'


def matrix(names: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[tuple[str, str]]]) -> str:
    """A row for each of `names`; a cell is its text and its class: "", "bad" or "dim"."""
    head = "".join(f'<th class="n">{escape(column)}</th>' for column in columns)
    lines = [
        f"<tr><th>{escape(name)}</th>"
        + "".join(f'<td class="n {kind}">{escape(text)}</td>' for text, kind in row)
        + "</tr>"
        for name, row in zip(names, cells, strict=True)
    ]
    return f'<div class="scroll"><table><tr><th></th>{head}</tr>{"".join(lines)}</table></div>\n'


def picture(svg: bytes, title: str) -> str:
    """A picture inside the page."""
    data = base64.b64encode(svg).decode()
    return f'<img alt="{escape(title)}" src="data:image/svg+xml;base64,{data}">\n'


def paragraphs(lines: Iterable[str], kind: str = "") -> str:
    """A paragraph for each line, of class `kind`."""
    return "".join(f'<p class="{kind}">{escape(line)}</p>\n' if kind else f"<p>{escape(line)}</p>\n" for line in lines)


def _class(is_numeric: bool) -> str:
    return ' class="n"' if is_numeric else ""


def _text(value: object) -> str:
    if value is None or value == "":
        return '<span class="dim">-</span>'
    return escape(f"{value:,.4g}" if isinstance(value, float) else str(value)).replace("\n", "<br>")
