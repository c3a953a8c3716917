# Needs Python >= 3.11 (PYTHON=python3.12 for another one), pip, git and make.
PYTHON ?= python3
VENV := .venv
# Inside which vLLM `make test-vllm` tests: a version, or `newest`, each in an environment of its own.
VLLM ?= 0.32.0
VLLM_VENV := .venv-vllm$(if $(filter-out 0.32.0,$(VLLM)),-$(VLLM))
BIN := $(VENV)/bin
SCALE ?= quick
# The files with tests that measure time; importing only these saves half a minute.
COST_TESTS = $(shell grep -rl --include='test_*.py' 'mark\.cost' tests)
# How long `make fuzz` searches, and where.
MINUTES ?= 5
SEED ?= 1
# How long `make soak` plays its clients.
SECONDS ?= 60
# Where this is set, every process compiles anew what it imports: pytest alone takes 6 s for that.
unexport PYTHONDONTWRITEBYTECODE
# uv does not read pip's configuration: hand it the folder of local wheels, if pip has one.
FIND_LINKS = $(shell for d in $$PIP_FIND_LINKS $$($(PYTHON) -m pip config get global.find-links 2>/dev/null); do \
	[ -d "$$d" ] && echo "$$d" && break; done)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-most lint check-types test-slow fuzz soak test-vllm test-vllm-part bench bench-simulator bench-accuracy arena robustness engines fidelity clean look-again

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(VENV)/.ready  ## Make .venv with everything that demo and test need

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "slosched needs Python >= 3.11; set PYTHON=python3.12, say"; exit 1; }
	@echo "setting up $(VENV): a minute or two"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(if $(FIND_LINKS),UV_FIND_LINKS="$(FIND_LINKS)") $(BIN)/uv pip install --python $(BIN)/python -e '.[dev]'
	@touch $@

demo: setup  ## Profile, fit, serve and replay a real model on this machine; leave a report
	$(BIN)/slosched demo --out runs/demo

# mypy uses one core and pytest waits now and then, so they run side by side.
test: setup lint $(VENV)/.compiled  ## Lint, types, and all tests but the slow ones
	@$(MAKE) --no-print-directory -j 2 check-types test-most
	$(BIN)/python -m pytest -m "cost and not slow" $(COST_TESTS) --benchmark-columns=min,median,max
	@if [ -e $(VLLM_VENV)/.ready ]; then $(MAKE) --no-print-directory test-vllm-part; \
	else echo "not run inside vLLM: make test-vllm sets up $(VLLM_VENV) and does"; fi

test-most: setup
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow and not cost"

# Else each of pytest's processes would compile torch anew, since all of them import it at once.
$(VENV)/.compiled: $(VENV)/.ready
	@$(BIN)/python -c "import matplotlib.figure, openai, ray, sklearn.ensemble, slosched.cli, slosched.engine.server, slosched.engine.torch"
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check-types: setup
	$(BIN)/mypy

test-slow: setup  ## The tests that `make test` leaves out
	$(BIN)/python -m pytest -m slow
	$(BIN)/python -m pytest -m "hypothesis and not slow and not cost" --hypothesis-profile=thorough

fuzz: setup  ## Look for new scenarios that break a law: make fuzz MINUTES=5 SEED=1
	$(BIN)/python tests/fuzz.py --minutes $(MINUTES) --seed $(SEED)

soak: setup  ## A server under bad clients of all kinds: make soak SECONDS=60 SEED=1
	PYTHONPATH=tests $(BIN)/python -m soak --seconds $(SECONDS) --seed $(SEED)

test-vllm: $(VLLM_VENV)/.ready  ## Inside real vLLM (VLLM=0.31.0, VLLM=newest: another), 3.5 GB
	$(VLLM_VENV)/bin/python -m pytest tests/inside_vllm

test-vllm-part: $(VLLM_VENV)/.ready  ## Of that what takes two minutes: start, refusals, lockstep
	$(VLLM_VENV)/bin/python -m pytest $(addprefix tests/inside_vllm/test_vllm_,start.py lockstep.py v1_lockstep.py)

$(VLLM_VENV)/.ready: pyproject.toml $(addprefix tests/inside_vllm/,set_up.py requirements.txt \
		building.txt overrides.txt) $(if $(filter newest,$(VLLM)),look-again)
	$(if $(FIND_LINKS),UV_FIND_LINKS="$(FIND_LINKS)") $(PYTHON) tests/inside_vllm/set_up.py $(VLLM) $(VLLM_VENV)
	@touch $@

look-again:

bench: setup  ## What a scheduling decision and a prediction cost
	$(BIN)/python -m pytest -m cost $(COST_TESTS) --benchmark-columns=min,median,max

bench-simulator: setup  ## How fast the simulator is, at mean batches of 16, 64 and 128
	$(BIN)/python benchmarks/simulator.py

bench-accuracy: setup  ## How right the latency model is, on every data set at hand
	$(BIN)/python -m benchmarks.latency_model --plot runs/vllm_runs.png

arena: setup  ## Compare all policies in all scenarios (SCALE=full takes a night); make docs/arena.md
	$(BIN)/python -m experiments.arena run --scale $(SCALE)

robustness: setup  ## Disturb every policy at its own knee (a quarter of an hour); make docs/robustness.md
	$(BIN)/python -m experiments.robustness run

engines: setup  ## Reproduce what is known of today's engines (some minutes); make docs/engines.md
	$(BIN)/python -m experiments.engines run

fidelity: setup  ## Simulate what real vLLM servers were measured at (ten minutes); make docs/fidelity.md
	$(BIN)/python -m experiments.fidelity run

clean:  ## Remove .venv and results
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
