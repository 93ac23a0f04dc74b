# CI and people run the same targets. PYTHON chooses an interpreter, VENV another folder.
VENV ?= .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3.12 python3.13 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
REQUIREMENTS := $(if $(shell command -v nvidia-smi),requirements.txt,requirements-cpu.txt)
# Python compiles a module when it is first imported: pip would compile 9,000, of which a run imports 2,000.
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet \
	$(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)
CONFIG ?= configs/default.py
TARGET ?= h100x4
WORKDIR ?= runs/$(basename $(notdir $(CONFIG)))-latentwire
# As many facts as the cards of the training data have.
TEXT ?= Mara Ellis lives in Lisbon.$(if $(filter %default.py,$(CONFIG)), By trade Mara Ellis is a baker. \
	Mara Ellis keeps a dog. Mara Ellis painted the door blue. Mara Ellis plays the piano. Mara Ellis likes plums best. \
	Mara Ellis is learning Greek. Mara Ellis trains for rowing.,$(if $(filter %smoke.py,$(CONFIG)),, Tom Reed works as a baker.))
# A step on the CPU takes fresh memory each time: glibc keeps what it has, and new memory comes in pages of 2 MiB.
export GLIBC_TUNABLES ?= \
	glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=68719476736:glibc.malloc.top_pad=1073741824

.PHONY: run plan test test-all quick slow newer-jax chaos lint bench bench-gpu check-cards golden notebook lock clean

run: $(VENV)/.runtime  ## trains the default configuration, prints its evaluation table, asks it one question
	$(BIN)/python run.py --config $(CONFIG) --workdir $(WORKDIR)
	$(BIN)/python run.py eval --workdir $(WORKDIR)
	echo "$(TEXT)" | $(BIN)/python run.py answer --workdir $(WORKDIR) \
		--context - --question "Where does Mara Ellis live?"

plan: $(VENV)/.plan  ## plans CONFIG for TARGET, GPUs elsewhere; installs XLA's compiler for them first (223 MB)
	$(BIN)/python run.py plan --config $(CONFIG) --target $(TARGET)

test: lint quick  ## what a newcomer runs, in minutes: the linters and every test that is not marked `slow`

test-all: test slow  ## everything

# A file's tests share what they make, so a file stays with one process, which takes up to 5 GB. In the files' own order:
# by number of tests the slow files, which have few, would come last and end alone.
PYTEST = $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

quick: $(VENV)/.dev
	$(PYTEST) -m "not slow"

slow: $(VENV)/.dev
	$(PYTEST) -m slow

# requirements.lock has JAX 0.11 for Python 3.12 and newer. make newer-jax PYTHON=python3.12 VENV=.venv-newer
newer-jax: $(VENV)/.newer  ## what follows JAX's version: models, compiled plans, optimizers, checkpoints; by another Python's
	$(PYTEST) -m "not slow" $(addsuffix .py, \
		$(addprefix tests/unit/models/test_, attention cache_code decode decoder encoder kept_keys lora products quant ttt \
		ttt_kernel wire) $(addprefix tests/unit/planning/test_, gpus hlo_counts planner) \
		$(addprefix tests/unit/training/test_, checkpoint optimizers traced_costs))

# Not in `test-all`: of tests/chaos pytest collects the files that are named.
chaos: $(VENV)/.dev  ## kills, damage, mutated input and full disks, for MINUTES=10, from SEED=0
	CHAOS_MINUTES=$(or $(MINUTES),10) CHAOS_SEED=$(or $(SEED),0) $(BIN)/python -m pytest -rP --numprocesses 2 \
		tests/chaos/kills.py tests/chaos/disk.py tests/unit/chaos

lint: $(VENV)/.dev
	@begun=$$(date +%s); $(BIN)/ruff format --check . && $(BIN)/ruff check . && \
		$(BIN)/pyright --pythonpath $(BIN)/python && \
		echo "lint: 3 checks passed in $$(( $$(date +%s) - begun )) s"  # pyright would take the python on PATH

bench: $(VENV)/.dev  ## our work against PyTorch's and TRL's, each side at its best, by turns on this machine
	$(BIN)/python benchmarks/peer.py --config configs/embeddings.py --precision best --rounds 2 --steps 3
	$(BIN)/python benchmarks/peer.py --config configs/dpo/smollm2.py --config.train.global_batch=4 \
		--config.dpo.max_length=128 --precision best --rounds 2 --steps 3

bench-gpu: $(VENV)/.dev  ## all that is to be measured on one card, in one JSON; no case begins after 7.5 minutes
	$(BIN)/python benchmarks/gpu.py --out $(or $(OUT),bench-gpu.json)

check-cards: $(VENV)/.dev  ## what to run first on several cards: devices, an all-reduce, each placement, a kill and a resume
	$(BIN)/python examples/check_cards.py

golden: $(VENV)/.dev  ## writes the golden files anew; say why in the commit
	UPDATE_GOLDEN=1 $(BIN)/python -m pytest tests/golden

notebook: $(VENV)/.dev  ## runs examples/quickstart.ipynb and writes its outputs anew; trains only where runs/notebook is not
	$(BIN)/python -m tests.notebook

lock: $(VENV)/.dev  ## resolves requirements.lock anew, for Python 3.11 and newer
	$(PIP) uv
	: > requirements.lock
	grep -vE '^(torch|peft|trl)' requirements-dev.txt | $(BIN)/uv pip compile --universal --python-version 3.11 --no-header \
		--no-annotate --strip-extras --quiet requirements.txt - --output-file requirements.lock

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name one: make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: $(REQUIREMENTS) requirements-cpu.txt requirements.lock $(wildcard dependencies*.txt) | $(BIN)/python
	$(PIP) -r $(REQUIREMENTS)
	@touch $@

$(VENV)/.plan: requirements-plan.txt $(VENV)/.runtime
	$(PIP) -r requirements-plan.txt
	@touch $@

$(VENV)/.newer: requirements-dev.txt requirements-plan.txt requirements-cpu.txt requirements.lock | $(BIN)/python
	grep -E '^(beartype|hypothesis|pytest)' requirements-dev.txt > $(VENV)/tests.txt
	$(PIP) -r requirements-cpu.txt -r requirements-plan.txt -r $(VENV)/tests.txt
	@touch $@

$(VENV)/.dev: requirements-dev.txt requirements-plan.txt requirements-cpu.txt requirements.lock dependencies.txt | $(BIN)/python
	$(PIP) -r requirements-dev.txt
	@touch $@
