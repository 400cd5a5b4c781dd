#!/usr/bin/env bash
# One call on a machine with an NVIDIA GPU: builds Holmes, tests and measures all that needs one, writes what it found.
# usage: benchmarks/gpu_check.sh [--dry-run] [RESULT.md]
# Needs: NVIDIA driver, g++, nvcc for the kernels, and a Python with what requirements-dev.txt names and torch with CUDA
# (`make build` once, where there is a network). Nothing is fetched; each step fits the ten minutes of a borrowed machine.
# --dry-run, and also where there is no GPU: every step runs on the fakes of tests/fake_nccl or on the CPU, and the
# result says of each that it proves nothing. GPU_CHECK_PYTHON: an interpreter with Holmes built, instead of .venv.
# Steps go on after a failure, so that one call shows everything; the exit status tells whether any failed.
set -uo pipefail
cd "$(dirname "$0")/.."
dry=""
if [ "${1:-}" = "--dry-run" ]; then dry="--dry-run"; shift; fi
nvidia-smi >/dev/null 2>&1 || dry="--dry-run"
result=${1:-benchmarks/results/gpu-check.md}
python=${GPU_CHECK_PYTHON:-.venv/bin/python}
status=0
unproven=()

say() { echo "$@" | tee -a "$result"; }
# step LIMIT_S NAME PROVES COMMAND...: runs it, writes its last lines and its verdict. PROVES: what its success proves
# on a GPU; goes to the list of what is unproven where it fails, or there is no GPU.
step() {
  local limit_s=$1 name=$2 proves=$3 log
  shift 3
  log=$(mktemp)
  say ""; say "## $name"; say ""
  # PATH is this machine's business.
  say "\`$(sed -E 's#PATH=[^ ]+#PATH=.venv/bin:$PATH#' <<<"${*/#"$python"/python}")\`"; say ""
  local start=$SECONDS
  if timeout "$limit_s" "$@" >"$log" 2>&1; then
    if [ -n "$dry" ]; then say "walked through without a GPU ($((SECONDS - start)) s)"; unproven+=("$proves")
    else say "passed ($((SECONDS - start)) s)"; fi
  else
    say "FAILED (status $?, $((SECONDS - start)) s)"
    unproven+=("$proves")
    status=1
  fi
  { echo; echo '```'; grep -v '^$' "$log" | sed "s#$PWD/##g" | tail -n "${LINES_KEPT:-25}" | cut -c1-240; echo '```'; } | tee -a "$result"
  rm -f "$log"
}

mkdir -p "$(dirname "$result")"
echo "# GPU check" >"$result"
say ""
say "$(date -u +%Y-%m-%dT%H:%MZ), commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown), \`benchmarks/gpu_check.sh ${dry}\`"
say ""
[ -z "$dry" ] || say "**There was no GPU, or a dry run was asked for: nothing below is proven on one.**"
say ""; say "## Machine"; say ""; say '```'
{ nvidia-smi --query-gpu=name,driver_version,memory.total,pcie.link.gen.max --format=csv,noheader 2>/dev/null || echo "no GPU"
  uname -srm; nproc | sed 's/$/ processors/'; nvcc --version 2>/dev/null | tail -1 || echo "no nvcc"; } | tee -a "$result"
say '```'

if [ -z "${GPU_CHECK_PYTHON:-}" ]; then
  step 480 "Build" "the kernels compile for this GPU" \
    env PATH="$PWD/.venv/bin:$PATH" HOLMES_CMAKE_ARGS=-DHOLMES_TESTS=ON "$python" setup.py -q build_ext --inplace
  step 480 "C++ tests" "the kernels pass test_pack" \
    sh -c '.venv/bin/ctest --test-dir "$(ls -td build/cp3* | head -1)" --output-on-failure --timeout 120'
fi
step 120 "Versions" "versions are known" "$python" -c "
import sys, torch, holmes_comm
from holmes_comm import _C
from holmes_comm.nccl_agreement import nccl_package_paths
print('python', sys.version.split()[0], 'torch', torch.__version__, 'cuda', torch.version.cuda, 'holmes', holmes_comm.__version__)
try: print('NCCL', _C.nccl_library(nccl_package_paths()))
except holmes_comm.HolmesError as error: print(error)
for i in range(torch.cuda.device_count()): print(torch.cuda.get_device_properties(i))
"
for ranks in 2 4; do
  step 300 "Communicator, $ranks ranks on one GPU" "operations, streams, groups, registration, split and shrink with $ranks ranks on the real NCCL" \
    "$python" benchmarks/gpu_ranks.py --ranks $ranks $dry check
done
step 300 "CUDA graphs" "NCCL calls inside a CUDA graph" "$python" benchmarks/gpu_ranks.py $dry graph
step 300 "Images on one device" "CUDA takes kernels from sparse images; GPU memory per image; operations of several images in one order" \
  "$python" benchmarks/gpu_ranks.py $dry images
step 300 "Killed rank" "a killed rank ends the others by the deadline" "$python" benchmarks/gpu_ranks.py --ranks 3 $dry killed
step 300 "Two interfaces in one process" "byte counters show each group on its own interface" "$python" benchmarks/gpu_interfaces.py $dry
step 300 "Two interfaces, one stock NCCL over the plugin" "groups of Holmes over NCCL's plugin: the real NCCL asks it for each communicator's own NICs" \
  "$python" benchmarks/gpu_interfaces.py --plugin $dry
step 480 "A program without Holmes, NCCL_NET_PLUGIN=holmes" "real NCCL's collectives go over the plugin, on the NIC that HOLMES_NICS names" \
  "$python" benchmarks/gpu_plugin.py $dry
step 480 "Overhead over raw NCCL" "under 3 us a call, under 2 % from 1 MiB on" "$python" benchmarks/gpu_overhead.py $dry
# Without a GPU the same operations over torch's device type on the fakes.
tests=(-m gpu $(grep -rl "mark.gpu" tests --include="test_*.py"))
[ -z "$dry" ] || tests=(tests/gpu/test_c10d_cuda.py)
step 480 "torch.distributed cuda:holmes" "stream order, futures, coalescing, point to point, errors and aborts of c10d on real streams" \
  "$python" -m pytest -q -rs "${tests[@]}"
[ -n "$dry" ] || step 480 "The backend's tests on the fakes, the long form" "nothing more: they need no GPU" \
  env HOLMES_TEST_LONG=1 "$python" -m pytest -q tests/gpu/test_nccl_backend.py
for script in gpu_kernels gpu_sendrecv; do
  case $script in
    gpu_kernels) proves="kernels at 90 % of the copy bandwidth" ;;
    *) proves="send/recv without SMs against NCCL's sockets, and what a matrix multiplication beside it loses" ;;
  esac
  if [ -f benchmarks/$script.py ]; then step 480 "$script" "$proves" "$python" benchmarks/$script.py $dry
  else say ""; say "## $script"; say ""; say "not in this tree"; unproven+=("$proves"); fi
done
step 480 "Training: DDP and the overlapped optimizer" "both train on the GPU with one process's losses" \
  "$python" benchmarks/gpu_train.py $dry

# On the testbed, where network namespaces are allowed. By itself it takes the GPU where there is one.
step 480 "Demo" "the demo trains on the GPU: the single process's losses, its bytes on the fast NICs" \
  "$python" -m holmes demo --steps 10 --out build/gpu-demo

say ""; say "## Unproven"; say ""
unproven+=("InfiniBand and RoCE HCAs: this machine's check uses interfaces only")
for line in "${unproven[@]}"; do say "- $line"; done
exit $status
