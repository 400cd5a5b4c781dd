#!/usr/bin/env python3
"""Checks that Python imports go one way: from a package to the ones before it in one order, so that no cycle can be.

usage: tools/check_imports.py [REPOSITORY]   prints what goes up and fails, or nothing
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# The lowest first. Inside a package anything goes; a name stands for everything below it that has no line of its own.
ORDER = [
    "holmes_comm",
    "holmes.words",
    "holmes.files",
    "holmes.interrupt",
    "holmes.cluster.topology",
    "holmes.cluster.probe",
    "holmes.cluster",
    "holmes.planning.schedule",
    "holmes.planning.model",
    "holmes.planning.groups",
    "holmes.planning.partition",
    "holmes.planning.plan",
    "holmes.planning.simulate",
    "holmes.planning.search",
    "holmes.planning",
    "holmes.training.arguments",
    "holmes.training.session",
    "holmes.training.process_groups",
    "holmes.training.overlap",
    "holmes.training.pipeline",
    "holmes.training.recovery",
    "holmes.training.integrations",
    "holmes.training",
    "holmes",
    "holmes.tools.job_store",
    "holmes.tools.affinity",
    "holmes.tools.bench",
    "holmes.tools.doctor",
    "holmes.tools.debug",
    "holmes.tools.top",
    "holmes.tools.report",
    "holmes.tools.cli",
    "holmes.tools",
    "holmes.__main__",
    "holmes.lab.preload",
    "holmes.lab.fake_sysfs",
    "holmes.lab.testbed",
    "holmes.lab.stress",
    "holmes.lab.demo",
    "holmes.lab",
]
ROOTS = ("holmes_comm", "python_api/holmes")
# The command line finds the lab by name, when one of its commands is used: it may not be installed whole.
LOADS_BY_NAME = ("holmes.tools.cli", "holmes.lab")
ROOT_PACKAGES = ("holmes_comm", "holmes")
MODULE_NAME = re.compile(r"holmes(_comm)?(\.[a-z_]+)+")


def package_of(module: str) -> str:
    """The line of the order that a module belongs to."""
    return max((name for name in ORDER if f"{module}.".startswith(f"{name}.")), key=len)


def references(tree: ast.Module, modules: set[str]) -> Iterator[tuple[int, str, bool]]:
    """Line and module of all imports, at the top or in a function, and (True) of the strings that name a module."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in below]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE_NAME.fullmatch(node.value):
            names = [node.value] if node.value in modules else []
        by_name = isinstance(node, ast.Constant)
        yield from ((node.lineno, name, by_name) for name in names if name.split(".")[0] in ROOT_PACKAGES)


def violations(repository: Path) -> Iterator[str]:
    """One line for each import that does not go down."""
    files = {}
    for root in map(repository.joinpath, ROOTS):
        for file in sorted(root.rglob("*.py")):
            files[".".join(file.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")] = file
    for module, file in files.items():
        own = package_of(module)
        if own == "holmes" != module:
            yield f"{file.relative_to(repository)}: {module} is in no line of the order in {Path(__file__).name}"
        for line, target, by_name in references(ast.parse(file.read_text()), set(files)):
            other = package_of(target)
            allowed = by_name and own == LOADS_BY_NAME[0] and other.startswith(LOADS_BY_NAME[1])
            if ORDER.index(other) > ORDER.index(own) and not allowed:
                yield f"{file.relative_to(repository)}:{line}: {own} must not use {other} ({target})"


def main() -> int:
    """Prints the violations; the exit status."""
    repository = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    found = list(violations(repository))
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
