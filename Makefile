# Each target does its own set-up, in .venv. All that a machine needs is Python 3.10 or newer and make.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
ARGS ?=

.PHONY: demo test lint format setup clean

demo: setup  ## train a small language model on two processes: plain DDP beside PowerSGD
	$(BIN)/python examples/demo.py $(ARGS)

test: setup  ## make test ARGS="tests/core -x"
	$(BIN)/python -m pytest -n 2 $(ARGS)

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

setup: $(READY)

$(READY): pyproject.toml tests/constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or newer is needed, this is %d.%d; try make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c tests/constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist lightning_logs
