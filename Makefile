# Everything a user of a clone and a contributor run. Each target installs what it needs into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Stamps: what the two services need, and what tests, checks and documentation need beside it.
RUNTIME := $(VENV)/installed-runtime
INSTALLED := $(VENV)/installed
TOOLS := $(VENV)/tools
# Each worker takes up to 1 GB and more than a core.
TEST_WORKERS ?= 2
# Files go out in the order of collection: the small ones of tests/unit come last, so that both workers end together.
PYTEST := $(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
QUICK := "not slow and not further_case and not gpu"
SUITES_OF_TESTS := $(BIN)/python -m tests.suites
# The suite starts hundreds of processes; each would compile the same modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo dev test test-suites test-all check protos baseline record-release models bench bench-peers bench-pages bench-core gpu-check mutants chaos coverage resolve-check pythons strangers checkov k8s-check cluster-test monitoring-tools monitoring-check browser pictures docs docs-reference images wheels clean

help:
	@echo "make demo      a real model answers, and an executor is killed in the middle of it"
	@echo "make dev       install everything: what make test needs, grpcurl"
	@echo "make test      the quick suite (5 minutes on 2 cores); SUITES='tls docs' adds suites that it leaves out"
	@echo "make test-suites these suites alone, as SUITES='tls docs'; python -m tests.suites names all"
	@echo "make test-all  every test"
	@echo "make check     format, lint, types, import contracts, protos, packages (a minute)"
	@echo "make resolve-check the packages that others get fit each other: pins and ranges, every Python and platform"
	@echo "make pythons   the quick part of the suite on every Python that pyproject.toml names"
	@echo "make strangers what strangers type, in new clones, with the packages that the index has for everybody"
	@echo "make models    the architectures that run, each compared with transformers"
	@echo "make bench     tokens a second beside every engine that is installed, in one run; ARGS=--quick is shorter"
	@echo "make bench-peers install llama.cpp, OpenVINO GenAI and vLLM for it, each into .venv-bench (half an hour)"
	@echo "make bench-pages write the last result into README.md and docs/benchmarks.md"
	@echo "make bench-core the parts: scheduler's core, placing on executors, gaps between steps, who takes what of a step, what the stack costs"
	@echo "make gpu-check on a machine with a GPU: check and measure its path, with the PYTHON that has torch there"
	@echo "make mutants   plant faults in copies of the tree; each must be caught by the suite named beside it"
	@echo "make chaos     kill, stop and cut off real processes under streams, compare every answer, print a table (1.5 hours)"
	@echo "make protos    write the stubs anew after a change in protos/"
	@echo "make coverage  branch coverage of the scheduler's core"
	@echo "make cluster-test  the manifests applied to a Kubernetes cluster, and what runs there broken; see tests/cluster/run.sh"
	@echo "make k8s-check manifests and Containerfiles: rendered, validated, linted, each check with a planted mistake"
	@echo "make monitoring-check alerts, dashboard and metrics, with Prometheus' own promtool"
	@echo "make images    build the container images with buildah (images/build.sh says what can be chosen)"
	@echo "make docs      the documentation as a site, in docs/_build/html"
	@echo "make docs-reference write the reference pages anew after a change of settings, protos or metrics"
	@echo "make pictures  the screenshots of the documentation, anew"
	@echo "make wheels    the wheel, installed and used in clean environments (1 to 4 minutes)"
	@echo "make clean     remove the virtual environments and caches"

$(RUNTIME): pyproject.toml constraints.txt
	@PYTHON=$(PYTHON) VENV=$(VENV) ./install.sh runtime
	@touch $@

$(INSTALLED): $(RUNTIME)
	@PYTHON=$(PYTHON) VENV=$(VENV) ./install.sh dev
	@touch $@

demo: $(RUNTIME)
	@$(BIN)/octavo demo
	@echo "next: source $(BIN)/activate && octavo up"

dev: $(INSTALLED)

# What some suites need beside the rest.
TOOLS_OF_SUITES := $(if $(filter monitoring,$(SUITES)),monitoring-tools) $(if $(filter page,$(SUITES)),browser)

# SUITES="tls docs": those too, in one run.
test: $(INSTALLED) $(TOOLS_OF_SUITES)
	$(BIN)/octavo model prepare smollm2
	ignored=$$($(SUITES_OF_TESTS) --ignore $(SUITES)) && $(PYTEST) -m $(QUICK) $$ignored

# SUITES="tls docs": some of those that `make test` leaves out (tests/suites.toml).
test-suites: $(INSTALLED) $(TOOLS_OF_SUITES)
	$(BIN)/octavo model prepare smollm2
	paths=$$($(SUITES_OF_TESTS) --paths $(SUITES)) && $(PYTEST) -m $(QUICK) $$paths

test-all: $(INSTALLED) monitoring-tools browser
	$(BIN)/octavo model prepare smollm2
	$(PYTEST) -m "not gpu"

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
	$(BIN)/python -m docs.tools.reference --check
	$(BIN)/python -m tests.packaging.resolve_check

# The quick part of the suite on every Python that pyproject.toml names, each with the packages that people get there (6 GB with
# CUDA). By hand and before releases; VERSIONS=3.13 tries one.
pythons: $(INSTALLED)
	$(BIN)/octavo model prepare smollm2
	$(BIN)/python -m tests.packaging.pythons $(VERSIONS)

# What strangers type, with the packages that the index has for everybody: each step takes up to 8 GB and a quarter of an hour.
# Before releases; STEPS="demo test" tries some.
strangers: $(INSTALLED)
	tests/packaging/strangers.sh $(or $(STEPS),demo scheduler executor newest oldest images test)

# What the package index gives others: every extra, on every Python and platform that README.md names. Needs the network.
resolve-check: $(INSTALLED)
	$(BIN)/python -m tests.packaging.resolve_check

# promtool, which the tests of alerts and metrics need.
monitoring-tools:
	tests/monitoring/fetch_promtool $(TOOLS)

# The browser that the tests of the live page drive.
browser: $(INSTALLED)
	tests/page/fetch_chromium $(BIN)/python

# The pictures of the documentation, from services at work; the last ones need the ports of `octavo up`.
pictures: $(INSTALLED) browser
	$(BIN)/octavo model prepare smollm2
	$(BIN)/python -m tests.page.screenshot
	$(BIN)/python -m tests.unit.octavo.top.figure
	$(BIN)/python -m tests.page.killed_executor

monitoring-check: $(INSTALLED) monitoring-tools
	$(BIN)/python -m pytest tests/monitoring

# The site; a warning is an error.
docs: $(INSTALLED)
	$(BIN)/python -m sphinx -W -n --keep-going -q docs docs/_build/html
	@echo "docs/_build/html/index.html"

# Settings, API and metrics, from the code; `make check` says when they are stale.
docs-reference: $(INSTALLED)
	$(BIN)/python -m docs.tools.reference

protos: $(INSTALLED)
	$(BIN)/buf format --write protos
	$(BIN)/python protos/generate.py

# The wire that later changes are compared with; renewed at each release.
baseline: $(INSTALLED)
	$(BIN)/buf build protos --exclude-source-info --output protos/baseline.binpb

# The code that the next release is tested beside (tests/skew); recorded on the commit of each release.
record-release: $(INSTALLED)
	$(BIN)/python -m tests.skew.record_release

bench: $(INSTALLED)
	$(BIN)/octavo model prepare smollm2
	$(BIN)/python -m benchmarks.end_to_end $(ARGS)

# The other engines, each in an environment of its own; PEERS=openvino installs one.
bench-peers: $(INSTALLED)
	$(BIN)/octavo model prepare smollm2
	$(BIN)/python -m benchmarks.end_to_end.peers $(PEERS)

# By hand, after a run that is to be quoted; tests compare the pages with the result.
bench-pages: $(INSTALLED)
	$(BIN)/python -m benchmarks.end_to_end.pages

models: $(INSTALLED)
	$(BIN)/python -m benchmarks.architectures

bench-core: $(INSTALLED)
	$(BIN)/octavo model prepare smollm2
	$(BIN)/python -m benchmarks.costs core fleet prefix gap step prefill
	$(BIN)/python -m benchmarks.costs stack --pairs 1 --only int8-a8

# Installs nothing: a machine with a GPU brings torch, Triton, transformers and pytest of its own. ARGS=--list shows the parts.
gpu-check:
	PYTHONPATH=.:shared $(PYTHON) -m benchmarks.gpu_check $(ARGS)

# By hand and before releases; a quarter of an hour. ARGS='--only swap' tries some, --list shows all.
mutants: $(INSTALLED) monitoring-tools
	$(BIN)/python -m tests.mutants $(ARGS)

# By hand and before releases; an hour and a half. ARGS='--only drain' runs some rows, --minutes 5 is shorter, --resume FILE goes on.
chaos: $(INSTALLED)
	$(BIN)/octavo model prepare smollm2
	$(BIN)/python -m tests.chaos $(ARGS)

coverage: $(INSTALLED)
	$(BIN)/coverage run --branch --source=scheduler_svc/core,scheduler_svc/request,shared -m pytest -q tests/unit tests/property tests/traces -m "not slow and not gpu"
	$(BIN)/coverage report --show-missing

# checkov pins what other packages need newer, so it has an environment of its own.
CHECKOV := .venv-checkov/bin/checkov
$(CHECKOV):
	$(PYTHON) -m venv .venv-checkov
	.venv-checkov/bin/python -m pip install --quiet 'checkov>=3.3,<4'

# What tests/k8s leaves out of the checks of the manifests.
checkov: $(INSTALLED) $(CHECKOV)
	$(BIN)/python -m tests.k8s.checkov_check $(CHECKOV)

k8s-check: $(INSTALLED) checkov
	$(BIN)/python -m pytest --quiet tests/k8s

# On a cluster: tests/cluster/run.sh says what it needs.
cluster-test: $(INSTALLED)
	$(BIN)/octavo model prepare smollm2
	tests/cluster/run.sh

images:
	images/build.sh

# Builds the wheel and installs it into environments of their own, outside the checkout.
wheels: $(INSTALLED)
	$(BIN)/octavo model prepare smollm2
	$(BIN)/python -m tests.packaging.check_wheels

clean:
	rm -rf $(VENV) .venv-python* .venv-bench .venv-checkov .venv-protos .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage docs/_build
