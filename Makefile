# Everything one needs, on a machine that has only Python (3.10 or newer) and make.
# Each target makes .venv and installs pinned versions the first time; a stamp makes the next times quick.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# setuptools is pinned too and builds without isolation: nothing unpinned is fetched, nothing twice.
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
INPUTS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test bench lint types clean

help: ## say what there is
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

demo: $(VENV)/.installed ## Stoker beside stock torch on this machine, in about a minute
	$(BIN)/stoker demo

test: lint types ## lint, format, types and the whole test suite
	$(BIN)/python -m pytest -n 2 --dist worksteal

bench: $(VENV)/.installed-bench ## every benchmark, peers side by side
	$(BIN)/python -m benchmarks

lint: $(VENV)/.installed-test ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test ## mypy --strict on src
	$(BIN)/mypy --strict

clean: ## remove .venv, caches and build output
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "Stoker needs Python 3.10 or newer; say which one: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# | : the interpreter must exist, but its date says nothing about what is installed.
$(VENV)/.installed: $(INPUTS) | $(BIN)/python
	$(PIP) setuptools
	$(PIP) --no-build-isolation --editable .
	@touch $@

$(VENV)/.installed-test: $(INPUTS) $(VENV)/.installed
	$(PIP) --no-compile --no-build-isolation --editable '.[test,frameworks]'
	@touch $@

$(VENV)/.installed-bench: $(INPUTS) $(VENV)/.installed
	$(PIP) --no-build-isolation --editable '.[bench]'
	@touch $@
