PYTHON ?= python3
BIN = .venv/bin
PIP = $(BIN)/python -m pip install --quiet --constraint constraints.txt
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: setup demo test test-slow lint format clean

setup: .venv/dev  ## .venv with everything that development and the tests need

SOURCES := $(shell find sparrow -name "*.cpp" -o -name "*.h")

# Two stamps: .venv/ready has what the demo needs (torch, the compiled kernels, the command line, pictures),
# .venv/dev adds the tests' and linters' packages. The package is installed once, editable, by the first.
.venv/ready: pyproject.toml constraints.txt setup.py $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Sparrow needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(PIP) torch numpy 'setuptools>=77' ninja
	$(PIP) --no-build-isolation --editable '.[cli,pictures]'
	@touch $@

.venv/dev: .venv/ready
	$(PIP) 'sparrow-rec[dev]'
	@touch $@

demo: .venv/ready  ## generate a log with a known answer, prepare it, train on it, read the result against the limit
	$(BIN)/sparrow generate data/demo.parquet --rows 1000000 --overwrite
	$(BIN)/sparrow prepare data/demo.parquet --out data/demo --overwrite
	$(BIN)/sparrow train recipes/demo.toml --overwrite
	$(BIN)/sparrow evaluate runs/demo --split test

test: setup lint  ## lint, layers, types, quick tests, a process a core
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder

test-slow: setup
	$(BIN)/pytest -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(SOURCES)
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy
	$(BIN)/python lint/budgets.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(SOURCES)

clean:
	rm -rf .venv build *.egg-info sparrow/kernels/_cpp*.so
