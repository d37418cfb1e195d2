# This needs only make, Python 3.11 and a network; everything else is installed into .venv.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CODE := common sampler generator learner relay sandbox_client launcher spo tests benchmarks examples

# Tests of processes mostly wait, so more of them run at once than there are cores; files keep their order.
PYTEST := $(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: help setup quickstart test test-fast test-slow test-all test-gpu test-compose fuzz lint up clean

help: ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'
	@echo
	@echo '  make quickstart ARGS="--generators 2 --seed 1"'
	@echo '  make test ARGS="tests/unit -k tracker"      # add -n 0 to run the tests one after the other'

setup: $(STAMP) ## Create .venv with the pinned dependencies and the project, unless it is up to date

$(STAMP): requirements/cpu.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "Python 3.11 is needed, for which requirements/cpu.lock pins packages; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $$(grep -E '^(packaging|setuptools|wheel)==' requirements/cpu.lock)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -r requirements/cpu.lock
	# If pip found torch's CUDA build instead of its CPU build, torch cannot be imported without these libraries.
	$(BIN)/python -c 'import torch' 2>/dev/null || { $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts \
		$$(grep '^torch==' requirements/cpu.lock) && $(BIN)/python -m pip uninstall --quiet --yes triton; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

quickstart: setup ## Train a tiny model to use a calculator, in a whole run on this machine, in minutes
	$(BIN)/spo quickstart $(ARGS)

test-fast: setup ## Run the tests that start no process, wait for no timer and take moments, with fewer examples, in less than a minute
	$(PYTEST) --numprocesses 2 --hypothesis-profile quick tests/unit -m "not integration" $(ARGS)

test: setup ## Run unit and integration tests and whole runs on real vLLM, DeepSpeed and Redis, in minutes
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: setup ## Run the tests that make test leaves out: more whole runs, and slow tests
	$(PYTEST) -m slow $(ARGS)

test-all: test test-slow ## Run all tests but test-gpu and test-compose

test-gpu: ## Measure on one GPU and on two, in at most ten minutes, with PYTHON's GPU packages; ARGS=--on-cpu tries what a CPU can
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m pytest tests/gpu -s -n 0 $(ARGS)

test-compose: setup ## Build the images and test whole runs in containers; needs a Docker engine with Compose
	@docker compose version >/dev/null && docker info >/dev/null || { echo "make test-compose: no Docker engine with Compose can be reached" >&2; exit 2; }
	$(BIN)/python -m pytest tests/compose $(ARGS)

fuzz: setup ## Give each reader of messages, rows and answers 100,000 almost valid inputs, in about 20 minutes
	$(BIN)/python -m tests.fuzz $(ARGS)

up: ## Run the quickstart's task in containers: build, make the secrets, docker compose up; needs only Docker
	docker compose build
	docker/make-secrets
	docker compose up $(ARGS)

lint: setup ## Check format, lint, types and import contracts
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports

clean: ## Remove .venv, caches and build products; runs are kept
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist *.egg-info
