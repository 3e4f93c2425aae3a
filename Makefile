# Everything a contributor runs. `make help` lists it. Needs Python 3.11 or newer and make; the rest lands in .venv.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# A virtual environment made by hand before the first `make` is used as it is.
VENV_PYTHON := $(BIN)/python

.DEFAULT_GOAL := help
.PHONY: help install train test lint format bench race docs figures clean

help: ## list the goals
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## make .venv and install Cadenza into it, editable, with its tools

train: $(STAMP) ## train a small GPT on 4 workers that meet every 16 steps, and draw a report (ARGS="…" go to cadenza train)
	$(BIN)/cadenza train $(ARGS)

test: $(STAMP) ## run all tests and the doctests of src/cadenza, on all cores (ARGS="-k name" to choose)
	$(VENV_PYTHON) -m pytest -n auto --dist loadgroup $(ARGS)

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

docs: $(STAMP) ## build the documentation into site/ (open site/index.html); a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

figures: $(STAMP) ## put the figures of lab/results into README and docs
	$(VENV_PYTHON) -m docs_tools.figures --write

clean: ## remove what was built or cached, and .venv
	rm -rf $(VENV) .venv-race build dist site .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV_PYTHON):
	$(PYTHON) -m venv $(VENV)

# The build tools go in first, so that the editable install needs no isolated environment (which would ignore -c).
$(STAMP): pyproject.toml constraints.txt | $(VENV_PYTHON)
	$(VENV_PYTHON) -m pip install --quiet -c constraints.txt hatchling editables
	$(VENV_PYTHON) -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@
