PYTHON ?= python3
BIN = .venv/bin
PIP = $(BIN)/python -m pip install --quiet --constraint constraints.txt
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: setup demo test test-slow test-random evidence mutants dist docs lint format clean

# What setup.py leaves where the kernels did not compile. The stamps are not made then, so that make tries again.
WHY_NOT = sparrow/kernels/_not_built.txt
SAY_WHY_NOT = @! test -e $(WHY_NOT) || echo "The kernels are NOT compiled ($$(cat $(WHY_NOT)))." \
  "Sparrow works on the slower reference. Mend the compiler (CXX) and run make $(MAKECMDGOALS) again."

setup: .venv/dev  ## .venv with everything that development and the tests need
	$(SAY_WHY_NOT)

SOURCES := $(shell find sparrow -name "*.cpp" -o -name "*.h")

# Two stamps: .venv/ready has what the demo needs (torch, the compiled kernels, the command line, pictures),
# .venv/dev adds the tests' and linters' packages. The package is installed once, editable, by the first.
.venv/ready: pyproject.toml constraints.txt setup.py $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Sparrow needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(PIP) torch numpy 'setuptools>=77' ninja
	$(PIP) --no-build-isolation --editable '.[cli,pictures]'
	@test -e $(WHY_NOT) || touch $@

.venv/dev: .venv/ready
	$(PIP) 'sparrow-rec[dev]'
	@touch $@

demo: .venv/ready  ## generate a log with a known answer, prepare it, train on it, read the result against the limit
	$(BIN)/sparrow generate data/demo.parquet --rows 1000000 --overwrite
	$(BIN)/sparrow prepare data/demo.parquet --out data/demo --overwrite
	$(BIN)/sparrow train recipes/demo.toml --overwrite
	$(BIN)/sparrow evaluate runs/demo --split test
	$(SAY_WHY_NOT)

test: setup lint docs  ## lint, layers, types, the site's links, quick tests, a process a core
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder

test-slow: setup
	$(BIN)/pytest -m slow --timeout 7200

SEED ?= 1
BUSY ?= 0

test-random: setup  ## the quick tests in an order that SEED decides, beside BUSY endless loops
	@loops=; for i in $$(seq $(BUSY)); do (while :; do :; done) & loops="$$loops $$!"; done; \
	  $(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder --random-order --random-order-seed=$(SEED); \
	  status=$$?; test -z "$$loops" || kill $$loops; exit $$status

evidence: setup  ## every benchmark's quick form, and notes/evidence.md: two hours, goes on where it was stopped
	$(BIN)/python benchmarks/evidence.py

mutants: setup  ## which of 400 small faults in the library no test notices: two hours, goes on where it was stopped
	$(PIP) 'sparrow-rec[mutants]'
	$(BIN)/python lint/mutants.py

dist: setup  ## dist/: the sdist, and one wheel for every Python on Linux (auditwheel names the oldest system)
	$(PIP) 'sparrow-rec[dist]'
	rm -rf dist build/dist
	$(BIN)/python -m build --no-isolation --outdir build/dist .
	$(BIN)/auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --wheel-dir dist build/dist/*.whl
	mv build/dist/*.tar.gz dist

docs: setup  ## the site of the documents, build/site/index.html; a broken link is an error
	$(BIN)/python docs/build_site.py

# The errors that a rename leaves behind in a program which no type checker holds to more.
RENAMES = attr-defined|call-arg|call-overload|name-defined|operator|union-attr

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(SOURCES)
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy
	MYPYPATH=benchmarks:benchmarks/cluster $(BIN)/mypy --explicit-package-bases benchmarks \
	  | { ! grep -E "error: .*\[($(RENAMES))\]$$|error: [^[]*$$"; }
	$(BIN)/python lint/budgets.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/python lint/rewrap.py $$(git ls-files '*.py')
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(SOURCES)

clean:
	rm -rf .venv build *.egg-info sparrow/kernels/_cpp*.so $(WHY_NOT)
