# `make vit` trains, `make test` tests, `make lint` checks types and style. Each sets up .venv first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NPROC ?= 4
ARGS ?=
export OMP_NUM_THREADS ?= 1

.PHONY: vit test gpu lint clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,examples]'
	touch $(READY)

vit: $(READY)
	$(BIN)/torchrun --standalone --nproc-per-node $(NPROC) examples/vit/train.py $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

# On a host with a CUDA device and torch installed; needs no set-up.
gpu:
	PYTHONPATH=.:plugins $(PYTHON) -m pytest tests/gpu -rs $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) outputs .mypy_cache .pytest_cache .ruff_cache
