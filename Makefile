# Every target sets itself up. Needed on a fresh machine: Python >= 3.10 with venv, g++ and make; pip brings the rest
# (CMake and ninja too). `make demo` shows what Holmes does, `make test` proves it.
PYTHON ?= python3
TORCH ?= 2.13.0
# pip options for torch, such as the CPU wheels' index that pytorch.org names (--index-url ...). Without one, pip's
# configured indexes decide; the public one has only the CUDA build, which works without a GPU too but is gigabytes.
TORCH_PIP_ARGS ?=
# The versions that `make wheels` builds the backend for.
TORCHES ?= $(TORCH)
WHEEL_CUDA ?= ON
TORCHTITAN ?= 0.3.0
TORCHFT ?= 0.2.0
PYTEST_ARGS ?=
BENCH_ARGS ?=
COMPARE_ARGS ?=
FIGURES_ARGS ?=
SOAK_ARGS ?= --minutes 60 --seed 1
STRESS_ARGS ?= --minutes 4 --seed 1
SIMULATE_ARGS ?= --ranks 64,1024,4096

VENV := .venv
BIN := $(VENV)/bin
BUILD := build/$(shell $(PYTHON) -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
SOURCES := CMakeLists.txt setup.py pyproject.toml $(shell find csrc -type f)
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet
# The tests of NCCL's images use the package's library, where it is installed.
NCCL_LIBRARY = $(shell ls $(CURDIR)/$(VENV)/lib/python*/site-packages/nvidia/nccl/lib/libnccl.so.2 2>/dev/null)
export HOLMES_NCCL_LIBRARY ?= $(NCCL_LIBRARY)
# The tools of the environment, and no other environment's.
export PATH := $(CURDIR)/$(BIN):$(PATH)
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME

# One step after the other, also with -j: two pips at once in one environment break each other, and every step that is
# long uses all processors.
.NOTPARALLEL:
.PHONY: help build demo test test-cpp test-python test-training test-docs test-torch test-trainers test-launchers test-distributed test-rdma test-cuda-fake bench-cuda-fake suite-cuda-fake soak stress stress-address lint fmt stubs simulate bench bench-compare figures sanitize fuzz fuzz-python wheels release docs clean
help:
	@echo "make demo      train across two emulated clusters, with and without Holmes"
	@echo "make test      C++ and Python tests (TESTS: PYTEST_ARGS='tests/unit/test_x.py -k name')"
	@echo "make test-training  training programs beside plain torch"
	@echo "make test-docs   every command and snippet of README and docs, as printed"
	@echo "make test-torch  other versions of torch: the backend beside Gloo, and its tests (VERSIONS='2.9.1 2.15.0', gigabytes)"
	@echo "make test-trainers   Megatron-core, DeepSpeed, torchtitan, torchft and the examples (installs them)"
	@echo "make test-launchers  srun, mpirun, mpiexec, Ray Train start two ranks each (installs them where it can)"
	@echo "make test-distributed  PyTorch's own DistributedTest over Holmes in place of Gloo (RANKS=3)"
	@echo "make test-rdma   communicators over RDMA, on Soft-RoCE in user-mode Linux (downloads 3 MB)"
	@echo "make test-cuda-fake  torch's CUDA build, and its ProcessGroupNCCL beside Holmes, on a fake CUDA runtime (installs gigabytes)"
	@echo "make bench-cuda-fake  their calls, memory and host time side by side (BENCH_ARGS='--save')"
	@echo "make suite-cuda-fake  PyTorch's own DistributedTest over both (SUITE_ARGS='--save -k broadcast')"
	@echo "make soak      random training programs against plain torch (SOAK_ARGS='--minutes 60 --seed 1')"
	@echo "make stress    injected faults on emulated nodes for some minutes (STRESS_ARGS='--minutes 60 --seed 3')"
	@echo "make stress-address  the same under the address sanitizer (STRESS_ARGS='--minutes 120')"
	@echo "make simulate  the library at ranks that no machine has, in virtual time (SIMULATE_ARGS='--ranks 64 --kill 1 --seeds 100')"
	@echo "make lint fmt  check / fix formatting, style and types"
	@echo "make bench     collectives beside Gloo (BENCH_ARGS='all_reduce -b 1M -e 64M')"
	@echo "make bench-compare BASE=COMMIT   this tree against another commit; fails on a regression"
	@echo "make figures   what Holmes promises, measured and judged (FIGURES_ARGS='--quick --only link-2')"
	@echo "make sanitize  C++ tests under the address, undefined and thread sanitizers"
	@echo "make fuzz      the fuzzers of everything a peer can send, FUZZ_SECONDS=60 each"
	@echo "make fuzz-python   random operations against numpy, a minute (FUZZ_ARGS='--minutes 60 --seed 1000')"
	@echo "make stubs     regenerate holmes_comm/_C.pyi and docs/environment.md"
	@echo "make wheels    what is released, into dist/, tried as a user would (TORCHES='2.12.1 2.13.0', WHEEL_CUDA=OFF)"
	@echo "make release   make wheels, and the demo from the source archive and from the wheel, each in an environment of its own"
	@echo "make docs      the documentation as a site, build/site/index.html, every link checked"
	@echo "make build     environment and in-place build;  make clean removes both"

# --- set-up: each stamp is redone when what it depends on changed ---
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Holmes needs Python >= 3.10, $(PYTHON) is " + sys.version.split()[0] + "; set PYTHON=")'
	@echo "making the environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# The CPU build where there is no NVIDIA GPU: a tenth of the download.
$(VENV)/.torch-$(TORCH): $(VENV)/.created
	@echo "installing torch $(TORCH)"
	@if [ -e /dev/nvidia0 ] || nvidia-smi >/dev/null 2>&1; then \
	  $(PIP) torch==$(TORCH) $(TORCH_PIP_ARGS); \
	else \
	  $(PIP) torch==$(TORCH)+cpu $(TORCH_PIP_ARGS) 2>/dev/null || $(PIP) torch==$(TORCH) $(TORCH_PIP_ARGS); \
	fi
	@touch $@

$(VENV)/.requirements: requirements-dev.txt $(VENV)/.created
	@echo "installing requirements-dev.txt"
	@$(PIP) -r requirements-dev.txt
	@touch $@

# The real NCCL, and what shows the kernels' instructions, for tests only: without it (no network for 305 MB) they are skipped.
SASS_TOOLS := nvidia-cuda-cuobjdump==13.5.37 nvidia-cuda-nvdisasm==13.5.37
$(VENV)/.nccl: requirements-nccl.txt $(VENV)/.created
	@echo "installing NCCL, for its tests (305 MB)"
	@$(PIP) --no-deps -r requirements-nccl.txt || echo "no NCCL: the tests of its images will be skipped"
	@$(PIP) --no-deps $(SASS_TOOLS) || echo "no cuobjdump: the test of what nvcc made will be skipped"
	@touch $@

# pip keeps to itself what a build prints, so it comes after that: ninja counts its files on the terminal, and pip's own
# build finds nothing left to do.
$(VENV)/.built: $(VENV)/.requirements $(VENV)/.torch-$(TORCH) $(SOURCES)
	@echo "building the C++ engine and torch's backend: minutes the first time, seconds later"
	@$(BIN)/python setup.py -q build_ext --inplace
	@echo "installing Holmes from this tree"
	@$(PIP) --no-build-isolation -e .
	@touch $@

# torch is there already, so that these find it; torchtitan needs Python 3.11. torchft comes without what it requires,
# which asks for torch again: the requirements have the rest.
$(VENV)/.trainers-$(TORCHTITAN)-$(TORCHFT): requirements-trainers.txt $(VENV)/.built
	@echo "installing requirements-trainers.txt, torchft $(TORCHFT) and torchtitan $(TORCHTITAN)"
	@DS_BUILD_OPS=0 $(PIP) -r requirements-trainers.txt
	@$(PIP) --no-deps torchft==$(TORCHFT)
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then $(PIP) --no-deps torchtitan==$(TORCHTITAN); fi
	@touch $@

$(VENV)/.launchers: requirements-launchers.txt $(VENV)/.built
	@tests/launchers/install.sh $(BIN)/python
	@touch $@

build: $(VENV)/.built

# --- run ---
demo: build
	$(BIN)/holmes demo

bench: build
	$(BIN)/holmes bench $(BENCH_ARGS)

# Regressions since another commit: make bench-compare BASE=HEAD~3 COMPARE_ARGS='-k all_reduce- --threshold 0.1'
bench-compare: build
	@test -n "$(BASE)" || { echo "name the commit to compare with: make bench-compare BASE=HEAD~1" >&2; exit 2; }
	$(BIN)/python benchmarks/compare_commits.py $(BASE) $(COMPARE_ARGS)

figures: build
	$(BIN)/python benchmarks/figures.py $(FIGURES_ARGS)

# --- prove ---
test: test-cpp test-python

# Most tests wait more than they compute: five files beside each other on the two processors of a small machine.
# Those in C++ wait less.
TEST_JOBS ?= 5
CPP_TEST_JOBS ?= 4
# In the same build tree as the modules, so that the library is compiled once.
test-cpp: build $(VENV)/.nccl
	$(BIN)/cmake -S . -B $(BUILD) -DHOLMES_TESTS=ON >/dev/null
	$(BIN)/cmake --build $(BUILD)
	$(BIN)/ctest --test-dir $(BUILD) -j $(CPP_TEST_JOBS) --output-on-failure --timeout 300

test-python: build $(VENV)/.nccl
	$(BIN)/python -m pytest $(patsubst %,--ignore tests/%,differential docs trainers launchers pytorch) \
	  -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# Whole training programs beside plain torch, minutes of them.
test-training: build
	$(BIN)/python -m pytest tests/differential -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# Every command and snippet of README and docs as printed: most start jobs of several processes.
test-docs: build
	$(BIN)/python -m pytest tests/docs -n $(TEST_JOBS) --dist worksteal $(PYTEST_ARGS)

# Real launchers on this machine; HOLMES_TEST_CRDS=FOLDER checks the manifests too (docs/launchers.md).
test-launchers: $(VENV)/.launchers
	$(BIN)/python -m pytest tests/launchers $(PYTEST_ARGS)

# PyTorch's own suite, as installed; expecttest is what it needs beside torch. RANKS=2 and RANKS=4 run other tests of it.
RANKS ?= 3
$(VENV)/.expecttest: $(VENV)/.created
	@$(PIP) expecttest
	@touch $@

test-distributed: build $(VENV)/.expecttest
	HOLMES_REPLACES=gloo BACKEND=gloo WORLD_SIZE=$(RANKS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/pytorch -n $(TEST_JOBS) $(PYTEST_ARGS)

# Other versions of torch, each in an environment of its own that is removed afterwards (KEEP=1 leaves it):
# make test-torch VERSIONS="2.9.1 2.15.0" TORCH_TEST_ARGS="--save"
VERSIONS ?= $(TORCH)
TORCH_TEST_ARGS ?=
test-torch: build
	$(BIN)/python tools/torch_versions.py $(VERSIONS) $(if $(KEEP),--keep) $(TORCH_TEST_ARGS)

# Real verbs: user-mode Linux with Soft-RoCE (docs/rdma.md). HOLMES_UML_KERNEL names the kernel where shared/lab has none.
test-rdma: build
	HOLMES_TEST_RDMA=1 $(BIN)/python -m pytest tests/rdma $(PYTEST_ARGS)

test-trainers: $(VENV)/.trainers-$(TORCHTITAN)-$(TORCHFT)
	$(BIN)/python -m pytest tests/trainers $(PYTEST_ARGS)

# torch's own CUDA code without a GPU: its CUDA build, in an environment of its own (gigabytes), on stand-ins for NVIDIA's
# libraries (tests/fake_cuda_torch). TORCH_CUDA_PIP_ARGS: pip's options where that build comes from elsewhere.
CUDA_VENV := build/cuda-venv
CUDA_BIN := $(CURDIR)/$(CUDA_VENV)/bin
CUDA_PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(CUDA_BIN)/python -m pip install --quiet
CUDA_STAND_INS := $(CURDIR)/build/cuda-stand-ins
CUDA_HEADERS := $(CURDIR)/build/cuda-headers
CUDA_ENV := LD_LIBRARY_PATH=$(CUDA_STAND_INS)/lib FAKE_CUDA_DEVICES=2 NCCL_NET_PLUGIN=fake HOLMES_NCCL_LIBRARY= \
  TORCH_DEVICE_BACKEND_AUTOLOAD=0 PYTHONPATH=$(CURDIR)/$(CUDA_VENV)/holmes:$(CURDIR)/python_api PATH=$(CUDA_BIN):$$PATH
TORCH_CUDA_PIP_ARGS ?=

# `===`: not another build of that version (2.13.0+cpu), wherever pip finds one.
$(CUDA_VENV)/.torch-$(TORCH): requirements-cuda-fake.txt
	$(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_PIP) -r requirements-cuda-fake.txt
	$(CUDA_PIP) --no-deps torch===$(TORCH) $(TORCH_CUDA_PIP_ARGS)
	@$(CUDA_BIN)/python -c 'import importlib.util, pathlib, sys; at = pathlib.Path(importlib.util.find_spec("torch").origin); sys.exit(0 if (at.parent / "lib/libtorch_cuda.so").exists() else "this torch is no CUDA build; name the index of one: TORCH_CUDA_PIP_ARGS=\"--index-url ...\"")'
	$(CUDA_PIP) --no-deps --upgrade --target $(CUDA_HEADERS) nvidia-cuda-runtime==13.0.* nvidia-cuda-crt==13.0.*
	@touch $@

$(CUDA_STAND_INS)/.built: $(CUDA_VENV)/.torch-$(TORCH) $(wildcard tests/fake_cuda_torch/* tests/fake_nccl/*)
	PATH=$(CUDA_BIN):$$PATH cmake -GNinja -S tests/fake_cuda_torch -B $(CUDA_STAND_INS) -DPython_EXECUTABLE=$(CUDA_BIN)/python \
	  -DTORCH_LIB=$$(echo $(CURDIR)/$(CUDA_VENV)/lib/python*/site-packages/torch/lib) \
	  -DCUDA_INCLUDE=$$(echo $(CUDA_HEADERS)/nvidia/*/include) >/dev/null
	PATH=$(CUDA_BIN):$$PATH cmake --build $(CUDA_STAND_INS)
	@touch $@

# Holmes built for that torch, beside the tree's own build.
$(CUDA_VENV)/.holmes: $(CUDA_STAND_INS)/.built $(SOURCES)
	$(CUDA_ENV) PYTHONPATH= HOLMES_CMAKE_ARGS=-DHOLMES_CUDA=OFF $(CUDA_PIP) --no-deps --no-build-isolation --upgrade --target $(CUDA_VENV)/holmes .
	@touch $@

test-cuda-fake: $(CUDA_VENV)/.holmes
	$(CUDA_ENV) $(CUDA_BIN)/pytest tests/gpu/test_torch_cuda.py $(PYTEST_ARGS)

bench-cuda-fake: $(CUDA_VENV)/.holmes
	$(CUDA_ENV) $(CUDA_BIN)/python benchmarks/gpu_beside_nccl.py $(BENCH_ARGS)

suite-cuda-fake: $(CUDA_VENV)/.holmes
	$(CUDA_ENV) $(CUDA_BIN)/python benchmarks/gpu_pytorch_suite.py $(SUITE_ARGS)

soak: build
	$(BIN)/python tests/differential/soak.py $(SOAK_ARGS)

# One hour, as docs/stress.md has it: make stress STRESS_ARGS='--minutes 60'
stress: build
	$(BIN)/holmes stress --testbed --faults all --save build/stress $(STRESS_ARGS)

# The same processes with library, module and backend under the address sanitizer, in a folder of their own. It needs more
# address space than the faults of memory leave it. Run in that folder: Python looks in its own first, and this one has
# Holmes too.
ADDRESS := build/address
# `=`: the compiler is asked where this is used, not by every make.
ADDRESS_ENV = LD_PRELOAD="$(shell $(or $(CXX),c++) -print-file-name=libasan.so) $(shell $(or $(CXX),c++) -print-file-name=libstdc++.so)" \
  ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=16 PYTHONPATH=$(CURDIR)/$(ADDRESS)
$(ADDRESS)/.built: $(VENV)/.built $(shell find holmes_comm python_api -name '*.py')
	HOLMES_CMAKE_ARGS="-DHOLMES_SANITIZE=address -DHOLMES_CUDA=OFF" $(PIP) --no-deps --no-build-isolation --upgrade --target $(ADDRESS) .
	@touch $@
stress-address: $(ADDRESS)/.built
	cd $(ADDRESS) && $(ADDRESS_ENV) $(CURDIR)/$(BIN)/python -m holmes stress --testbed \
	  --faults all,-memory,-memory-at-setup --save $(CURDIR)/build/stress-address $(STRESS_ARGS)

# Counts by rank, or deaths by seed (tests/README.md); 4,096 ranks take half a minute of one processor and 1 GB.
simulate: build
	$(BIN)/cmake -S . -B $(BUILD) -DHOLMES_TESTS=ON >/dev/null
	$(BIN)/cmake --build $(BUILD) --target simulate
	$(BUILD)/tests/cpp/simulate $(SIMULATE_ARGS)

# Address and undefined in one build: they see different things and bear each other. (The longest test took 419 s once,
# beside two others on two processors.)
sanitize: $(VENV)/.requirements $(VENV)/.nccl
	@for sanitizer in address,undefined thread; do \
	  dir=build/sanitize-$${sanitizer%%,*}; \
	  $(BIN)/cmake -S . -B $$dir -GNinja -DHOLMES_TESTS=ON -DHOLMES_CUDA=OFF -DHOLMES_SANITIZE=$$sanitizer >/dev/null && \
	  $(BIN)/cmake --build $$dir && \
	  $(BIN)/ctest --test-dir $$dir -j 3 --output-on-failure --timeout 900 || exit 1; \
	done

# Everything that reads what a peer or a stranger sent, each FUZZ_SECONDS, two at a time. clang's libFuzzer is used where
# clang++ is; else the address sanitizer's build above and a driver that mutates at random.
FUZZ_SECONDS ?= 60
FUZZ_CXX ?= $(shell command -v clang++)
FUZZ_BUILD = $(if $(FUZZ_CXX),build/fuzz,build/sanitize-address)
fuzz: $(VENV)/.requirements
	$(BIN)/cmake -S . -B $(FUZZ_BUILD) -GNinja -DHOLMES_FUZZ=ON -DHOLMES_SANITIZE=address,undefined -DHOLMES_CUDA=OFF \
	  $(if $(FUZZ_CXX),-DCMAKE_CXX_COMPILER=$(FUZZ_CXX)) >/dev/null
	$(BIN)/cmake --build $(FUZZ_BUILD) --target fuzzers
	tools/fuzz.sh $(FUZZ_BUILD) $(FUZZ_SECONDS)

# Of communicators against numpy; each case by its seed. What fails prints the command that runs it again.
fuzz-python: build
	$(BIN)/python tests/multirank/buffers_fuzz.py $(FUZZ_ARGS)

# mypy reads torch's types, so lint needs torch too.
lint: $(VENV)/.requirements $(VENV)/.torch-$(TORCH)
	@tools/lint.sh
fmt: $(VENV)/.requirements $(VENV)/.torch-$(TORCH)
	@tools/lint.sh --fix

stubs: build
	$(BIN)/python tools/make_stubs.py holmes_comm/_C.pyi
	$(BIN)/python tools/make_environment.py

# This Python's; PYTHON=python3.12 makes another's.
wheels: build
	$(BIN)/python tools/make_wheels.py --torch $(TORCHES) --cuda $(WHEEL_CUDA) $(WHEEL_ARGS)

# The same, and the demo from each archive in an environment of its own.
release: WHEEL_ARGS += --demo
release: wheels

$(VENV)/.docs: requirements-docs.txt $(VENV)/.created
	@echo "installing requirements-docs.txt"
	@$(PIP) -r requirements-docs.txt
	@touch $@

# build/site/index.html; a dead link, anchor or name fails it.
docs: $(VENV)/.docs
	PYTHONPATH=tools NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --clean

clean:
	rm -rf build dist *.egg-info $(VENV) holmes_comm/lib holmes_comm/include holmes_comm/c10d holmes_comm/*.so
