.PHONY: help setup sim demo test lint check clean
VENV := .venv
SIM := .venv-sim
PY := $(VENV)/bin/python
# CUDA generation of the DALI wheel: 13 (default) or 12.
CUDA ?= 13

help:
	@echo "make demo   train on the shipped sample, on the CPU (sets up .venv first)"
	@echo "make test   run the tests (sets up .venv first)"
	@echo "make sim    set up the LIBERO simulator in .venv-sim, for demos and evaluation"
	@echo "make lint   ruff and mypy"
	@echo "make setup  only set up .venv; CUDA=12 for the CUDA 12 decoder"

$(VENV)/.ready: requirements.lock pyproject.toml scripts/setup.sh
	@scripts/setup.sh $(VENV) requirements.lock -e .
	@if [ "$(CUDA)" = 12 ]; then $(PY) -m pip uninstall --quiet -y nvidia-dali-cuda130 && $(PY) -m pip install --quiet ".[cuda12]"; fi

$(SIM)/.ready: requirements-sim.lock scripts/setup.sh scripts/setup_sim.sh
	@scripts/setup_sim.sh $(SIM) requirements-sim.lock

setup: $(VENV)/.ready

sim: setup $(SIM)/.ready

demo: setup
	$(VENV)/bin/somaspeed-train --config configs/pi05/somaspeed-tiny.toml --shards shards/libero_spatial_sample

test: setup
	$(PY) -m pytest

lint: setup
	$(PY) -m ruff check .
	$(PY) -m mypy

clean:
	rm -rf $(VENV) $(SIM) build *.egg-info
