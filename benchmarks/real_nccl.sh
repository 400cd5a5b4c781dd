#!/usr/bin/env bash
# NCCL's own host half behind Holmes without a GPU: bootstrap, topology, channels, transports, groups, aborts, as they are.
# usage: benchmarks/real_nccl.sh SOURCE [RESULT.json]
# SOURCE: NCCL's sources (https://github.com/NVIDIA/nccl; tried with 2.30.7). Needs nvcc, the CUDA runtime's headers
# and `make build`. Builds into build/real-nccl, some ten minutes of two processors the first time: NCCL with the kernels
# of two operations and without those for symmetric memory (none ever runs), and stand-ins for driver, runtime and
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

echo "building NCCL and the stand-ins" >&2
options=(BUILDDIR="$build/nccl" CUDA_HOME="$cuda" CUDARTLIB=cudart CUDA_LIB="$build/link"
  NVCC_GENCODE="-gencode=arch=compute_90,code=sm_90" ONLY_FUNCS="SendRecv|AllReduce Sum f32 RING SIMPLE")
make -C "$source/src" "${options[@]}" "$build/nccl/include/nccl.h" >/dev/null
# With torch's CUDA build at hand (`make test-cuda-fake`) they are its stand-ins too.
torch=$PWD/build/cuda-venv/bin/python
torch_lib=$([ ! -x "$torch" ] || echo "$PWD"/build/cuda-venv/lib/python*/site-packages/torch/lib)
cmake -GNinja -S tests/fake_cuda_torch -B "$build/stand-ins" -DCUDA_INCLUDE="$cuda/include" -DTORCH_LIB="$torch_lib" \
  -DNCCL_INCLUDE="$source/src/include;$source/src/include/plugin;$build/nccl/include;$cuda/include;$cuda/include/cccl" >/dev/null
cmake --build "$build/stand-ins" >"$build/stand-ins.log" || { tail -20 "$build/stand-ins.log" >&2; exit 1; }
ln -sf "$build/stand-ins/lib/libcudart.so.13" "$build/link/libcudart.so"
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

# An unmodified program over the plugin, and over NCCL's own sockets.
[ -x "$torch" ] || { echo "torch over the plugin was left out: needs make test-cuda-fake" >&2; exit 0; }
export LD_LIBRARY_PATH=$build/nccl/lib:$build/stand-ins/lib:$PWD/holmes_comm/lib
export FAKE_CUDA_DEVICES=2 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_PROTO=Simple NCCL_P2P_LL_THRESHOLD=0
export NCCL_SOCKET_IFNAME=lo HOLMES_NICS=lo HOLMES_SHM=0 NCCL_DEBUG=INFO TORCH_DEVICE_BACKEND_AUTOLOAD=0
for net in holmes Socket; do
  log=$build/torch-$net.log
  NCCL_NET=$net NCCL_NET_PLUGIN=$([ $net = holmes ] && echo holmes || echo none) \
    "$torch" -m torch.distributed.run --nproc-per-node 2 benchmarks/real_nccl_torch.py >"$log" 2>&1 || { tail -20 "$log" >&2; exit 1; }
  for line in "NET/$net : \(using\|Using\)" "Using network $net" "via NET/$net" "rank [01] of 2: Cuda failure 209"; do
    grep -m1 "$line" "$log" >&2 || { echo "NCCL's log lacks \"$line\": $log" >&2; exit 1; }
  done
  grep "both ways" "$log" >&2
done
