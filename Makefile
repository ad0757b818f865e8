# `make demo` and `make test` do all set-up by themselves: Python 3.11 or newer, make and git.
# The demo installs what the package needs to run; the rest comes with `make venv`,
# on which tests, linters and documentation depend.
# torch comes by pip, which finds the build for CPUs where one is at hand; if uv is there it brings the
# rest, and is never asked for torch.
# LOCKED=1 takes no file but those whose SHA-256 is in requirements.lock, torch excepted.
# AUDIT_DB=FILE lets `make check` audit without a network (scripts/advisories.py).
PYTHON ?= python3
UV ?= $(shell command -v uv 2> /dev/null)
VENV := .venv
BIN := $(VENV)/bin
READY_RUN := $(VENV)/.ready-run
READY := $(VENV)/.ready
SEVEN := fedavg,fedadagrad,fedadam,fedyogi,adaalter,prefed,prefedopt
STUDIES := digits-noniid digits-autoencoder synthetic upload-digits cifar10-noniid cifar10-iid upload-cifar10 shakespeare cifar10-autoencoder cifar10-vit shakespeare-gpt shakespeare-lora

# Compiled modules are kept: tests start many processes.
unexport PYTHONDONTWRITEBYTECODE
TABLES := mcmahan-2nn mcmahan-cnn niid-bench-mnist niid-bench-fashion niid-bench-cifar10 fedprox-synthetic logistic-digits paper-cifar10 fedmuon-fashion

.PHONY: help venv demo test test-fast test-all check format docs bench bench-peers study tables faults protections hostile deployments release clean

help:
	@echo "make demo    compare seven algorithms on 8x8 digits (about a minute after set-up)"
	@echo "make test    run the tests (about eight minutes on two cores)"
	@echo "make test-fast  a part that starts no process (about a minute)"
	@echo "make test-all   all of them: every fault, every protection, real deployments (hours)"
	@echo "make check   ruff, mypy --strict, the layers of the package, known holes in dependencies"
	@echo "             (AUDIT_DB=FILE: those that an export of the OSV database knows)"
	@echo "make docs    the documentation site, into build/docs"
	@echo "make venv    .venv with all that tests, linters and documentation need"
	@echo "make format  let ruff mend and format the source"
	@echo "make faults  kill, damage, fill, stop and fuzz: one table of what was lost (half an hour)"
	@echo "make protections  take each protection out and see the fault suite notice"
	@echo "make hostile 2,000 hostile updates on each algorithm"
	@echo "make deployments  Flower: nodes and SuperLinks that are killed, strangers, a stock app"
	@echo "make bench   this machine: a PreFed step against torch's Adam, rounds against bare loops,"
	@echo "             a thousand to a million clients, two ranks against one, codecs"
	@echo "make bench-peers  prefed against pfl, Flower and fedjax, each in an environment and a network"
	@echo "             of its own"
	@echo "make study   the results of docs/results.md: half an hour for each study at most, and the"
	@echo "             same command goes on; make study-NAME runs one of: $(STUDIES)"
	@echo "make tables  the printed tables of docs/tables.md: half an hour for each at most, and the same"
	@echo "             command goes on; make table-NAME runs one of: $(TABLES)"
	@echo "make release  sdist, wheel, bill of materials (CycloneDX) and checksums, into dist"
	@echo "make LOCKED=1 ...  set up from requirements.lock: each file is checked by its SHA-256"
	@echo "make clean   remove .venv and all that was built"

venv: $(READY)

$(READY_RUN): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "prefed needs Python 3.11 or newer; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
ifdef LOCKED
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip check
else
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
ifneq ($(UV),)
	$(BIN)/python scripts/without_torch.py > $(VENV)/without-torch.txt
	$(UV) pip install --quiet --python $(BIN)/python --constraint constraints.txt --requirement $(VENV)/without-torch.txt
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --editable .
else
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
endif
endif
	@touch $(READY_RUN)

$(READY): $(READY_RUN)
ifndef LOCKED
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test,docs]"
endif
	@touch $(READY)

demo: $(READY_RUN)
	$(BIN)/prefed compare digits-noniid --algorithms $(SEVEN) --seeds 3

test: venv
	$(BIN)/python -m pytest -n 3 --dist worksteal

test-fast: venv
	$(BIN)/python -m pytest -n 2 --dist worksteal --fast

test-all: venv
	$(BIN)/python -m pytest -n 2 -m ""

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src/prefed tests
	$(BIN)/lint-imports --no-cache > /dev/null || $(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/audit.py $(if $(AUDIT_DB),--database "$(AUDIT_DB)")

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: venv
	$(BIN)/python -m sphinx -W --keep-going -q docs build/docs

bench: venv
	$(BIN)/python bench/step.py
	$(BIN)/prefed bench
	$(BIN)/python bench/scale.py
	$(BIN)/python bench/clients.py
	$(BIN)/python bench/ranks.py
	$(BIN)/python bench/codecs.py
	$(BIN)/python bench/convolutions.py

bench-peers: venv
	$(BIN)/python bench/peers/run.py

study: $(STUDIES:%=study-%)

study-%: venv
	$(BIN)/prefed study $* --out docs/results --minutes 30

tables: $(TABLES:%=table-%)

table-%: venv
	$(BIN)/prefed table $* --out docs/results/tables --minutes 30

faults: venv
	$(BIN)/python -m tests.faults

protections: venv
	$(BIN)/python -m tests.faults.protections

hostile: venv
	$(BIN)/python -m pytest -n 2 -m "" tests/training/test_hostile_updates.py

deployments: venv
	$(BIN)/python -m pytest -m "" tests/flower/test_deploy.py tests/flower/test_secure_deploy.py

release: venv
	$(BIN)/python scripts/release.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
