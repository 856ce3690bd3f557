# `make demo` and `make test` need Python 3.11+ and make, nothing else: they create .venv by themselves.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

export OMP_NUM_THREADS ?= 1
export DS_ACCELERATOR ?= cpu
export TORCH_EXTENSIONS_DIR ?= $(abspath $(VENV))/torch_extensions

.PHONY: demo test test-all test-native test-gpu check format bench upstream docs clean

demo: $(VENV)/ready
	rm -rf run/demo
	@echo "Four ranks train; at step 14 the data of one of them stops coming. Its monitor says so after 5 seconds and ends the job."
	$(BIN)/torchrun --standalone --nproc-per-node 4 -m torchwhere run --stall 5 --end-with SIGTERM --out run/demo \
	    examples/train_stuck.py 2>&1 | sed '/elastic.multiprocessing/,$$d'
	@grep -q '^HANG' run/demo/verdict.txt
	@echo
	@echo "The job is gone, its boxes are not. Look around:"
	@echo "  $(BIN)/torchwhere doctor run/demo             the verdict again, from the boxes"
	@echo "  $(BIN)/torchwhere report run/demo             all of it on one page, report.html"
	@echo "  $(BIN)/torchwhere comms run/demo              which collectives each module caused"
	@echo "  $(BIN)/torchwhere events run/demo --last 5    the last things each rank did"
	@echo "  $(BIN)/torchwhere layout run/demo             how the model was laid out over the ranks"
	@echo "  $(BIN)/torchwhere diff run/demo               where the ranks part"

test: $(VENV)/tested
	$(BIN)/python -m pytest -q

# The fault matrix with every victim: the first rank, one in the middle, the last.
test-all: $(VENV)/tested
	TORCHWHERE_ALL_VICTIMS=1 $(BIN)/python -m pytest -q

# The same with the native part: every test of the suite, recorded by C++ where it can be.
test-native: $(VENV)/tested
	TORCHWHERE_NATIVE=1 $(BIN)/python -m pytest -q

# Four NCCL ranks on one GPU; skipped where there is none.
test-gpu: $(VENV)/tested
	$(BIN)/python -m pytest -q -rs tests/test_gpu.py tests/test_cuda.py

check: $(VENV)/tested
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/tested
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The pages of docs/ as a site, in site/. A link that leads nowhere is an error.
docs: $(VENV)/documented
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs site
	@echo "site/index.html"

bench: $(VENV)/ready
	$(BIN)/python -m bench $(ARGS)

# PyTorch's own tests, from a checkout of the release that is installed: plain, watched, on the drop-ins. Lists what differs.
upstream: $(VENV)/upstream
	@test -n "$(PYTORCH)" || { echo "make upstream PYTORCH=/path/to/pytorch [ARGS=...]: PYTORCH is not set" >&2; exit 2; }
	$(BIN)/python -m upstream $(PYTORCH) $(ARGS)

# What a user of the library has: torch (their own build; here the one the suite was checked with) and torchwhere.
$(VENV)/ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -e .
	touch $@

# What the suite needs on top: the tools, and the real libraries that torchwhere is tried with.
$(VENV)/tested: $(VENV)/ready
	$(BIN)/python -m pip install -q -e ".[test,check,peers]"
	@echo "DeepSpeed compiles a part of itself, once: about half a minute"
	$(BIN)/python -c "from deepspeed.comm.torch import build_shm_op; build_shm_op()" >/dev/null 2>&1 || true
	touch $@

# What PyTorch's tests import.
$(VENV)/upstream: $(VENV)/tested
	$(BIN)/python -m pip install -q -e ".[upstream]"
	touch $@

# What builds the site; torch is not needed for it.
$(VENV)/documented: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) run site .mypy_cache .ruff_cache .pytest_cache .hypothesis
