# The commands of this project. Each installs what is missing (Debian packages, a Python environment in .venv), builds what
# it needs and ends on its own.
#   make demo       serve a real model's pruned layers, multiply, check, show
#   make test       build everything and run every test that needs no GPU
#   make test-oip   the tests with Triton's client alone
#   make bench      CPU benchmarks beside OpenBLAS, into bench-results/
#   make bench-gpu  the same on a GPU beside cuBLASLt
#   make test-gpu   the GPU tests, plain and under compute-sanitizer
#   make asan tsan  the tests under sanitizers
#   make lint       clang-format, clang-tidy, buf, ruff, mypy, shellcheck
#   make fuzz       every fuzzer for a few seconds from its kept corpus
#   make dist       a relocatable tarball in dist/

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := build

CMAKE_ARGS ?=
CTEST_ARGS ?=
JOBS ?= $(shell nproc)
VENV := .venv/bin

# Paths relative to the checkout in ccache's keys: a second clone, or CI's, finds what the first one compiled.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := true

.PHONY: setup configure build demo test test-oip bench bench-gpu test-gpu asan tsan lint format fuzz dist clean

setup:
	@scripts/setup.sh

configure: setup
	@cmake --preset release $(CMAKE_ARGS) >build-configure.log 2>&1 || { cat build-configure.log; exit 1; }
	@rm -f build-configure.log

build: configure
	@cmake --build build -j $(JOBS)

# Only the programs it runs: half of what `build` compiles are tests and benchmarks.
demo: configure
	@cmake --build build -j $(JOBS) --target spmmd spmmctl
	@scripts/demo.sh

test: build
	@ctest --test-dir build --output-on-failure -LE gpu -j $(JOBS) $(CTEST_ARGS)
	@SPMMD_TEST_CUDA_LIBRARY=$(CURDIR)/build/lib/libspmmd_cuda_fake.so $(VENV)/python -m pytest -q tests/python
	@$(MAKE) --no-print-directory test-oip
	@scripts/setup.sh --ops
	@$(VENV)/python -m pytest -q -c tests/operate/pytest.ini tests/operate

# Needs the server built.
test-oip:
	@scripts/setup.sh --triton
	@.venv/triton/bin/python -m pytest -q -c tests/oip/pytest.ini tests/oip

bench: build
	@scripts/bench_cpu.sh

bench-gpu: build
	@scripts/bench_gpu.sh

test-gpu: build
	@scripts/gpu_check.sh

asan: setup
	@cmake --preset asan $(CMAKE_ARGS) >/dev/null
	@cmake --build build/asan -j $(JOBS)
	@ctest --test-dir build/asan --output-on-failure $(CTEST_ARGS)

# gRPC and protobuf are not instrumented, so only tests that do not link them can be believed.
tsan: setup
	@cmake --preset tsan $(CMAKE_ARGS) >/dev/null
	@cmake --build build/tsan -j $(JOBS)
	@ctest --test-dir build/tsan --output-on-failure -L core $(CTEST_ARGS)

lint: build
	@scripts/setup.sh --dev
	@scripts/lint.sh

format:
	@git ls-files -z -- '*.h' '*.cc' '*.cu' '*.cuh' '*.proto' ':!proto/google' | xargs -0 clang-format -i

fuzz:
	@scripts/setup.sh --dev
	@scripts/fuzz.sh

dist: build
	@scripts/dist.sh

clean:
	@rm -rf build dist bench-results
