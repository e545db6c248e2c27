# make run       the tour: every topic at quick sizes
# make run-full  every topic at the sizes worth timing
# make test      the tests; on a GPU box they run on the GPU (PYTEST_ARGS= adds those marked slow)
# make lint      ruff, check and format
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOPICS := triton_examples.py
PYTEST_ARGS ?= -m "not slow"
# One process for each core, unless there is a GPU, which one process at a time should have.
WORKERS ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo 0 || echo auto)

.PHONY: run run-full test lint setup clean

run: $(READY)
	@status=0; for topic in $(TOPICS); do $(BIN)/python $$topic --quick || status=1; done; exit $$status

run-full: $(READY)
	@status=0; for topic in $(TOPICS); do $(BIN)/python $$topic --full || status=1; done; exit $$status

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

setup: $(READY)

# The stamp is newer than what it was made from, so a second call does nothing.
$(READY): requirements.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis *.egg-info
