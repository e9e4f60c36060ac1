# Every target makes the environment it needs; on a fresh checkout the first one takes minutes,
# and says so. PYTHON only starts the bootstrap, which finds a newer one if this one is too old.
PYTHON ?= python3
VENV := .venv/bin
PY := $(VENV)/python
# Further arguments for pytest: make test ARGS="-k broker -x"
ARGS ?=
# What make chaos runs: so many seeds from the first on, each with so many requests.
SEED ?= 1
SEEDS ?= 1
REQUESTS ?= 1000

.DEFAULT_GOAL := help
.PHONY: help bootstrap demo test check test-all chaos bench format format-check lint types layers \
        constraints clean

help: ## show this
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

bootstrap: ## make or update .venv; quick when nothing changed
	@STREAMFLEET_MAKE_TARGET="$(firstword $(MAKECMDGOALS))" $(PYTHON) .ci/bootstrap.py

demo: bootstrap ## a broker, a worker and a real model on this machine, six answers at once
	@$(PY) $(VENV)/streamfleet demo

# Most of a test's time is waiting for processes and leases, so more of them than cores run at once; those of
# one file stay together, since they share what is slow to set up.
# Hundreds of processes begin meanwhile: what they compile is kept, even where the environment forbids that.
test test-all: export PYTHONDONTWRITEBYTECODE :=
test: bootstrap ## the tests, without the slow ones (under 5 minutes)
	@$(PY) -m pytest -n 4 --dist loadfile -m "not slow" $(ARGS)

# One recipe, so that the order holds under `make -j` too, and the cheap checks fail first.
check: bootstrap ## what the continuous integration runs: format, lint, types, layers, tests
	@$(MAKE) --no-print-directory format-check
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	@$(MAKE) --no-print-directory layers
	@$(MAKE) --no-print-directory test

test-all: bootstrap ## every test, the slow ones too
	@$(PY) -m pytest -n 3 --dist loadfile $(ARGS)

chaos: bootstrap ## break all there is under a fleet, judge every request (SEED=1 SEEDS=1 REQUESTS=1000)
	@$(PY) tests/chaos/run.py --seed $(SEED) --seeds $(SEEDS) --requests $(REQUESTS)

bench: bootstrap ## measure throughput and latency (an hour; first installs what to compare with, 5 GB)
	@$(PY) tests/bench/fleet.py
	@$(PY) tests/bench/fleet.py --aof
	@$(PY) tests/bench/cost.py
	@$(PY) tests/bench/fairness.py
	@$(PY) tests/bench/gateway.py
	@$(PY) tests/bench/generation.py --rounds 2
	@$(PY) tests/bench/generation.py --check --scale 0.5
	@$(PY) tests/bench/overhead.py
	@$(PY) tests/bench/one_shot.py
	@$(PY) tests/bench/precision.py
	@$(PY) tests/bench/gpu.py

format: bootstrap ## format the code and sort the imports
	@$(PY) -m ruff check --select I --fix --quiet .
	@$(PY) -m ruff format .

format-check: bootstrap
	@$(PY) -m ruff format --check .

lint: bootstrap ## look for likely bugs and missing docstrings
	@$(PY) -m ruff check .

types: bootstrap ## check the types
	@$(PY) -m mypy

layers: bootstrap ## check who may import whom
	@$(PY) $(VENV)/lint-imports --no-logo

constraints: bootstrap ## pin the versions that are installed now, for everybody's tests
	@$(PY) .ci/constraints.py

clean: ## remove .venv and what the tools left
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
