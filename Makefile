# Every target but gpu-check and clean installs what it needs into .venv first; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HP ?= {"num_ranks": 2, "backend": "gloo"}
PARALLEL := --numprocesses 2 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help install train test test-exhaustive test-all test-fast lint bench libraries chaos gpu-check cluster-test lock package clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Before anything is downloaded: flytekit, and so each pyflyte command, fails on newer versions of Python.
FITS := import sys; v = sys.version_info[:2]; (3, 11) <= v < (3, 13) or sys.exit( \
	"Python %d.%d: flyte-ddp runs on 3.11 and 3.12; for example: make clean train PYTHON=python3.12" % v)
# Installs exactly the packages of requirements-dev.lock, uv first. Only wheels, so packages run no code while installed.
HASHED := --require-hashes --only-binary :all:
# With CPU=1, torch's packages come from torch's index, without CUDA. The lock does not contain their hashes.
FOR_CPU := /^[^ ]/ {cuda = /^(nvidia-|cuda-|triton==)/; torch = /^torch(vision|codec)?==/; if (torch) print $$1} \
	!cuda && !torch
WITH_CPU := --only-binary :all: --torch-backend cpu
$(VENV)/.installed: pyproject.toml requirements-dev.lock
	@$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) -c '$(FITS)'
	@echo "Installing into $(VENV) ($(if $(CPU),torch for CPUs,torch with CUDA is about 6 GB; minutes on a slow line)) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@awk '/^[^ ]/ {uv = /^uv==/} uv' requirements-dev.lock | \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check $(HASHED) --requirement /dev/stdin
	@awk '$(if $(CPU),$(FOR_CPU),1)' requirements-dev.lock | $(BIN)/uv pip install --compile-bytecode \
		--python $(BIN)/python --no-deps $(if $(CPU),$(WITH_CPU),$(HASHED)) --requirement /dev/stdin
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

install: $(VENV)/.installed ## Create .venv with all locked versions; CPU=1 (for any target) installs torch without CUDA

train: install ## Train on the embedded digits, 2 ranks (other settings: make train HP=config/fast.json)
	@echo "Training; results will be under runs/ ..."
	$(BIN)/pyflyte run workflows/training.py training_wf --hp '$(HP)'

test: install ## Run all tests but the exhaustive ones (about 7 minutes on two quiet cores)
	$(BIN)/python -m pytest $(PARALLEL) -m "not exhaustive"

test-exhaustive: install ## Run the exhaustive tests: more faults, stores, launchers and seeds (about 20 minutes)
	$(BIN)/python -m pytest $(PARALLEL) -m exhaustive

test-all: test test-exhaustive ## Run both, one after the other (about half an hour)

test-fast: install ## Run the fast tests (50 to 80 seconds)
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not exhaustive"

lint: install ## Check style (ruff), types (mypy, strict), layers (import-linter) and plain words
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python .ci/plain_words.py

bench: install ## Run the benchmarks; results go to benchmarks/results/
	$(BIN)/python -m benchmarks

libraries: install ## Run the recipes of examples/libraries, each with its pinned packages (some: make libraries K="data_lance")
	.ci/libraries $(K)

chaos: install ## Kill, stop and damage runs at 50 random moments; each retry must end in the same model (a quarter of an hour)
	$(BIN)/python -m benchmarks chaos

# Installs nothing, because it needs no network. Without .venv, PYTHON must have the packages that the tests import.
GPU_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu-check: ## Run the GPU tests, then the GPU benchmark (benchmarks/results/gpu.json), with .venv or else PYTHON
	$(GPU_PYTHON) -m pytest --gpu tests/training/test_gpu.py; tests=$$?; $(GPU_PYTHON) -m benchmarks gpu && exit $$tests

cluster-test: install ## Check a Flyte cluster from outside: make cluster-test CONFIG=deploy/sandbox.yaml IMAGE=... [K=preempted]
	$(BIN)/python -m pytest tests/cluster --flyte-config $(CONFIG) --image $(IMAGE) $(if $(K),-k "$(K)") $(OPTIONS)

COMPILE = $(BIN)/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-header $(UPGRADE)
lock: install ## Update the locks and keep pins that still fit; for the newest versions: make lock UPGRADE=--upgrade
	$(COMPILE) $(addprefix --extra ,images streams elastic ray dask export sweep) --output-file requirements.lock
	$(COMPILE) $(addprefix --extra ,images streams export flyte2) --constraint requirements.lock \
		--output-file requirements-flyte2.lock
	$(COMPILE) --extra dev --constraint requirements.lock --output-file requirements-dev.lock

package: install ## Serialize tasks, workflows and launch plans into build/flyte-package.tgz
	@mkdir -p build
	$(BIN)/pyflyte --pkgs workflows package --image flyte-ddp:latest --fast --force --output build/flyte-package.tgz

clean: ## Remove .venv and caches; runs/ stays
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache
