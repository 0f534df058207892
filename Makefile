# make train        from nothing to a trained model and its samples
# make test         everything; make test-quick: what takes seconds
# make zoo          what the audit finds in scripts with bugs and without
# make lint         format, lint, types
# make docs         the site of docs/, in build/site; mkdocs-material gets an environment of its own
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NPROC ?= $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo auto || echo 2)

# A test of processes that the machine has disturbed is repeated once, and counted as a rerun in the last line.
PYTEST ?= --numprocesses 3 --dist load --maxschedchunk 1 --reruns 1

.PHONY: setup train test test-quick zoo lint format docs clean

setup: $(READY)

$(READY): constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(READY)

train: $(READY)
	$(BIN)/lockstep train dit --preset laptop --nproc $(NPROC) $(FLAGS)

test: $(READY)
	$(BIN)/python -m pytest $(PYTEST)

test-quick: $(READY)
	$(BIN)/python -m pytest $(PYTEST) -m "not slow"

zoo: $(READY)
	$(BIN)/python tests/audit/zoo.py

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: build/.docs-ready
	NO_MKDOCS_2_WARNING=1 build/docs-venv/bin/mkdocs build --clean --quiet

build/.docs-ready: pyproject.toml
	$(PYTHON) -m venv build/docs-venv
	build/docs-venv/bin/python -m pip install --quiet $$($(PYTHON) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache
