# On a fresh machine: `make demo`, `make train` and `make test`. Each builds what it needs in $(VENV).
#
#   PYTHON=/path/python3   makes the environment with this interpreter
#   PY=python3             uses this interpreter as it is: no environment, nothing installed
#   VENV=.venv             where the environment lives
#   ARGS="..."             goes to the command (make demo ARGS="--seed 1", make test ARGS="-k table")
#   LAYER=interpret        runs the tests of one folder of tests/ (make test LAYER=interpret)
#   SHARE=3/10             runs a tenth of what `make test` leaves out (make test-all SHARE=3/10)
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV ?= .venv
PY ?=
ARGS ?=
LAYER ?=
SHARE ?=
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$((n > 8 ? 8 : n)))
export PYTHON

# The driver's age decides between the CUDA builds of jax: CUDA 13 needs driver 580.
DRIVER := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | sed -n '1s/^\([0-9][0-9]*\)\..*/\1/p')
CUDA_EXTRA := $(if $(DRIVER),$(shell [ $(DRIVER) -ge 580 ] && echo cuda13 || echo cuda12))

ifeq ($(PY),)
  RUN := $(VENV)/bin/python
  setup = @tools/setup_venv.sh "$(VENV)" $(1)
else
  RUN := $(PY)
  setup = @$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 12) and "$(PY) is older than Python 3.12")'
endif

# Without a GPU, jax must not try the CUDA plugin that the offline compile tests install: it would
# print a traceback on every start. A value of the user's is kept.
cpu := JAX_PLATFORMS=$${JAX_PLATFORMS-cpu}
device := $(if $(DRIVER),,$(cpu))

# Neighbouring tests share compiled programs. Each process starts with a contiguous part of the suite,
# and takes tests from another's part when its own is done.
pytest := -m pytest -n $(JOBS) --dist worksteal

.PHONY: help demo train serve test test-all record-kernels test-gpu test-several-gpus docs lint format clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

demo:  ## run a ranking request through every stage and compare them
	$(call setup,$(CUDA_EXTRA))
	@$(device) $(RUN) -m ikbo_jax demo $(ARGS)

train:  ## train a ranker on MovieLens-100k (ARGS="compare": all of its versions)
	$(call setup,examples $(CUDA_EXTRA))
	@$(device) $(RUN) -m examples.movielens $(ARGS)

serve:  ## serve the example's ranker over HTTP, on Ray Serve (make serve ARGS="--port 8000")
	$(call setup,serve $(CUDA_EXTRA))
	@$(device) $(RUN) -m examples.serving serve $(if $(DRIVER),--gpus 1) $(ARGS)

test:  ## the short suite: every behaviour once, on the CPU; all tests that LAYER or ARGS="-k ..." name
	$(call setup,test offline)
	$(cpu) $(RUN) $(pytest) --short $(if $(LAYER),tests/$(LAYER)) $(ARGS)

test-all:  ## every test that needs no GPU, or one share of what `make test` leaves out (SHARE=3/10)
	$(call setup,test offline)
	$(cpu) $(RUN) $(pytest) $(if $(SHARE),--share $(SHARE)) $(if $(LAYER),tests/$(LAYER)) $(ARGS)

record-kernels:  ## compile every offline kernel that is new, and write tests/offline/digests.json
	$(call setup,test offline)
	$(cpu) $(RUN) $(pytest) tests/offline --all-cases --record-kernels $(ARGS)

test-gpu:  ## the tests that need a Hopper GPU, in many processes (ARGS="--seconds 540" ends in time)
	@[ -n "$(DRIVER)" ] || { echo "make test-gpu needs an NVIDIA GPU; nvidia-smi finds none" >&2; exit 1; }
	$(call setup,test $(CUDA_EXTRA))
	$(RUN) tools/gpu_tests.py $(ARGS)

test-several-gpus:  ## the tests that need two or more Hopper GPUs
	@[ -n "$(DRIVER)" ] || { echo "make test-several-gpus needs NVIDIA GPUs; nvidia-smi finds none" >&2; exit 1; }
	$(call setup,test $(CUDA_EXTRA))
	$(RUN) -m pytest -m several_gpus $(ARGS)

docs:  ## build the site in build/site; warnings are errors
	$(call setup,docs)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict $(ARGS)
	@echo "read it: $(RUN) -m http.server -d build/site"

lint:  ## ruff (lint and format) and mypy
	$(call setup,test lint)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format:  ## let ruff rewrite the files
	$(call setup,test lint)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean:  ## remove environments and caches
	rm -rf $(VENV) .venv-latest build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
