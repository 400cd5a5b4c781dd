"""`python -m holmes_comm`: where the C++ library is, for builds that link it."""

import argparse
from importlib.metadata import version
from pathlib import Path

PACKAGE_DIR = Path(__file__).resolve().parent
FOLDERS = {
    "cmake": ("lib/cmake/Holmes", "folder of HolmesConfig.cmake, for -DHolmes_DIR="),
    "include": ("include", "folder of the C++ headers"),
    "lib": ("lib", "folder of libholmes.so and of NCCL's network plugin"),
}


def main() -> None:
    """Prints the folders that were asked for, one a line."""
    parser = argparse.ArgumentParser(prog="python -m holmes_comm", description="Where the C++ library is installed.")
    parser.add_argument("--version", action="version", version=version("holmes-comm"))
    for name, (folder, text) in FOLDERS.items():
        parser.add_argument(f"--{name}-dir", dest="folders", action="append_const", const=folder, help=text)
    folders = parser.parse_args().folders
    if not folders:
        parser.error("say what to print: --cmake-dir, --include-dir, --lib-dir or --version")
    for folder in folders:
        path = PACKAGE_DIR / folder
        if not path.is_dir():
            parser.error(f"{path} does not exist: Holmes was not built; run `pip install .` or `make build`")
        print(path)


if __name__ == "__main__":
    main()
