# `make demo` and `make test` do all set-up themselves: a virtual environment in .venv, and what pyproject.toml names.
PYTHON ?= python3
BIN = .venv/bin
PIP = $(BIN)/pip --disable-pip-version-check --quiet
export OMP_NUM_THREADS = 1

.PHONY: demo test test-all test-frameworks lint bench clean

demo: .venv/installed
	$(BIN)/torchrun --standalone --nproc-per-node 2 examples/uneven_text.py

# On up to four cores; each has real ranks of its own, which its tests share.
test: .venv/installed lint
	$(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal

test-all: .venv/installed lint
	$(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal --long

# The examples for other frameworks, which are installed for it.
test-frameworks: .venv/installed
	$(PIP) install -c constraints.txt -e '.[frameworks]'
	$(BIN)/python -m pytest -q tests/test_examples.py -k with_

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed
	$(BIN)/python benchmarks/run.py

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache examples/out
