# make bench   install into .venv and run the benchmark: on the GPU if there is one, else the
#              samplers that run on CPUs
# make test    install into .venv and run the quick tests: a few minutes, no GPU needed
# make record  repeat the measurements of results/ on a GPU; RECORD="--minutes 9 --only paper,lean"
#              passes options to tools/record.py
# CONTRIBUTING.md lists the other targets.
VENV ?= .venv
PYTHON ?= python3
FSBENCH = $(VENV)/bin/fsbench
PYTEST = $(VENV)/bin/python -m pytest

# A machine with an NVIDIA driver also gets the packages of the GPU samplers and timers, in the
# versions that the committed records were made with.
comma := ,
EXTRAS ?= $(if $(shell command -v nvidia-smi),dev$(comma)gpu$(comma)record,dev)
# torch is installed first, so that no dependency selects another version. Without a GPU it is the
# version that CI tests.
TORCH := $(if $(shell command -v nvidia-smi),torch>=2.11,torch==2.13.0)

.PHONY: setup oldest-triton bench record test test-all test-gpu verify lint format plots docs site check-engines clean

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml setup.py $(wildcard fsbench/simple/csrc/*)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q "$(TORCH)"
	$(VENV)/bin/pip install -q -e ".[$(EXTRAS)]"
	touch $@

# Another Triton next to the installed one. Tests compile the kernels with both.
OLDEST = 3.6.0
OLDEST_TRITON = $(VENV)/triton-$(OLDEST)

oldest-triton: $(OLDEST_TRITON)

$(OLDEST_TRITON): | $(VENV)/ready
	rm -rf $@.partial
	$(VENV)/bin/pip install -q --no-deps --target $@.partial triton==$(OLDEST)
	mv $@.partial $@

bench: setup
	$(FSBENCH) run

record: setup
	PATH="$(abspath $(VENV)/bin):$$PATH" $(VENV)/bin/python tools/record.py $(RECORD)

$(if $(T),test) test-all: $(OLDEST_TRITON)

# One worker more than cores, because some tests wait for processes; one thread for each.
WORKERS := $(shell expr $$(nproc) + 1)
ON_CPU = OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(PYTEST) -n $(WORKERS) --dist worksteal

# T=tests/kernels/noise: all tests of one folder or file, including the slow ones.
test: setup
	$(ON_CPU) -m "not gpu$(if $(T),, and not full)" $(T)

test-all: setup
	$(ON_CPU) -m "not gpu"

# PART=kernels, samplers or alone runs one part of the GPU tests. With empty caches and 16 cores they
# took 10 to 20, 4 to 13 and 2 to 3 minutes (results/*/gpu-tests.csv), most of it compilation: with
# kernels compiled ahead, seven workers needed 3 minutes for the first. Tests that time the GPU
# (marked alone) run in one process, with no other work on the GPU. A test that hangs is ended by the
# limit in pyproject.toml.
GPU_kernels = tests/kernels -n auto --dist worksteal -m "gpu and not alone"
GPU_samplers = tests --ignore=tests/kernels -n auto --dist worksteal -m "gpu and not alone"
GPU_alone = tests -m "gpu and alone"
PART ?= kernels samplers alone

test-gpu: setup
	failed=0; $(foreach part,$(PART),$(PYTEST) $(or $(GPU_$(part)),$(error PART: no part $(part))) || failed=1;) exit $$failed

verify: setup
	$(FSBENCH) verify

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Fix what ruff can fix; make lint reports the remaining errors.
format: setup
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .

# If two runs have measured a cell, the later argument is drawn; a ratio is always of one run.
RUNS = $(foreach run,$(1),$(wildcard results/h200/$(run)-20*))

plots: setup
	rm -f plots/*.png plots/*/*.png
	$(FSBENCH) plot $(call RUNS,lean-d8192 lean-d8192-large lean paper) --figure runtime,bandwidth,breakdown,speedup --out plots
	$(FSBENCH) plot $(call RUNS,lean lean-d8192 lean-d8192-large screened-d4096 screened-d8192 called) $(foreach d,4096 8192,$(addsuffix /plain_d$(d),$(call RUNS,rivals))) --figure headline --out plots
	$(FSBENCH) plot $(wildcard results/h?00/sweep-2*) --figure headline --out plots/sweep
	$(FSBENCH) plot $(addsuffix /default_d4096,$(call RUNS,rivals)) --figure runtime --out plots/released
	$(FSBENCH) plot $(call RUNS,models paper lean lean-d8192 lean-d8192-large called) --figure winner --out plots
	$(FSBENCH) plot $(call RUNS,store) --figure logits_store --out plots
	$(FSBENCH) plot $(call RUNS,tp) --figure scaling --out plots
	$(FSBENCH) plot $(call RUNS,profile) --figure costs --out plots
	$(FSBENCH) plot $(call RUNS,truncated-grid) --figure filters --out plots
	$(FSBENCH) plot $(call RUNS,e2e-vllm-qwen3-8b) --out plots

# Write the tables and numbers of README.md and docs/ from results/ and the code (tools/pages).
docs: setup
	PYTHONPATH=tools $(VENV)/bin/python -m pages

# The documentation site, in build/site; a broken link or reference fails.
site: setup
	test -x $(VENV)/bin/mkdocs || $(VENV)/bin/pip install -q -e ".[docs]"
	$(VENV)/bin/python tools/build_site.py
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build -q --strict

# Check the vLLM plug-in against vLLM's source (a download of 300 MB, once), the rival samplers
# against the sources of their packages, and the adapters against vLLM's kernels in the interpreter.
check-engines: setup
	$(VENV)/bin/python tools/check_engines.py
	$(ON_CPU) tests/fsbench/integrations/test_real_kernels.py tests/baselines/test_real_vllm.py

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache
