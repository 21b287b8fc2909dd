# `make` lists what there is. Needs GNU make, git and Python 3.11 or newer; everything else is installed
# into .venv, from requirements.lock, with its hashes checked.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TEST_WORKERS ?= 2

# The first interpreter that is new enough and starts: a version manager's shim may exist and refuse.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$p; break; fi; done)

.PHONY: help
help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.PHONY: install
install: $(INSTALLED) ## set up .venv; the other targets do it where needed

$(INSTALLED): pyproject.toml requirements.lock
	@python="$(PYTHON)"; \
	test -n "$$python" || { echo "aijobs needs Python 3.11 or newer; none was found (or: make PYTHON=…)" >&2; exit 1; }; \
	echo "Setting up $(VENV) with $$($$python --version)…" >&2; \
	$$python -m venv $(VENV)
	@$(BIN)/pip install -qq --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

.PHONY: demo
demo: $(INSTALLED) ## the main job on an English and a Chinese text, from nothing
	@exec $(BIN)/aijobs demo

.PHONY: run
run: $(INSTALLED) ## everything on this machine, until Ctrl-C
	@exec $(BIN)/aijobs up

.PHONY: test
test: $(INSTALLED) system-packages ## all tests but the long ones
	@exec $(BIN)/pytest -q -n $(TEST_WORKERS) --dist worksteal

.PHONY: test-long
test-long: $(INSTALLED) system-packages ## the long tests: chaos, replays, fuzzing
	@exec $(BIN)/pytest -q -n $(TEST_WORKERS) --dist worksteal -m long --timeout 1800

# Exit code 1 on a broken promise; a seed is one sequence of actions and faults.
DATABASE ?= sqlite
MINUTES ?= 1
.PHONY: chaos
chaos: $(INSTALLED) system-packages ## kill, freeze and cut off everything (DATABASE=sqlite|postgresql|mariadb SEED=n MINUTES=n)
	@exec $(BIN)/python -m tests.chaos --database $(DATABASE) --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

.PHONY: bench
bench: $(INSTALLED) system-packages ## kill, freeze and flush in mid-run, and calls to a server, with figures
	@$(BIN)/python -m bench.reliability
	@exec $(BIN)/python -m bench.providers

.PHONY: check
check: lint ## lint, types, tests
	@$(MAKE) test

.PHONY: lint
lint: $(INSTALLED) ## lint, format and types
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
