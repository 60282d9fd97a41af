# `make demo` and `make test` work on a fresh machine: they set up .venv first.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-ranks test-lab coverage test-nightly test-torchrec test-torchrec-own check lines wheel clean

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL := configs/models/dlrm_dcnv2_criteo1tb.yaml

# torch is pinned once, in pyproject.toml. torchrec comes last and alone: its metadata asks for the
# CUDA wheel of fbgemm, which would overwrite the CPU one (decision 0003).
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
TORCHREC := torchrec==1.8.0
OTHER_TORCHRECS := 1.7.0 1.9.2
# Keyed on what is asked for, not on dates: checking out the same pyproject.toml installs nothing.
KEY := $(shell { cat pyproject.toml; echo "$(TORCHREC) $(CURDIR)"; } | cksum | cut -d' ' -f1)
STAMP := $(VENV)/.setup-$(KEY)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

setup: $(STAMP) ## the full CPU environment in .venv: torch, fbgemm, torchrec, tools

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than Python 3.11; try: make PYTHON=python3.12 ..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) --editable '.[cpu,calibrate,dev]'
	$(PIP) --no-deps $(TORCHREC)
	$(BIN)/python -c "from search.improve.annealing import load_kernel; load_kernel()"  # compiles
	rm -f $(VENV)/.setup-*
	touch $@

demo: setup ## plan MLPerf DLRM-DCNv2 on 8 GPUs
	$(BIN)/shardopt plan $(MODEL) --gpus 8 -o plan.json

# Two workers fit a machine of two cores. Each begins with half of the tests, in their order, so that
# tests of one file share what they set up; who is done takes over half of what the other has left.
# Compiled code is kept even where the machine's settings say otherwise: many tests start processes.
# PyTorch's threads, of which each worker has as many as there are cores, only wait for each other.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 \
  --dist worksteal --durations 10 --durations-min 1

test: setup ## the tests of the product, but for those on several ranks
	$(PYTEST) -m "not slow and not distributed" --ignore=tests/lab

test-ranks: setup ## the tests of the product on several ranks
	$(PYTEST) -m "not slow and distributed" --ignore=tests/lab

test-lab: setup ## the tests of the laboratory
	$(PYTEST) -m "not slow" tests/lab

# SEED repeats a day. A run that was stopped goes on: what passed for this commit and seed is listed
# in .nightly and left out.
SEED ?= $(shell date -u +%Y%m%d)
NIGHTLY := SHARDOPT_SEED=$(SEED) $(PYTEST) -p tests.nightly --hypothesis-seed=$(SEED)
test-nightly: setup ## the slow tests of both, coverage, other TorchRecs; seeds change by the day
	failed=; \
	$(NIGHTLY) -m slow || failed="$$failed slow"; \
	$(MAKE) --no-print-directory test-torchrec PYTEST='$(NIGHTLY)' || failed="$$failed torchrec"; \
	done=$$(SHARDOPT_SEED=$(SEED) $(BIN)/python -m tests.nightly)/coverage; test -e $$done || \
	  { $(MAKE) --no-print-directory coverage && touch $$done; } || failed="$$failed coverage"; \
	test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

# Takes twice as long as `make test`. Processes that tests start or fork are not counted.
coverage: setup ## the tests of the product, and the share of lines and branches that they run
	$(PYTEST) -m "not slow" --ignore=tests/lab --cov --cov-report=
	@for room in predictor search shardopt; do \
	  printf '%-10s %3s %%\n' $$room \
	    "$$($(BIN)/python -m coverage report --format=total --include="$$room/*")"; \
	done
	@printf '%-10s %3s %%   files: .venv/bin/python -m coverage report\n' all \
	  "$$($(BIN)/python -m coverage report --format=total)"

# Each version lies in a folder of its own, before the pinned one on the path.
test-torchrec: setup ## the tests of the TorchRec hook and plans under the oldest and newest version
	for version in $(OTHER_TORCHRECS); do \
	  folder=$(VENV)/torchrec-$$version; \
	  test -d $$folder || $(PIP) --no-deps --target $$folder torchrec==$$version; \
	  echo "torchrec $$version"; export PYTHONPATH=$$folder; \
	  $(PYTEST) -m "not slow" tests/shardopt/torchrec tests/torchrec_parity \
	    tests/distributed/test_training.py tests/distributed/test_optimizers.py; \
	done

# Fetches the commit that the installed torchrec names; docs/compatibility.md says what comes of it.
# DIR=<checkout> runs another one, TORCHREC_SOURCE=<repository> fetches from a copy.
TORCHREC_SOURCE := https://github.com/meta-pytorch/torchrec
test-torchrec-own: setup ## TorchRec's own planner tests, with our planner in place
	PYTHONPATH=$(CURDIR) $(BIN)/python -m lab torchrec-own $(DIR) --source $(TORCHREC_SOURCE)

check: setup ## ruff, mypy, and the order of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	@$(MAKE) --no-print-directory lines

# Printed, not enforced: what a reader can survey is a judgement.
ROOMS := predictor=15500 search=10000 shardopt=32500 shardopt/replay=4500 lab=15000 tests=32000
lines: ## lines of Python by room, beside what a reader can survey
	@printf '%-16s %7s %6s %10s\n' room lines files survey
	@for room in $(ROOMS); do \
	  folder=$${room%=*}; test -d $$folder || continue; \
	  printf '%-16s %7d %6d %10d\n' $$folder \
	    "$$(find $$folder -name '*.py' -not -path 'tests/lab/*' -exec cat {} + | wc -l)" \
	    "$$(find $$folder -name '*.py' -not -path 'tests/lab/*' | wc -l)" $${room#*=}; \
	done

# Away from the repository and without torch: what a user who plans from a YAML file installs.
# Every command is run once: it works, or names the extra or the data that it lacks.
wheel: setup ## build the wheel, install it in a clean environment and use it there
	rm -rf dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .
	unset PYTHONPATH; tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	$(PYTHON) -m venv "$$tmp/venv"; \
	"$$tmp/venv/bin/python" -m pip install --quiet --disable-pip-version-check dist/*.whl; \
	for package in shardopt predictor search; do \
	  ls "$$tmp"/venv/lib/python*/site-packages/$$package/py.typed > /dev/null; \
	done; \
	for extra in torch scipy; do \
	  if "$$tmp/venv/bin/python" -c "import $$extra" 2> /dev/null; then \
	    echo "the wheel pulls in $$extra" >&2; exit 1; \
	  fi; \
	done; \
	$(BIN)/python -m lab try-wheel "$$tmp/venv/bin/shardopt"

clean: ## remove what building, testing and checking leave behind (not .venv)
	rm -rf build dist .coverage .nightly .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find shardopt predictor search lab tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
