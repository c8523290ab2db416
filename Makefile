# make demo   trains LEViT on scikit-learn's digits and prints what it learned
# make test   runs every check of a change; make test-full adds the slow ones
# make bench  times the ops; make clean removes what all of these made, except runs/
# Each installs what it needs into .venv first. Needs make, Python >= 3.10 (choose with PYTHON=...), better a C++ compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest -q --durations=10
BUILD_INPUTS := pyproject.toml setup.py Makefile $(shell find build_backend csrc -name '*.py' -o -name '*.cpp' -o -name '*.h' -o -name '*.cu*')

.DELETE_ON_ERROR:
.PHONY: demo test test-full bench install clean

demo: $(INSTALLED)
	$(BIN)/levit train digits --seed 0

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) --timeout=300

test-full: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) --timeout=3600 -m "full or not full"

bench: $(INSTALLED)
	$(BIN)/python -m pytest bench --benchmark-only

install: $(INSTALLED)

# Every step may find the remains of an interrupted one. pip writes RECORD last: a distribution without it is only half
# there, though pip would take it for installed. torch comes first, so that the build finds it instead of getting its own.
$(INSTALLED): $(BUILD_INPUTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "levit-kernels needs Python 3.10 or newer, " \
	    "$(PYTHON) is " + sys.version.split()[0] + "; choose another: make PYTHON=python3.12 ...")'
	@for info in $(VENV)/lib/python*/site-packages/*.dist-info; do \
	    [ ! -d "$$info" ] || [ -f "$$info/RECORD" ] || rm -r "$$info"; done
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) install "setuptools>=77" torch
	$(PIP) install --no-build-isolation -e ".[test,bench]"
	@$(BIN)/python -c 'from levit_kernels import native; print("levit-kernels:", native.available()[1])'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .benchmarks
	rm -f levit_kernels/_C.abi3.so levit_kernels/_cuda.so levit_kernels/_build_info.json
	find . -name __pycache__ -not -path './.git/*' -exec rm -rf {} +
