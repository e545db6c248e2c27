# make run       the tour: every topic at quick sizes
# make run-full  every topic at the sizes worth timing
# make test      the tests; on a GPU box they run on the GPU (PYTEST_ARGS= adds those marked slow)
# make lint      ruff, check and format
# make backends  torch.compile's backends that are not torch's own, really run; test-backends tests them
# make xla       the XLA topic in its own environment, which pins an older torch; test-xla tests it
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BACKENDS_VENV ?= .venv-backends
BACKENDS_READY := $(BACKENDS_VENV)/.ready
XLA_VENV ?= .venv-xla
XLA_READY := $(XLA_VENV)/.ready
TOPICS := torch_compiler_examples.py triton_examples.py triton_fp8_advanced.py triton_tma_blackwell.py torch_xla_examples.py
PYTEST_ARGS ?= -m "not slow"
# One process for each core, unless there is a GPU, which one process at a time should have.
WORKERS ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo 0 || echo auto)
# Without a GPU the Triton topics time nothing: at the lowest priority they take what the others leave of the cores.
BESIDE = $(if $(filter auto,$(WORKERS)),$(filter triton_%,$(TOPICS)))
# They end sooner than the compiler's: this technique of that topic comes after them, so that no core waits.
COMPILER := torch_compiler_examples.py
LATE = $(if $(and $(BESIDE),$(filter $(COMPILER),$(TOPICS))),caching)
EARLY = $(filter-out $(LATE),$(shell sed -n 's|.*examples/compiler/\(.*\)\.py.*|\1|p' $(COMPILER)))
# Without a GPU: Inductor asks g++ for each vector unit of this CPU, unless it is told that those it finds will do; its
# workers import torch, unless they are forked; threads spin while they wait for others that have no core, unless told.
FORKED = $(if $(filter Linux,$(shell uname)),TORCHINDUCTOR_WORKER_START=fork)
ON_CPU = $(if $(filter auto,$(WORKERS)),TORCHINDUCTOR_VEC_ISA_OK=1 $(FORKED) OMP_WAIT_POLICY=passive)
# In processes that each start a thread for every core, the threads spin while they wait for one that does not run.
PYTEST = $(if $(filter auto,$(WORKERS)),OMP_NUM_THREADS=1) $(1)/bin/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: run run-full test lint setup backends test-backends xla test-xla clean

run: $(READY)
	@status=0; beside=; said=$$(mktemp -d) || exit 1; \
	trap 'kill $$beside 2>/dev/null; rm -rf "$$said"' EXIT; trap 'exit 130' INT TERM; \
	if [ -n "$(BESIDE)" ]; then \
	    echo "meanwhile, at the lowest priority: $(BESIDE)$(if $(LATE), (and then $(LATE))); what they say comes at the end"; \
	    ( one=; trap 'kill $$one 2>/dev/null; exit 130' INT TERM; bad=0; for topic in $(BESIDE); do \
	        $(ON_CPU) OMP_NUM_THREADS=1 nice -n 19 $(BIN)/python $$topic --quick >"$$said/$$topic" 2>&1 & one=$$!; \
	        wait $$one || bad=1; \
	    done; \
	    if [ -n "$(LATE)" ]; then \
	        $(ON_CPU) $(BIN)/python $(COMPILER) $(LATE) --quick >"$$said/late" 2>&1 & one=$$!; wait $$one || bad=1; \
	    fi; exit $$bad ) & beside=$$!; \
	fi; \
	for topic in $(filter-out $(BESIDE),$(TOPICS)); do \
	    names=; if [ -n "$(LATE)" ] && [ $$topic = $(COMPILER) ]; then names="$(EARLY)"; fi; \
	    $(ON_CPU) $(BIN)/python $$topic $$names --quick || status=1; \
	done; \
	if [ -n "$$beside" ]; then wait $$beside || status=1; fi; \
	cat $(if $(LATE),"$$said/late") $(foreach topic,$(BESIDE),"$$said/$(topic)") </dev/null; \
	exit $$status

run-full: $(READY)
	@status=0; for topic in $(TOPICS); do $(BIN)/python $$topic --full || status=1; done; exit $$status

test: $(READY)
	$(call PYTEST,$(VENV)) $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

setup: $(READY)

# The stamp is newer than what it was made from, so a second call does nothing.
$(READY): requirements.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $(READY)

# Runtimes that pin a protobuf, a numpy and a torch of their own: an environment of their own.
backends: $(BACKENDS_READY)
	$(BACKENDS_VENV)/bin/python examples/compiler/backends.py

test-backends: $(BACKENDS_READY)
	TEST_EVERY_BACKEND=1 $(BACKENDS_VENV)/bin/python -m pytest tests/examples/compiler/test_backends.py

$(BACKENDS_READY): requirements-backends.txt pyproject.toml
	test -x $(BACKENDS_VENV)/bin/python || $(PYTHON) -m venv $(BACKENDS_VENV)
	$(BACKENDS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-backends.txt
	@touch $(BACKENDS_READY)

xla: $(XLA_READY)
	$(XLA_VENV)/bin/python torch_xla_examples.py

test-xla: $(XLA_READY)
	$(call PYTEST,$(XLA_VENV)) $(PYTEST_ARGS) tests/examples/xla $(XLA_HARNESS)
	$(call PYTEST,$(XLA_VENV)) $(PYTEST_ARGS) -k xla tests/harness/test_cli.py

# What of the harness this topic rests on, on the torch that it runs on.
XLA_HARNESS := $(patsubst %,tests/harness/test_%.py,xla faults process check compare settings transformer)

# This project asks for a newer torch than torch_xla works with: it is made importable and nothing more.
$(XLA_READY): requirements-xla.txt pyproject.toml
	test -x $(XLA_VENV)/bin/python || $(PYTHON) -m venv $(XLA_VENV)
	$(XLA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-xla.txt
	$(XLA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $(XLA_READY)

clean:
	rm -rf $(VENV) $(BACKENDS_VENV) $(XLA_VENV) .pytest_cache .ruff_cache .hypothesis *.egg-info
