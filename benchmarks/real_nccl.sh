#!/usr/bin/env bash
# NCCL's own host half behind Holmes without a GPU: bootstrap, topology, channels, transports, groups, aborts, as they are.
# usage: benchmarks/real_nccl.sh SOURCE [RESULT.json]
# SOURCE: NCCL's sources (https://github.com/NVIDIA/nccl, a release from 2.26 on). Needs nvcc, the CUDA runtime's headers
# and `make build`. Builds into build/real-nccl, some ten minutes of two processors the first time: NCCL with the kernels
# of two operations and without those for symmetric memory (no kernel ever runs), and stand-ins for driver, runtime and
# NVML (tests/fake_cuda_torch). Then benchmarks/real_nccl.py, which says what it checks.
set -euo pipefail
[ $# -ge 1 ] && [ -f "$1/src/nccl.h.in" ] || { echo "usage: $0 SOURCE [RESULT.json]; SOURCE is a tree of NCCL's sources" >&2; exit 2; }
source=$(cd "$1" && pwd)
result=${2:-/dev/stdout}
cd "$(dirname "$0")/.."
PATH=$PWD/.venv/bin:$PATH
cuda=${CUDA_HOME:-/usr/local/cuda}
command -v "$cuda/bin/nvcc" >/dev/null || { echo "needs nvcc: CUDA_HOME=$cuda has no bin/nvcc; name another" >&2; exit 2; }
build=$PWD/build/real-nccl
mkdir -p "$build/link"

echo "building the stand-ins" >&2
cmake -GNinja -S tests/fake_cuda_torch -B "$build/stand-ins" -DCUDA_INCLUDE="$cuda/include" >/dev/null
cmake --build "$build/stand-ins" >/dev/null
ln -sf "$build/stand-ins/lib/libcudart.so.13" "$build/link/libcudart.so"

echo "building NCCL" >&2
options=(BUILDDIR="$build/nccl" CUDA_HOME="$cuda" CUDARTLIB=cudart CUDA_LIB="$build/link"
  NVCC_GENCODE="-gencode=arch=compute_90,code=sm_90" ONLY_FUNCS="SendRecv|AllReduce Sum f32 RING SIMPLE")
symmetric=$build/nccl/obj/device/gensrc/symmetric
if [ -d "$source/src/device/symmetric" ] && [ ! -d "$symmetric" ]; then
  make -C "$source/src/device" "${options[@]}" "$symmetric" >/dev/null
  for file in "$symmetric"/*.cu; do echo "// left out" >"$file"; done
fi
make -C "$source/src" -j2 "${options[@]}" lib >"$build/nccl.log" 2>&1 || { tail -20 "$build/nccl.log" >&2; exit 1; }
# The table of the kernels that were left out: none of them is there, which is no error at loading.
find "$build/nccl/obj" -name "sym_kernels_host*.o" -exec objcopy --weaken {} \;
rm -f "$build"/nccl/lib/libnccl.so*
make -C "$source/src" "${options[@]}" lib >>"$build/nccl.log" 2>&1

export LD_LIBRARY_PATH=$build/stand-ins/lib FAKE_CUDA_DEVICES=1 NCCL_TOPO_FILE=$PWD/tests/fake_cuda_torch/topology.xml
export HOLMES_CUDA_LIBRARY=$build/stand-ins/lib/libcuda.so.1 HOLMES_NCCL_LIBRARY=$build/nccl/lib/libnccl.so.2
python benchmarks/real_nccl.py >"$result"

# An unmodified program over the plugin: torch's own CUDA build, on stand-ins of its own (`make test-cuda-fake`).
torch=$PWD/build/cuda-venv/bin/python
[ -x "$torch" ] && [ -d build/cuda-stand-ins/lib ] || { echo "torch over the plugin was left out: needs make test-cuda-fake" >&2; exit 0; }
log=$build/torch.log
env LD_LIBRARY_PATH="$build/nccl/lib:$PWD/build/cuda-stand-ins/lib:$PWD/holmes_comm/lib" \
  FAKE_CUDA_DEVICES=2 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_NET_PLUGIN=holmes HOLMES_NICS=lo NCCL_DEBUG=INFO \
  TORCH_DEVICE_BACKEND_AUTOLOAD=0 "$torch" -m torch.distributed.run --nproc-per-node 2 benchmarks/real_nccl_torch.py \
  >"$log" 2>&1 || { tail -20 "$log" >&2; exit 1; }
for line in "NET/holmes : using lo" "Using network holmes" "via NET/holmes" "rank 0 of 2: Cuda failure 209" "rank 1 of 2: Cuda failure 209"; do
  grep -m1 "$line" "$log" >&2 || { echo "NCCL's log lacks \"$line\": $log" >&2; exit 1; }
done
