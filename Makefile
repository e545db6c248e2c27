# make run       the tour: one or two techniques of each topic, at quick sizes
# make run-all   every technique, at quick sizes; run-full at the sizes worth timing
# make report    docs/index.html, the chapter as one page, from results/; test-page tests it in a browser
# make test      the tests; on a GPU box they run on the GPU (PYTEST_ARGS= adds those marked slow)
# make studies   every lesson with its study, once, at the smallest sizes: they run
# make lint      ruff, check and format
# make test-oldest  kernels and the compiler topic, on the oldest torch and Triton that are supported
# make backends  torch.compile's backends that are not torch's own, really run; test-backends tests them
# make xla       the XLA topic in its own environment, which pins an older torch; test-xla tests it
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OLDEST_VENV ?= .venv-oldest
OLDEST_READY := $(OLDEST_VENV)/.ready
BACKENDS_VENV ?= .venv-backends
BACKENDS_READY := $(BACKENDS_VENV)/.ready
XLA_VENV ?= .venv-xla
XLA_READY := $(XLA_VENV)/.ready
TOPICS := torch_compiler_examples.py triton_examples.py triton_fp8_advanced.py triton_tma_blackwell.py
TOPICS += torch_distributed_examples.py torch_xla_examples.py
PYTEST_ARGS ?= -m "not slow"
GPU := $(shell nvidia-smi -L 2>/dev/null)
# One process for each core, also on a GPU: most of the time goes to compiling. What times comes after the others.
WORKERS ?= auto
# Without a GPU: Inductor asks g++ for each vector unit of this CPU, unless it is told that those it finds will do; its
# workers import torch, unless they are forked; threads spin while they wait for others that have no core, unless told.
FORKED = $(if $(filter Linux,$(shell uname)),TORCHINDUCTOR_WORKER_START=fork)
ON_CPU = $(if $(GPU),,TORCHINDUCTOR_VEC_ISA_OK=1 $(FORKED) OMP_WAIT_POLICY=passive)
# Threads of several processes would spin while they wait for one that has no core.
PYTEST = OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -n $(WORKERS)
SPREAD := $(if $(GPU),,--dist worksteal)

.PHONY: run run-all run-full report test test-page test-oldest studies lint setup backends test-backends xla \
    test-xla clean

# Each topic with these options, a record each, and the page of what they recorded, be it that they failed.
RUN := build/run
define RUN_TOPICS
@rm -rf $(RUN); mkdir -p $(RUN); status=0; \
for topic in $(TOPICS); do $(1) --json $(RUN)/$${topic%.py}.json || status=1; done; \
$(BIN)/python -m companion report $(RUN) -o $(RUN)/report.html || status=1; exit $$status
endef

run: $(READY)
	$(call RUN_TOPICS,$(ON_CPU) $(BIN)/python $$topic --tour --quick)

run-all: $(READY)
	$(call RUN_TOPICS,$(ON_CPU) $(BIN)/python $$topic --quick)

run-full: $(READY)
	$(call RUN_TOPICS,$(BIN)/python $$topic --full)

report: $(READY)
	$(BIN)/python -m companion report -o docs/index.html

test: $(READY)
	$(call PYTEST,$(VENV)) $(SPREAD) $(PYTEST_ARGS)
	$(if $(GPU),$(BIN)/python -m pytest -n 0 -m timed)

# In Chromium, which must be there, by playwright and with axe-core, which are put beside it.
AXE := build/page/node_modules/axe-core/axe.min.js
test-page: $(READY) $(AXE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "playwright>=1.40,<2"
	REQUIRE_BROWSER=1 $(BIN)/python -m pytest tests/companion/test_page_in_a_browser.py

$(AXE):
	npm install --silent --no-fund --no-audit --prefix build/page axe-core@4

# Two topics at a time where there is no GPU to share. PyTorch/XLA's are run by test-xla, in its environment.
STUDIED := $(filter-out torch_xla_examples.py,$(TOPICS))
studies: $(READY)
	@printf '%s\n' $(STUDIED) | $(ON_CPU) OMP_NUM_THREADS=1 xargs -I TOPIC -P $(if $(GPU),1,2) \
	    $(BIN)/python TOPIC --study --quick --check-only

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

setup: $(READY)

# The stamp is newer than what it was made from, so a second call does nothing.
$(READY): requirements.txt requirements-common.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $(READY)

# The text of the project and the tools that read records do not depend on torch.
OLDEST_TESTS := $(patsubst %,tests/examples/%,common compiler triton fp8 tma test_budgets.py test_wrappers.py)
OLDEST_TESTS += tests/harness tests/compile_inspect tests/test_compile_inspect.py tests/triton_compiler

test-oldest: $(OLDEST_READY)
	$(call PYTEST,$(OLDEST_VENV)) $(SPREAD) $(PYTEST_ARGS) $(OLDEST_TESTS)

$(OLDEST_READY): requirements-oldest.txt requirements-common.txt pyproject.toml
	test -x $(OLDEST_VENV)/bin/python || $(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-oldest.txt
	@touch $(OLDEST_READY)

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

# Each file in one process: XLA's programs live as long as the process, so a demo that runs in it a second time
# compiles nothing and the tests that count its compilations fail.
test-xla: $(XLA_READY)
	$(call PYTEST,$(XLA_VENV)) --dist loadfile $(PYTEST_ARGS) tests/examples/xla $(XLA_HARNESS)
	$(call PYTEST,$(XLA_VENV)) --dist loadfile $(PYTEST_ARGS) -k xla tests/harness/test_cli.py
	$(XLA_VENV)/bin/python -m pytest $(PYTEST_ARGS) -k xla- tests/test_house.py
	$(XLA_VENV)/bin/python torch_xla_examples.py --study --quick --check-only

# What of the harness this topic rests on, on the torch that it runs on.
XLA_HARNESS := $(patsubst %,tests/harness/test_%.py,faults process check bench settings)
XLA_HARNESS += $(patsubst %,tests/examples/common/test_%.py,transformer xla)

# This project asks for a newer torch than torch_xla works with: it is made importable and nothing more.
$(XLA_READY): requirements-xla.txt pyproject.toml
	test -x $(XLA_VENV)/bin/python || $(PYTHON) -m venv $(XLA_VENV)
	$(XLA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-xla.txt
	$(XLA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $(XLA_READY)

clean:
	rm -rf $(VENV) $(OLDEST_VENV) $(BACKENDS_VENV) $(XLA_VENV) .pytest_cache .ruff_cache .hypothesis *.egg-info
