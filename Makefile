# `make demo` and `make test` do all set-up by themselves: Python 3.11 or newer, make and git.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help venv demo test check format bench faults protections clean

help:
	@echo "make demo    compare seven algorithms on 8x8 digits (about a minute after set-up)"
	@echo "make test    run the tests"
	@echo "make check   ruff, mypy --strict, and known holes in dependencies"
	@echo "make faults  kill, damage, fill, stop and fuzz: one table of what was lost (30 minutes)"
	@echo "make protections  take each protection out and see the fault suite notice"
	@echo "make bench   the cost of a PreFed step against torch's fused Adam"

venv: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "prefed needs Python 3.11 or newer; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	@touch $(READY)

demo: venv
	$(BIN)/prefed compare digits-noniid --seeds 3

test: venv
	$(BIN)/python -m pytest -n 2

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src/prefed tests
	$(BIN)/python scripts/audit.py

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: venv
	$(BIN)/python bench/step.py

faults: venv
	$(BIN)/python -m tests.faults

protections: venv
	$(BIN)/python -m tests.faults.protections

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
