# `make demo` and `make test` do all set-up themselves; they need a Python >= 3.12 on the machine.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
HERE := $(CURDIR)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint format bench clean FORCE

help:
	@echo 'make demo      set up, generate from a held-out prompt with the shipped pair, small benchmark'
	@echo 'make test      set up, lint, run the tests that take seconds'
	@echo 'make test-all  the same with the slow tests'
	@echo 'make lint      check style;  make format  apply it'
	@echo 'make bench     the full benchmark'
	@echo 'make clean     remove the environment and caches'

# The stamp holds the folder it was made for: a copied or moved checkout, or one without its Python, starts anew.
ifneq ($(shell [ -x $(BIN)/python ] && cat $(STAMP) 2>/dev/null),$(HERE))
$(STAMP): FORCE
endif

$(STAMP): pyproject.toml constraints.txt
	@sh .ci/setup $(VENV)

demo: $(STAMP)
	$(BIN)/ddtree-jax generate --demo-prompt 0 --max-new-tokens 96 --show-tree
	$(BIN)/ddtree-jax bench --prompts 4 --max-new-tokens 64 --budgets 8,16 --repeats 1

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

format: $(STAMP)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

test: lint
	$(BIN)/python -m pytest -m 'not slow and not gpu' -n auto --dist loadfile

test-all: lint
	$(BIN)/python -m pytest -m 'not gpu' -n auto --dist loadfile

bench: $(STAMP)
	$(BIN)/ddtree-jax bench

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find ddtree_jax tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
