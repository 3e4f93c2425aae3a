# Everything a contributor runs. `make help` lists it. Needs Python 3.11 or newer and make; the rest lands in .venv.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# `make test TORCH=2.9.1` tests against another torch than that of constraints.txt, in an environment of its own.
TORCH  ?=
VENV   ?= .venv$(if $(TORCH),-torch-$(TORCH))
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# A virtual environment made by hand before the first `make` is used as it is.
VENV_PYTHON := $(BIN)/python

.DEFAULT_GOAL := help
.PHONY: help install train test lint format bench race quality docs figures dist lock clean

help: ## list the goals
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## make .venv and install Cadenza into it, editable, with its tools

train: $(STAMP) ## train a small GPT on 4 workers that meet every 16 steps, and draw a report (ARGS="…" go to cadenza train)
	$(BIN)/cadenza train $(ARGS)

test: $(STAMP) ## run all tests and the doctests of src/cadenza, on all cores (ARGS="-k name" to choose, TORCH=2.9.1 for another torch)
	$(VENV_PYTHON) -m pytest -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(STAMP) ## ruff, mypy --strict and the direction of imports; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## rewrite the sources the way ruff likes them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## measure averaging against torch's (ARGS="…" go to the benchmark)
	$(VENV_PYTHON) lab/bench_average.py $(ARGS)

race: $(STAMP) ## Cadenza against its rivals on emulated links, under 15 minutes (root; ARGS="…" go to lab.race)
	$(VENV_PYTHON) -m pip install --quiet -c constraints.txt matplotlib
	$(VENV_PYTHON) -m lab.race headline $(ARGS)

quality: $(STAMP) ## go on with the queue of learning quality for an hour (ARGS="--minutes N"); can be killed at any time
	OMP_NUM_THREADS=1 nice -n 19 $(VENV_PYTHON) -m lab.quality run $(ARGS)

docs: $(STAMP) ## build the documentation into site/ (open site/index.html); a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(STAMP) ## build wheel and sdist into dist/, twice: other bytes are an error
	rm -rf dist build/again
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/hatchling build -d dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/hatchling build -d build/again
	diff -r dist build/again
	cd dist && sha256sum *

lock: $(STAMP) ## pin in constraints.txt what .venv holds, and what that needs in turn
	$(VENV_PYTHON) .ci/lock.py

figures: $(STAMP) ## put the figures of lab/results into README and docs
	$(VENV_PYTHON) -m docs_tools.figures --write

clean: ## remove what was built or cached, and .venv
	rm -rf .venv .venv-race .venv-torch-* build dist site .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV_PYTHON):
	$(PYTHON) -m venv $(VENV)

# The build tools go in first, so that the editable install needs no isolated environment (which would ignore -c).
# Another torch comes last, past the bounds of whoever depends on it; it brings the Triton that belongs to it, or none.
$(STAMP): pyproject.toml constraints.txt | $(VENV_PYTHON)
	$(VENV_PYTHON) -m pip install --quiet -c constraints.txt hatchling editables
	$(VENV_PYTHON) -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	$(if $(TORCH),$(VENV_PYTHON) -m pip install --quiet torch==$(TORCH))
	@touch $@
