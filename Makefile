# `make demo` and `make test` do all set-up themselves: a virtual environment in .venv, and what pyproject.toml names.
PYTHON ?= python3
BIN = .venv/bin
PIP = $(BIN)/pip --disable-pip-version-check --quiet
export OMP_NUM_THREADS = 1
# The tests start many interpreters, which would otherwise compile the modules anew where the environment forbids to write them.
export PYTHONDONTWRITEBYTECODE =
PYTEST = -m pytest -q -n auto --maxprocesses 4 --dist worksteal

.PHONY: demo docs test test-docs test-all test-newest test-oldest test-frameworks types lint style bench gpu gpu-short clean

demo: .venv/installed
	$(BIN)/torchrun --standalone --nproc-per-node 2 examples/uneven_text.py

# On up to four workers; each has real ranks of its own, which its tests share. mypy runs beside them, and both must pass.
test: .venv/installed style
	$(BIN)/mypy & $(BIN)/python $(PYTEST); tests=$$?; wait $$! && exit $$tests

test-all: .venv/installed style
	$(BIN)/mypy & $(BIN)/python $(PYTEST) --long; tests=$$?; wait $$! && exit $$tests

# The two ends of the range of torch: the newest release that pip finds, and the least that pyproject.toml allows.
test-newest: .venv-newest/installed
	.venv-newest/bin/python $(PYTEST)

test-oldest: .venv-oldest/installed
	.venv-oldest/bin/python $(PYTEST)

.venv-newest/installed: TORCH = torch
.venv-oldest/installed: TORCH = $(shell sed -n 's/.*"torch>=\([0-9.]*\).*/torch==\1.*/p' pyproject.toml)
.venv-newest/installed .venv-oldest/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	grep -v '^torch==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/pip --disable-pip-version-check --quiet install '$(TORCH)'
	$(@D)/bin/pip --disable-pip-version-check --quiet install -c $(@D)/constraints.txt -e '.[test]'
	$(@D)/bin/python -c "import torch; print('torch', torch.__version__)"
	touch $@

# The examples for other frameworks, which are installed for it.
test-frameworks: .venv/installed
	$(PIP) install -c constraints.txt -e '.[frameworks]'
	$(BIN)/python -m pytest -q tests/test_examples.py -k with_

# The site, in build/site; it opens from disk.
docs: .venv/docs-installed
	$(BIN)/python -m sphinx -W --keep-going -q -j auto -c docs -b html . build/site
	@echo "open build/site/docs/index.html"

.venv/docs-installed: .venv/installed
	$(PIP) install -c constraints.txt -e '.[docs]'
	touch $@

# The built site in a headless Chromium, which must be installed, with its driver.
test-docs: docs
	$(BIN)/python -m pytest -q docs/test_site.py

# The public names have complete types, as pyright sees them; it takes its program from the npm registry.
types: .venv/installed
	$(PIP) install -c constraints.txt pyright
	$(BIN)/python -m pytest -q --long tests/test_installed.py -k types

lint: style
	$(BIN)/mypy

style: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# On a machine with a GPU, in at most 45 minutes: five parts, each of which writes its section of docs/gpu_report.md.
gpu: .venv/installed
	$(BIN)/python benchmarks/gpu_report.py

# In eight minutes: what breaks first, then the speed. PYTHON names one that has torch with CUDA and what pyproject.toml names.
gpu-short:
	$(PYTHON) benchmarks/gpu_report.py --parts short

bench: .venv/installed
	$(BIN)/python benchmarks/run.py

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf .venv .venv-newest .venv-oldest build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache examples/out
