# make bench   set up and run the main job on whatever this machine has: without a GPU, the samplers
#              that run on CPUs
# make record  measure anew what results/ holds of a GPU; RECORD="--minutes 9 --only paper,lean"
#              is for tools/record.py
# make test    set up and pass the tests that one runs all day: minutes, no GPU
# CONTRIBUTING.md tells the others.
VENV ?= .venv
PYTHON ?= python3
FSBENCH = $(VENV)/bin/fsbench
PYTEST = $(VENV)/bin/python -m pytest

# On a machine with an NVIDIA driver also what the GPU samplers and timers need, in the versions that
# records are made with.
comma := ,
EXTRAS := $(if $(shell command -v nvidia-smi),dev$(comma)gpu$(comma)record,dev)
# Installed first, so that no dependency picks another: without a GPU, the version that CI tests.
TORCH := $(if $(shell command -v nvidia-smi),torch>=2.11,torch==2.13.0)

.PHONY: setup bench record test test-all test-rest test-gpu verify lint format plots docs check-engines clean

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml setup.py $(wildcard fsbench/simple/csrc/*)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q "$(TORCH)"
	$(VENV)/bin/pip install -q -e ".[$(EXTRAS)]"
	touch $@

bench: setup
	$(FSBENCH) run

record: setup
	PATH="$(abspath $(VENV)/bin):$$PATH" $(VENV)/bin/python tools/record.py $(RECORD)

# One thread per process: there is a worker for every core already.
ON_CPU = OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(PYTEST) -n auto --dist worksteal

# T=tests/kernels/noise: the tests of one folder or file, the slow ones included.
test: setup
	$(ON_CPU) -m "not gpu$(if $(T),, and not full)" $(T)

test-all: setup
	$(ON_CPU) -m "not gpu"

# What test-all adds to test.
test-rest: setup
	$(ON_CPU) -m "full and not gpu"

# PART=kernels, samplers or alone: one part of the GPU tests.
test-gpu: setup
	$(VENV)/bin/python tools/gpu_tests.py $(PART)

verify: setup
	$(FSBENCH) verify

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# What is left of lint's complaints, lint reports.
format: setup
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .

# The run given last is drawn where two have measured a cell; a ratio is always of one run.
RUNS = $(foreach run,$(1),$(wildcard results/h200/$(run)-20*))

plots: setup
	rm -f plots/*.png plots/*/*.png
	$(FSBENCH) plot $(call RUNS,lean-d8192 lean-d8192-large lean paper) --figure runtime,bandwidth,breakdown,speedup --out plots
	$(FSBENCH) plot $(call RUNS,lean lean-d8192 lean-d8192-large screened-d4096 screened-d8192 called) $(foreach d,4096 8192,$(addsuffix /plain_d$(d),$(call RUNS,rivals))) --figure headline --out plots
	$(FSBENCH) plot $(addprefix results/h200/,sweep-20261123 boxes-20261123 sweep-20261125) $(wildcard results/h100/sweep-2*) --figure headline --out plots/sweep
	$(FSBENCH) plot $(addsuffix /default_d4096,$(call RUNS,rivals)) --figure runtime --out plots/released
	$(FSBENCH) plot $(call RUNS,models paper lean lean-d8192 lean-d8192-large called) --figure winner --out plots
	$(FSBENCH) plot $(call RUNS,store) --figure logits_store --out plots
	$(FSBENCH) plot $(call RUNS,tp) --figure scaling --out plots
	$(FSBENCH) plot $(call RUNS,profile) --figure costs --out plots
	$(FSBENCH) plot $(call RUNS,truncated-grid) --figure filters --out plots
	$(FSBENCH) plot $(call RUNS,e2e-vllm-qwen3-8b) --out plots

# Tables and numbers of README.md and docs/, from results/ and the code (tools/pages).
docs: setup
	PYTHONPATH=tools $(VENV)/bin/python -m pages

# The vLLM plug-in's adapters against the source of each vLLM (300 MB each, once),
# rivals against the sources of their packages, and what the adapters do against vLLM's own kernels
# in the interpreter.
check-engines: setup
	$(VENV)/bin/python tools/check_engines.py
	$(ON_CPU) tests/fsbench/integrations/test_real_kernels.py tests/baselines/test_real_vllm.py

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache
