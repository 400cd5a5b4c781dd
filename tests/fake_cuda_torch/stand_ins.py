"""Writes what torch's CUDA build needs of NVIDIA's libraries as C sources: `python stand_ins.py TORCH_LIB OUT`.

For each library one source in which every function that torch asks for is weak and, when called, ends the process with
its name: nothing is silently wrong. The profiler's say that they cannot be used, which torch then tells. What the fakes
define beside it wins. A version script gives the symbols the versions that torch wants. Prints the libraries' names.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

# Libraries whose symbols carry no version, by the names' beginnings; the first one that fits. Where torch names another
# number of one, that one.
UNVERSIONED = [
    ("nccl", "libnccl.so.2"),
    ("cuFile", "libcufile.so.0"),
    ("cusparseLt", "libcusparseLt.so.0"),
    ("nvshmem", "libnvshmem_host.so.3"),
    ("cupti", "libcupti.so.13"),
    ("cu", "libcuda.so.1"),
]
CUPTI_ERROR_NOT_INITIALIZED = 15
OURS = re.compile(r"lib(cu|nvrtc|nvshmem|nccl|nvJitLink)")
HEAD = """#include <stdio.h>
#include <stdlib.h>
static void end(const char* name) {
  fprintf(stderr, "fake CUDA: %s was called, which nothing here stands in for\\n", name);
  abort();
}
"""


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def versions_of(library: Path) -> dict[str, str]:
    """Which library each version's name is of."""
    versions, owner = {}, ""
    for line in output("objdump", "-p", str(library)).partition("Version References:")[2].splitlines():
        if found := re.match(r"\s+required from (\S+):", line):
            owner = found[1]
        elif found := re.match(r"\s+0x\S+ 0x\S+ \d+ (\S+)", line):
            versions[found[1]] = owner
    return versions


def main(torch_lib: Path, out: Path) -> None:
    needed: set[str] = set()
    symbols: dict[str, dict[str, str]] = defaultdict(dict)  # library -> symbol -> version, empty: none
    unversioned: dict[str, set[str]] = defaultdict(set)
    for library in sorted(torch_lib.glob("*.so")):
        needed |= set(re.findall(r"NEEDED\s+(\S+)", output("objdump", "-p", str(library))))
        versions = versions_of(library)
        for line in output("nm", "-D", "--undefined-only", str(library)).splitlines():
            symbol, _, version = line.split()[-1].partition("@")
            if version:
                symbols[versions[version]][symbol] = version
            else:
                owner = next((owner for begin, owner in UNVERSIONED if re.match(begin + "[A-Z_]", symbol)), None)
                if owner:
                    unversioned[owner].add(symbol)
    for owner, names_without in unversioned.items():
        base = owner.rpartition(".")[0] + "."
        named = next((name for name in sorted(needed) if name.startswith(base)), owner)
        symbols[named] |= dict.fromkeys(names_without, "")
    out.mkdir(parents=True, exist_ok=True)
    names = sorted(name for name in needed | set(symbols) if OURS.match(name))
    for name in names:
        is_profiler = name.startswith("libcupti")
        functions = [
            f"__attribute__((weak)) int {symbol}(void) {{ return {CUPTI_ERROR_NOT_INITIALIZED}; }}\n"
            if is_profiler
            else f'__attribute__((weak)) void {symbol}(void) {{ end("{symbol}"); }}\n'
            for symbol in sorted(symbols[name])
        ]
        (out / f"{name}.c").write_text(HEAD + "".join(functions))
        by_version: dict[str, list[str]] = defaultdict(list)
        for symbol, version in symbols[name].items():
            if version:
                by_version[version].append(symbol)
        if by_version:
            nodes = [f"{version} {{ global: {'; '.join(sorted(of))}; }};\n" for version, of in by_version.items()]
            (out / f"{name}.map").write_text("".join(nodes))
    print(*names, sep=";", end="")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
