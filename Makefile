# Everything a contributor runs. `make demo` and `make test` set themselves up in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: help demo test test-all check protos baseline models bench bench-core gpu-check coverage clean

help:
	@echo "make demo      ask a real model a question through both services"
	@echo "make test      the quick suite (10 minutes on 2 cores)"
	@echo "make test-all  every test"
	@echo "make check     format, lint, types, import contracts, protos (under a minute)"
	@echo "make models    the architectures that run, each compared with transformers"
	@echo "make bench     tokens per second beside transformers, in one run"
	@echo "make bench-core CPU time of the scheduler's core by itself"
	@echo "make gpu-check on a machine with a GPU: check and measure its path, with the PYTHON that has torch there"
	@echo "make protos    write the stubs anew after a change in protos/"
	@echo "make coverage  branch coverage of the scheduler's core"
	@echo "make clean     remove the virtual environments and caches"

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[scheduler,executor,demo,dev]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/octavo demo

test: $(INSTALLED)
	$(BIN)/octavo model prepare smollm2
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-all: $(INSTALLED)
	$(BIN)/octavo model prepare smollm2
	$(BIN)/python -m pytest -m "not gpu"

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@# mypy's workers give up where processes start slowly; one process alone has the last word.
	$(BIN)/mypy --num-workers 2 || $(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
	$(BIN)/buf format --diff --exit-code protos
	$(BIN)/buf breaking protos --against protos/baseline.binpb
	$(BIN)/python protos/generate.py --check

protos: $(INSTALLED)
	$(BIN)/buf format --write protos
	$(BIN)/python protos/generate.py

# The wire that later changes are compared with; renewed at each release.
baseline: $(INSTALLED)
	$(BIN)/buf build protos --output protos/baseline.binpb

bench: $(INSTALLED)
	$(BIN)/octavo model prepare smollm2
	$(BIN)/python -m benchmarks.throughput

models: $(INSTALLED)
	$(BIN)/python -m benchmarks.architectures

bench-core: $(INSTALLED)
	$(BIN)/python -m benchmarks.scheduler_core

# Installs nothing: a machine with a GPU brings torch, Triton, transformers and pytest of its own.
gpu-check:
	$(PYTHON) -m benchmarks.gpu_check

coverage: $(INSTALLED)
	$(BIN)/coverage run --branch --source=scheduler_svc/core,shared -m pytest -q tests/unit tests/property tests/traces -m "not slow and not gpu"
	$(BIN)/coverage report --show-missing

clean:
	rm -rf $(VENV) .venv-protos .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
