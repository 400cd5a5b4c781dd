#!/usr/bin/env bash
# Runs every fuzzer of a build folder, two at a time. An input that fails is kept and named.
# usage: tools/fuzz.sh BUILD_FOLDER SECONDS   (seconds of each)
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1 seconds=$2

run_one() {
  local program=$1 name=${1##*/fuzz_}
  local folder=$build/corpus/$name
  mkdir -p "$folder"
  "$program" --write-seeds "$folder"
  local known=tests/fuzz/corpus/$name  # inputs that failed once
  local corpora=("$folder")
  if [ -d "$known" ]; then corpora+=("$known"); fi
  cd "$folder"
  if ! "$OLDPWD/$program" -max_total_time="$seconds" -max_len=4096 -rss_limit_mb=4096 -timeout=20 -print_final_stats=1 \
    "${corpora[@]/#/$OLDPWD/}" >"$OLDPWD/$build/$name.log" 2>&1; then
    cd "$OLDPWD"
    tail -40 "$build/$name.log"
    echo "fuzz $name: FAILED; the input is in $folder, the log in $build/$name.log"
    return 1
  fi
  cd "$OLDPWD"
  echo "fuzz $name: $(grep -aoE 'Done [0-9]+ runs in [0-9]+ second' "$build/$name.log" | tail -1), clean"
}
export -f run_one
export build seconds
find "$build/tests/fuzz" -maxdepth 1 -type f -name 'fuzz_*' -perm -u+x -print0 | sort -z |
  xargs -0 -P 2 -I{} bash -euo pipefail -c 'run_one {}'
