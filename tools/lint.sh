#!/usr/bin/env bash
# Checks formatting, style and types with the pinned tools; `--fix` writes what can be fixed.
# usage: tools/lint.sh [--fix]   (the tools must be on PATH; `make lint` and `make fmt` see to that)
set -euo pipefail
cd "$(dirname "$0")/.."

mode=${1:-check}
case $mode in
  check) clang_format=(--dry-run -Werror) ruff_check=() ruff_format=(--check --diff) ;;
  --fix) clang_format=(-i) ruff_check=(--fix) ruff_format=() ;;
  *) echo "tools/lint.sh: unknown argument '$mode'; use no argument (check) or --fix" >&2; exit 2 ;;
esac

# Every tool runs, so that one call shows everything; the exit status tells whether any of them complained.
status=0
find csrc tests -type f \( -name '*.hpp' -o -name '*.cpp' -o -name '*.cu' \) -print0 |
  xargs -0 --no-run-if-empty clang-format "${clang_format[@]}" || status=1
ruff check "${ruff_check[@]}" || status=1
ruff format "${ruff_format[@]}" || status=1
mypy || status=1
python3 tools/check_imports.py || status=1
python tools/check_layers.py || status=1
exit $status
