# `make` lists the targets. Only Python 3.11 or newer is needed; `make PYTHON=python3.12 test` picks one.
PYTHON ?= python3
BIN := .venv/bin
# The name changes with the checkout's folder: a .venv that was copied along is made anew.
READY := .venv/ready-$(shell pwd | cksum | cut -d ' ' -f 1)

.PHONY: help frontier test lint types bench clean

help:
	@echo 'make frontier  run the frontier study; tables and figures go to out/frontier/'
	@echo 'make test      format, lint, types, layers, tests and doctests'
	@echo 'make lint      format, lint and layers only'
	@echo 'make types     types only'
	@echo 'make bench     time the engine against its budgets'
	@echo 'make clean     remove .venv/, out/, builds and caches'

$(READY): pyproject.toml constraints.txt tools/setup.sh
	@sh tools/setup.sh '$(PYTHON)'
	@touch $@

frontier: $(READY)
	$(BIN)/python -m perfmodel study frontier

test: lint types
	$(BIN)/python -m pytest -n 2 --dist loadgroup

lint: $(READY)
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/python -m basedpyright --pythonpath $(BIN)/python

bench: $(READY)
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv out build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
