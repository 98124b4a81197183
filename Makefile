# `make demo` and `make test` need Python >= 3.10 and make; the rest they fetch into .venv.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lint types check format clean

demo: $(READY)
	$(BIN)/samestep run --nproc-per-node 2 examples/digits.py

test: lint types $(READY)
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist

$(READY): requirements.lock pyproject.toml setup.py src/samestep/comm/shm/_kernels.c
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "samestep needs Python 3.10 or newer, this is %s: make PYTHON=python3.12" % sys.version.split()[0])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@
