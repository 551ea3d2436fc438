# Everything happens in a virtual environment of its own (.venv); nothing else on the machine is touched.
#
#   make demo    real weights, two FSDP2 ranks, a follower in another process, compared bit for bit
#   make test    the whole test suite
#   make quick   the tests that need neither several ranks nor more than a few seconds each
#   make lint    ruff and mypy
#   make clean   remove .venv and everything that tools left behind
#
# PYTHON=python3.12 chooses the interpreter, ARGS="-k follower" is passed on to pytest or to the demo. TORCH names the
# torch to install: pinned, because an open version resolves to the newest CUDA build, gigabytes that no test needs; the
# pin takes the CPU build wherever the package index in use offers one.

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
QUICK := not slow and not dist and not vllm and not s3 and not gpu

.DEFAULT_GOAL := help
.PHONY: help demo test quick lint format clean install

help:
	@sed -n '3,7s/^#   //p' Makefile

demo: $(VENV)/.installed
	$(BIN)/python -m examples.demo $(ARGS)

test: $(VENV)/.installed
	$(BIN)/python -m pytest $(ARGS)

quick: $(VENV)/.installed
	$(BIN)/python -m pytest -m "$(QUICK)" $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

install: $(VENV)/.installed

clean:
	rm -rf $(VENV) demo-out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Three stamps, so that a second run installs nothing and a changed pyproject.toml does not fetch torch again.
$(VENV)/.created:
	@$(PYTHON) scripts/check_python.py
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { echo "python's venv module is missing (Debian, Ubuntu: install python3-venv)"; exit 1; }
	@touch $@

$(VENV)/.torch: $(VENV)/.created
	@echo "installing $(TORCH)"
	@$(PIP) install --quiet "$(TORCH)"
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	@echo "installing torch_delta with its development tools"
	@$(PIP) install --quiet --editable ".[dev]"
	@touch $@
