# `make demo` and `make test` need only Python 3.11+ and make: they create .venv.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
# Tests of one file share processes and jobs, so one worker runs the whole file.
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder

export OMP_NUM_THREADS ?= 1
export DS_ACCELERATOR ?= cpu
export TORCH_EXTENSIONS_DIR ?= $(abspath $(VENV))/torch_extensions

.PHONY: demo test test-all test-native test-gpu check format bench upstream docs clean

demo: $(VENV)/ready
	rm -rf run/demo
	@echo "Four ranks train a model. At step 14 one rank gets no more data, and the job hangs. After 5 seconds the monitor reports it and ends the job."
	$(BIN)/torchrun --standalone --nproc-per-node 4 -m torchwhere run --stall 5 --end-with SIGTERM --out run/demo \
	    examples/train_stuck.py 2>&1 | sed '/elastic.multiprocessing/,$$d'
	@grep -q '^HANG' run/demo/verdict.txt
	@echo
	@echo "The job has ended; its boxes are in run/demo. Try:"
	@echo "  $(BIN)/torchwhere doctor run/demo             print the verdict again, from the boxes"
	@echo "  $(BIN)/torchwhere report run/demo             write everything to one page, report.html"
	@echo "  $(BIN)/torchwhere comms run/demo              list the collectives of each module"
	@echo "  $(BIN)/torchwhere events run/demo --last 5    show the last 5 events of each rank"
	@echo "  $(BIN)/torchwhere layout run/demo             show how the model is sharded over the ranks"
	@echo "  $(BIN)/torchwhere diff run/demo               find where the ranks differ"

# At most 8 minutes on 2 cores. Without the tests that only add more cases of one kind.
test: $(VENV)/tested
	$(PYTEST) -m "not exhaustive"

# Every test. With TORCHWHERE_ALL_VICTIMS=1 the fault matrix plants each fault in the first rank, in the middle, and in the last.
test-all: $(VENV)/tested
	$(PYTEST)

# The same with the native extension: C++ records what it can in every test.
test-native: $(VENV)/tested
	TORCHWHERE_NATIVE=1 $(PYTEST)

# Four NCCL ranks on one GPU; one line where there is none. tests/test_gpus.py needs no GPU.
GPU_TESTS := tests/test_cuda.py tests/test_gpu.py $(wildcard tests/test_gpu_*.py)
test-gpu: $(VENV)/tested
	@if $(BIN)/python -W ignore -c "import torch; raise SystemExit(not torch.cuda.is_available())"; \
	then $(BIN)/python -m pytest -q -rs $(GPU_TESTS); \
	else echo "make test-gpu: skipped, torch finds no NVIDIA GPU on this machine"; fi

check: $(VENV)/tested
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/tested
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Builds docs/ as a site, in site/. A broken link is an error.
docs: $(VENV)/documented
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs site
	@echo "site/index.html"

bench: $(VENV)/ready
	$(BIN)/python -m bench $(ARGS)

# Runs PyTorch's own tests, from a checkout of the installed release: plain, watched and on the drop-ins. Lists what differs.
upstream: $(VENV)/upstream
	@test -n "$(PYTORCH)" || { echo "make upstream PYTORCH=/path/to/pytorch [ARGS=...]: PYTORCH is not set" >&2; exit 2; }
	$(BIN)/python -m upstream $(PYTORCH) $(ARGS)

# For users: torch (by default the version that the tests were checked with) and torchwhere.
$(VENV)/ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -e .
	touch $@

# For tests, in addition: the tools, and the libraries that torchwhere is tested with.
$(VENV)/tested: $(VENV)/ready
	$(BIN)/python -m pip install -q -e ".[test,check,peers]"
	@echo "DeepSpeed compiles an extension once, in about half a minute."
	$(BIN)/python -c "from deepspeed.comm.torch import build_shm_op; build_shm_op()" >/dev/null 2>&1 || true
	touch $@

# For PyTorch's tests: the packages that they import.
$(VENV)/upstream: $(VENV)/tested
	$(BIN)/python -m pip install -q -e ".[upstream]"
	touch $@

# What builds the site. The reference pages import torchwhere, which needs torch.
$(VENV)/documented: $(VENV)/ready
	$(BIN)/python -m pip install -q -e ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) run site .mypy_cache .ruff_cache .pytest_cache .hypothesis
