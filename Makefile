# Each command does everything, set-up included: `make demo`, `make serve`, `make test`.
# `make setup` does the set-up alone.
# They need Python >= 3.11 and nothing that compiles.

PYTHON ?= python3
DEMO_STEPS ?= 20
# What `make serve` serves, and where: the demo's model, or the one it starts from.
MODEL ?= $(firstword $(wildcard runs/demo-export) runs/input/smollm2)
PORT ?= 8000

VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test test-full bench bench-engine bench-serve bench-checkpoint storm-serve fuzz-serve storm-train lint format docs clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

$(READY): pyproject.toml requirements/constraints.txt requirements/demo.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Shoal needs Python 3.11 or newer; '$(PYTHON)' is not. Name one: make PYTHON=python3.12"; exit 1; }
	@echo "Setting up $(VENV), once: 2.5 GB, which takes a minute or several"
	@$(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install --quiet --disable-pip-version-check \
	    --constraint requirements/constraints.txt --editable '.[dev]'
	@$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps \
	    --requirement requirements/demo.txt
	@touch $@

setup: $(READY)  ## make the environment in .venv

demo: $(READY)  ## fine-tune SmolLM2-135M on this machine, export it, serve it, ask it
	$(RUN) examples/demo.py --fresh --steps $(DEMO_STEPS)

runs/input/smollm2: | $(READY)
	$(RUN) -m shoal import smollm2 $@

serve: $(READY) $(filter runs/input/smollm2,$(MODEL))  ## serve the demo's model, or SmolLM2, with a console
	$(RUN) -m shoal serve $(MODEL) --set serve.port=$(PORT)

# Two files at a time: what starts a cluster waits as much as it computes. Each file stays whole, so
# that its tests share a server, and each lane has its ranks and its Ray.
TEST := $(RUN) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

test: export OMP_NUM_THREADS = 1
test: $(READY)  ## run the tests
	$(TEST)

test-full: export OMP_NUM_THREADS = 1
test-full: $(READY)  ## run the tests, and those that take long or eight ranks
	$(TEST) -m "full or not full"

bench: $(READY)  ## training step side by side with torch FSDP2
	$(RUN) -m shoal bench train --against fsdp2

$(VENV)-vllm/.ready: requirements/vllm.txt
	@echo "Setting up $(VENV)-vllm, once; vLLM takes some gigabytes"
	@$(PYTHON) -m venv $(VENV)-vllm
	@$(VENV)-vllm/bin/python -m pip install --quiet --disable-pip-version-check \
	    --requirement requirements/vllm.txt
	@# Their wheels are for another torch than the CPU's, and break what imports them beside it.
	@$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

bench-engine: $(READY) $(VENV)-vllm/.ready  ## serving engine side by side with vLLM
	$(RUN) -m shoal bench engine --against vllm

bench-checkpoint: $(READY)  ## saves and loads side by side with torch DCP and a plain write
	$(RUN) -m shoal bench checkpoint --against dcp

bench-serve: $(READY)  ## clients over HTTP side by side with the engine alone
	$(RUN) -m shoal bench serve

storm-serve: export OMP_NUM_THREADS = 1
storm-serve: $(READY)  ## 1,000 clients that leave a server at random moments
	$(RUN) -m tests.deployments.storm

fuzz-serve: export OMP_NUM_THREADS = 1
fuzz-serve: $(READY)  ## 10,000 requests, good, spoiled and senseless, to a server
	$(RUN) -m tests.deployments.fuzz

storm-train: export OMP_NUM_THREADS = 1
storm-train: $(READY)  ## 50 SIGKILLs at random instants of a run, held against a calm one
	$(RUN) -m tests.e2e.storm

lint: $(READY)  ## style, types and the layer contract
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

format: $(READY)  ## put the sources in order
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

docs: $(READY)  ## write docs/configuration.md from the configuration tree
	$(RUN) -m shoal.config.reference docs/configuration.md

clean:  ## remove the environment and every cache; runs/ stays
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find platform actors deployments tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
