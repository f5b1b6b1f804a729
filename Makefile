# Targets create .venv if it is missing, and install again after a change of pyproject.toml or constraints.txt.
# On a machine without a GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu avoids a large download.

PYTHON ?= python3
JOBS ?= 3
DEVICE ?= cpu
GPU_SECONDS ?= 500
MUTANTS ?= 0
SEED ?= 1
GPU_PATH := $(PYTHONPATH)
VENV := .venv
BASE := $(VENV)/.installed-base
DEV := $(VENV)/.installed-dev
BIN := $(VENV)/bin
# A process that is free gets the next file; files are in the order of tests/durations.json.
# After a process has died, pytest-xdist would start another one, and could then wait forever.
TESTS = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder \
	--max-worker-restart 0
export PATH := $(CURDIR)/$(BIN):$(PATH)
unexport PYTHONPATH
unexport PYTHONDONTWRITEBYTECODE  # pytest would rewrite all assertions in each process, for seconds

.PHONY: help quickstart test soak durations mutants lint format docs docs-serve bench gpu docker clean

help:
	@echo "make quickstart  train a small CodeGeeX on this machine's Python sources and let it write code"
	@echo "make test        every behaviour once, in three processes (JOBS=2: in two)"
	@echo "make soak        the full matrices and long lists, for hours; resumes after an interruption"
	@echo "make durations   the tests, whose seconds go to tests/durations.json and steer their order"
	@echo "make mutants     small planted bugs: which of them do the tests find? (MUTANTS=200: and random ones)"
	@echo "make lint        formatting, lint, types, shell scripts, the Dockerfile and the rules in tests/lint"
	@echo "make format      let ruff rewrite the sources"
	@echo "make docs        build the site of docs/ into site/; docs-serve shows it and follows changes"
	@echo "make bench       speed and memory compared with other implementations"
	@echo "make gpu         tests and benchmarks on GPUs in GPU_SECONDS=500; the report is in runs/gpu_report.md"
	@echo "make docker      the image megatron-lite:cpu (DEVICE=cuda: megatron-lite:cuda, for NVIDIA GPUs)"
	@echo "make clean       remove .venv and caches, but not runs/"

quickstart: $(BASE)
	$(BIN)/python tools/quickstart.py

test: $(DEV)
	$(TESTS) -m "not soak and not lint"

soak: $(DEV)
	$(TESTS) -m "soak and not lint" --resume-soak

durations: $(DEV)
	$(TESTS) -m "not soak and not lint" --record-durations

mutants: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants.run --random $(MUTANTS) --seed $(SEED)

lint: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/hadolint Dockerfile
	$(BIN)/shellcheck launch.sh megatron_lite/launch/launch.sh megatron_lite/launch/pretrain.sbatch .ci/run
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/lint

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
