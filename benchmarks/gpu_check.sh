#!/usr/bin/env bash
# One call on a machine with an NVIDIA GPU: builds Holmes, tests the NCCL backend on the real NCCL, writes what it found.
# usage: benchmarks/gpu_check.sh [RESULT.md]   (needs: NVIDIA driver, Python >= 3.10, g++, make; pip brings the rest)
# Steps go on after a failure, so that one call shows everything; the exit status tells whether any failed.
set -uo pipefail
cd "$(dirname "$0")/.."
result=${1:-benchmarks/results/gpu-check.md}
status=0

section() { printf '\n## %s\n\n' "$1" | tee -a "$result"; }
# Runs a command of at most `$1` seconds and writes its last lines and its verdict.
step() {
  local limit_s=$1 name=$2 log
  shift 2
  log=$(mktemp)
  section "$name"
  if timeout "$limit_s" "$@" >"$log" 2>&1; then echo "passed" | tee -a "$result"; else
    echo "FAILED (status $?)" | tee -a "$result"
    status=1
  fi
  { echo '```'; tail -n 40 "$log"; echo '```'; } | tee -a "$result"
  rm -f "$log"
}

echo "# NCCL backend on a GPU" >"$result"
section "machine"
{ nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || echo "no nvidia-smi"
  uname -srm; git rev-parse --short HEAD; } 2>&1 | tee -a "$result"
if ! nvidia-smi >/dev/null 2>&1; then
  echo "no GPU here: nothing was checked" | tee -a "$result"
  exit 1
fi

step 3600 "build" make build
python=.venv/bin/python
step 1200 "images with the real NCCL, no GPU needed" make test-cpp
for ranks in 2 4; do
  step 300 "communicator, $ranks ranks on one GPU" "$python" benchmarks/gpu_ranks.py --ranks "$ranks" check
  step 300 "overhead over raw NCCL, $ranks ranks" "$python" benchmarks/gpu_ranks.py --ranks "$ranks" overhead
done
section "not covered yet"
echo "byte counters of two interfaces (needs network namespaces), kernels against the copy bandwidth, SM-free send/recv," \
  "CUDA graphs, the optimizer and the demo on GPUs" | tee -a "$result"
exit $status
