# Targets create .venv if it is missing, and install again after a change of pyproject.toml or constraints.txt.
# On a machine without a GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu avoids a large download.

PYTHON ?= python3
JOBS ?= 3
DEVICE ?= cpu
GPU_SECONDS ?= 500
GPU_PATH := $(PYTHONPATH)
VENV := .venv
BASE := $(VENV)/.installed-base
DEV := $(VENV)/.installed-dev
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
unexport PYTHONPATH

.PHONY: help quickstart test lint format docs docs-serve bench gpu soak docker clean

help:
	@echo "make quickstart  train a small CodeGeeX on this machine's Python sources and let it write code"
	@echo "make test        the tests without the long ones, in three processes (JOBS=2: in two)"
	@echo "make soak        the long tests: many kills, faults and moves"
	@echo "make lint        formatting, lint, types, shell scripts and the Dockerfile"
	@echo "make format      let ruff rewrite the sources"
	@echo "make docs        build the site of docs/ into site/; docs-serve shows it and follows changes"
	@echo "make bench       speed and memory compared with other implementations"
	@echo "make gpu         tests and benchmarks on GPUs in GPU_SECONDS=500; the report is in runs/gpu_report.md"
	@echo "make docker      the image megatron-lite:cpu (DEVICE=cuda: megatron-lite:cuda, for NVIDIA GPUs)"
	@echo "make clean       remove .venv and caches, but not runs/"

quickstart: $(BASE)
	$(BIN)/python tools/quickstart.py

test: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not soak" -n $(JOBS) --dist worksteal

soak: $(DEV)
	$(BIN)/python -m pytest -m soak

lint: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/hadolint Dockerfile
	$(BIN)/shellcheck launch.sh megatron_lite/launch/launch.sh megatron_lite/launch/pretrain.sbatch .ci/run

format: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(DEV)
	$(BIN)/mkdocs build --strict

docs-serve: $(DEV)
	$(BIN)/mkdocs serve

bench: $(DEV)
	set -e; for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python "$$script"; done

# With the packages that are there, because a machine with GPUs may reach no registry.
gpu:
	PYTHONPATH="$(GPU_PATH)" $(or $(wildcard $(BIN)/python),$(PYTHON)) benchmarks/gpu/run.py --seconds $(GPU_SECONDS)

docker:
	docker build --build-arg DEVICE=$(DEVICE) --tag megatron-lite:$(DEVICE) .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis *.egg-info site

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit("python3 is %d.%d; megatron-lite needs 3.10 or newer: make PYTHON=/path/to/python" % sys.version_info[:2] if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(BASE): $(VENV)/.made pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q -e . -c constraints.txt
	@touch $@

$(DEV): $(VENV)/.made pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q -e '.[dev]' -c constraints.txt
	@touch $(BASE) $@
