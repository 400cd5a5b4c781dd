"""mkdocs' hooks: files of the repository that pages link to become part of the site, so that every link is checked.

Pages are written to be read in the repository too, where ``../benchmarks/results/overlap.md`` is a file beside docs/.
On the site it is ``repository/benchmarks/results/overlap.md``: Markdown as a page, everything else as text or as it is.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PREFIX = "repository"
LINK = re.compile(r"(?<!`)(\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
#: What a browser shows as it is; other files become pages with their text in a block.
AS_IT_IS = {".png", ".svg", ".html"}
LANGUAGES = {".py": "python", ".cpp": "cpp", ".hpp": "cpp", ".yaml": "yaml", ".json": "json", ".sh": "bash"}


def is_elsewhere(target: str) -> bool:
    """Whether it is no path: https://..., mailto:..."""
    return re.match(r"[a-z]+:", target) is not None


def repository_path(page: str, target: str) -> str:
    """The file that `target` names in a page, both as paths in the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def site_path(path: str) -> str:
    """Where a file of the repository is on the site, as mkdocs names its sources."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    suffix = posixpath.splitext(path)[1]
    return f"{PREFIX}/{path}" + ("" if suffix in (".md", *AS_IT_IS) else ".md")


def source_path(page: File) -> str:
    """The reverse, of a Markdown page."""
    path = page.src_uri
    if not path.startswith(f"{PREFIX}/"):
        return f"docs/{path}"
    path = path.removeprefix(f"{PREFIX}/")
    return path if (ROOT / path).exists() else path.removesuffix(".md")


def linked(page: str, text: str) -> set[str]:
    """Files outside docs/ that this page's text links to and that are there."""
    targets = {match[2] for match in LINK.finditer(text) if not is_elsewhere(match[2])}
    paths = {repository_path(page, target) for target in targets}
    return {path for path in paths if not path.startswith(("docs/", "..")) and (ROOT / path).is_file()}


def content_of(path: str) -> str:
    """The page's Markdown; of another file, its text in a block."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    language = LANGUAGES.get(posixpath.splitext(path)[1], "text")
    return f"# {path}\n\n````{language}\n{text}\n````\n"


def on_files(files: Files, config: Any) -> Files:
    """Adds every file of the repository that a page links to, and what these link to."""
    waiting = [
        path for file in files.documentation_pages() for path in linked(f"docs/{file.src_uri}", file.content_string)
    ]
    known: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in known:
            continue
        known.add(path)
        name = site_path(path)
        if name.endswith(".md"):
            content = content_of(path)
            file = File.generated(config, name, content=content)
            if path.endswith(".md"):
                waiting += linked(path, content)
        else:
            file = File.generated(config, name, abs_src_path=str(ROOT / path))
        file.inclusion = file.inclusion.NOT_IN_NAV
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Links to files of the repository -> links to their pages."""
    here = source_path(page.file)
    folder = posixpath.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        if is_elsewhere(match[2]):
            return match[0]
        path = repository_path(here, match[2])
        return f"{match[1]}{posixpath.relpath(site_path(path), folder or '.')}{match[3] or ''}"

    return LINK.sub(moved, markdown)
