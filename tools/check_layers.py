#!/usr/bin/env python3
"""Checks that includes go one way, from a layer to the ones below it: then no folders include each other in a circle.

usage: tools/check_layers.py [REPOSITORY]   prints what goes up and fails, or nothing
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# One table per language, the lowest layer first. Folders on one line stand beside each other: neither includes the
# other. Inside a folder anything goes; a folder further down its path is a layer of its own where it is named here.
CPP_LAYERS = [
    ["holmes/core"],
    ["holmes/record", "holmes/reduce", "holmes/cuda", "kernels"],
    ["holmes/discover"],
    ["holmes/tls"],
    ["holmes/transport"],
    ["holmes/transport/shm", "holmes/transport/rdma"],
    ["holmes/bootstrap"],
    ["holmes/group"],
    ["holmes/collectives", "holmes/p2p"],
    ["holmes/engine"],
    ["holmes/comm"],
    ["holmes/nccl"],
    ["bindings", "nccl_net"],
    ["c10d"],
    ["line"],
]


@dataclass(frozen=True)
class Language:
    """How one language's tree is read: `references` gives a file's line numbers and the paths that it names there."""

    root: str
    suffixes: tuple[str, ...]
    layers: list[list[str]]
    references: Callable[[Path, Path], Iterator[tuple[int, str]]]


def cpp_includes(root: Path, file: Path) -> Iterator[tuple[int, str]]:
    """The files of this tree that `file` includes; a name without a folder is beside it."""
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if match := re.match(r'\s*#\s*include\s+"([^"]+)"', line):
            beside = file.parent / match[1]
            yield number, beside.relative_to(root).as_posix() if beside.is_file() else match[1]


LANGUAGES = [Language("csrc", (".hpp", ".cpp", ".cu"), CPP_LAYERS, cpp_includes)]


def layer_of(path: str, layers: list[list[str]]) -> tuple[int, str] | None:
    """Level and name of the layer that a path belongs to: the longest name that it begins with."""
    found = [(level, name) for level, names in enumerate(layers) for name in names if path.startswith(name + "/")]
    return max(found, key=lambda layer: len(layer[1]), default=None)


def violations(repository: Path, language: Language) -> Iterator[str]:
    """One line for each reference that does not go down, and for each file that belongs to no layer."""
    root = repository / language.root
    for file in sorted(path for path in root.rglob("*") if path.suffix in language.suffixes):
        own = layer_of(file.relative_to(root).as_posix(), language.layers)
        if own is None:
            yield f"{file.relative_to(repository)}: its folder is in no layer of {Path(__file__).name}; give it one"
            continue
        for number, target in language.references(root, file):
            other = layer_of(target, language.layers)
            if other is not None and other[1] != own[1] and other[0] >= own[0]:
                yield f"{file.relative_to(repository)}:{number}: {own[1]} must not use {other[1]} ({target})"


def main() -> int:
    """Prints the violations of all languages; the exit status tells whether there are any."""
    repository = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    found = [line for language in LANGUAGES for line in violations(repository, language)]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
