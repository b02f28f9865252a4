# The verbs that people and CI share. `make demo` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
EXTRAS ?= gguf,dev
comma = ,
STAMP = $(VENV)/.kestrel-installed-with-$(subst $(comma),-,$(EXTRAS))
# Without build isolation pip installs no build requirements, and Python 3.11 comes with a setuptools that is too old.
export BUILD_REQUIRES = import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])

.PHONY: help setup native demo test lint format compile-check gpu-test bench nightly bench-env wheel wheel-test clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml setup.py | $(BIN)/python
	$(BIN)/python -m pip install --quiet $$($(BIN)/python -c "$$BUILD_REQUIRES")
	KESTREL_SKIP_NATIVE=1 $(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[$(EXTRAS)]'
	touch $@

setup: $(STAMP) native ## virtual environment with the package and its development tools

native: $(STAMP) ## build the native modules in place (only what changed); _simt is for tests
	KESTREL_BUILD_SIMT=1 $(BIN)/python setup.py --quiet build_ext --inplace

demo: setup ## fetch SmolLM2-135M-Instruct, convert it, and answer a prompt
	$(BIN)/python -m kestrel.demo -p "Explain in two sentences why the sky is blue." -n 96

test: setup ## the whole test suite, by as many processes as there are CPUs (up to 8); GPU tests skip where there is none
	$(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist worksteal

lint: setup ## ruff, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## apply the formatter
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

compile-check: setup ## compile every kernel for every supported GPU and report registers (no GPU needed)
	$(BIN)/python -m kestrel.cuda.compile --check

gpu-test: setup ## every check that needs the GPU; JSON under bench/results/
	$(BIN)/python bench/gpu_test.py

bench: setup ## time the demo model, or what BENCH says: make bench BENCH="--shape qwen3-0.6b -d 0,1024"
	$(BIN)/python -m kestrel.bench $(BENCH)

nightly: setup ## bench/nightly.toml against the runs before: bench/results/nightly.html (NIGHTLY="flags")
	$(BIN)/python -m bench.nightly $(NIGHTLY)

bench-env: ## an environment of its own with llama.cpp, for bench/cpu.py
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet -r bench/requirements-cpu.txt

wheel: setup ## dist/kestrel_exact-*.whl
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

wheel-test: wheel ## install the wheel into an empty environment and decode with it
	bash tests/wheel/run.sh $(PYTHON)

clean: ## remove what was built, keep models
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name '*.so' -path './kestrel/*' -delete
