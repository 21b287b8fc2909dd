# `make` lists what there is. Needs GNU make, git and Python 3.11 or newer; everything else is installed
# into .venv, from requirements.lock, with its hashes checked.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
# Twice as many as the smallest machine has processors: many tests wait for other processes.
TEST_WORKERS ?= 4
# The tests start some hundred Python processes, and each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

# Empty: the interpreter that .venv has, or the first that is new enough.
PYTHON ?=

.PHONY: help
help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.PHONY: install
install: ## set up .venv (PYTHON=python3.12: with that one); the other targets do it where needed
	@tests/support/set_up.sh "$(VENV)" "$(PYTHON)"

.PHONY: demo
demo: install ## the main job on an English and a Chinese text, from nothing
	@exec $(BIN)/aijobs demo

.PHONY: run
run: install ## everything on this machine, until Ctrl-C
	@exec $(BIN)/aijobs up

.PHONY: test
test: install system-packages ## all tests but the long ones
	@exec $(BIN)/pytest -q -n $(TEST_WORKERS) --dist worksteal

.PHONY: test-long
test-long: install system-packages ## the long tests: chaos, replays, fuzzing
	@exec $(BIN)/pytest -q -n $(TEST_WORKERS) --dist worksteal -m long --timeout 1800

# Exit code 1 on a broken promise; a seed is one sequence of actions and faults.
DATABASE ?= sqlite
MINUTES ?= 1
.PHONY: chaos
chaos: install system-packages ## kill, freeze and cut off everything (DATABASE=sqlite|postgresql|mariadb SEED=n MINUTES=n)
	@exec $(BIN)/python -m tests.chaos --database $(DATABASE) --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

.PHONY: bench
bench: install system-packages ## kill, freeze and flush in mid-run, creates beside prune, and calls to a server, with figures
	@$(BIN)/python -m bench.reliability
	@$(BIN)/python -m bench.prune_pace
	@exec $(BIN)/python -m bench.providers

.PHONY: check
check: lint ## lint, types, tests
	@$(MAKE) test

.PHONY: lint
lint: install ## lint, format and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

# What the tests need and Python packages don't carry: MariaDB, Chromium, a Chinese font.
.PHONY: system-packages
system-packages:
	@tests/support/system_packages.sh

.PHONY: lock
lock: ## write requirements.lock anew from pyproject.toml (needs uv)
	@uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-emit-find-links --no-emit-package aijobs --no-annotate --no-config \
		--custom-compile-command "make lock" --quiet --output-file requirements.lock

.PHONY: clean
clean: ## remove what was built here; instance/ stays
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
