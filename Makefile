# `make demo` and `make test` do all set-up by themselves: Python 3.11 or newer, make and git.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help venv demo test check format bench faults hostile deployments clean

help:
	@echo "make demo    compare seven algorithms on 8x8 digits (about a minute after set-up)"
	@echo "make test    run the tests"
	@echo "make check   ruff and mypy --strict"
	@echo "make faults  kill -9 at 1000 random moments, resume each"
	@echo "make hostile 2,000 hostile updates on each algorithm"
	@echo "make deployments  Flower: nodes and SuperLinks that are killed, strangers, a stock app"
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

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: venv
	$(BIN)/python bench/step.py

faults: venv
	$(BIN)/python tests/faults/kill.py --trials 1000

hostile: venv
	PREFED_HOSTILE=2000 $(BIN)/python -m pytest -n 2 tests/test_hostile.py

deployments: venv
	PREFED_SLOW=1 $(BIN)/python -m pytest tests/test_deploy.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
