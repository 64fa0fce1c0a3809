# `make demo` and `make test` do all set-up themselves; they need a Python >= 3.12 on the machine.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
HERE := $(CURDIR)
COMPILERS := .gpu-compilers
COMPILERS_STAMP := $(COMPILERS)/.installed
# The CUDA plugin of JAX exists for Linux alone; elsewhere the tests that compile kernels are skipped.
ifeq ($(shell uname -s),Linux)
# With "=": as a word of its own the folder would be taken for a path of tests, and tests/conftest.py not be read.
COMPILE_KERNELS := --gpu-compilers=$(COMPILERS)
TEST_NEEDS := $(COMPILERS_STAMP)
endif

# In the order of the files: by the number of tests, which is the default, the few long tests of a file would come last, and one
# worker would wait for the other.
WORKERS := -n auto --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint format bench clean FORCE

help:
	@echo 'make demo      set up, generate from a held-out prompt with the shipped pair, small benchmark'
	@echo 'make test      set up, lint, run the tests that take seconds; kernels are compiled for GPUs (Linux)'
	@echo 'make test-all  the same with the slow tests'
	@echo 'make lint      check style;  make format  apply it'
	@echo 'make bench     the full benchmark'
	@echo 'make clean     remove the environment, the compilers for GPUs and caches'

# The stamp holds the folder it was made for: a copied or moved checkout, or one without its Python, starts anew.
ifneq ($(shell [ -x $(BIN)/python ] && cat $(STAMP) 2>/dev/null),$(HERE))
$(STAMP): FORCE
endif

$(STAMP): pyproject.toml constraints.txt
	@sh .ci/setup $(VENV)

$(COMPILERS_STAMP): $(STAMP) .ci/gpu-compilers
	@sh .ci/gpu-compilers $(COMPILERS) $(BIN)/python

demo: $(STAMP)
	$(BIN)/ddtree-jax generate --demo-prompt 0 --max-new-tokens 96 --show-tree
	$(BIN)/ddtree-jax bench --prompts 4 --max-new-tokens 64 --budgets 8,16 --repeats 1

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

format: $(STAMP)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

test: lint $(TEST_NEEDS)
	$(BIN)/python -m pytest -m 'not slow and not gpu' $(WORKERS) $(COMPILE_KERNELS)

test-all: lint $(TEST_NEEDS)
	$(BIN)/python -m pytest -m 'not gpu' $(WORKERS) $(COMPILE_KERNELS)

bench: $(STAMP)
	$(BIN)/ddtree-jax bench

clean:
	rm -rf $(VENV) $(COMPILERS) build dist .pytest_cache .ruff_cache .hypothesis
	find ddtree_jax tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
