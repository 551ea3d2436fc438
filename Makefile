# Everything happens in virtual environments of their own (.venv, .venv-vllm, .venv-skyrl); nothing else on the machine is touched.
#
#   make demo        real weights, two FSDP2 ranks, a follower in another process, compared bit for bit
#   make demo-vllm   a policy learns from a running vLLM server that takes over every version while it generates
#   make test        the whole test suite: what needs no vLLM, then what does, then what needs SkyRL
#   make test-vllm   the tests that need vLLM
#   make test-skyrl  the tests that need SkyRL, beside that vLLM
#   make quick       the tests that need neither vLLM, several ranks nor more than a few seconds each
#   make lint        ruff and mypy
#   make clean       remove the environments and everything that tools left behind
#
# PYTHON=python3.12 chooses the interpreter, ARGS="-k follower" is passed on to pytest or to the demo. TORCH names the
# torch to install: pinned, because an open version resolves to the newest CUDA build, gigabytes that no test needs; the
# pin takes the CPU build wherever the package index in use offers one. VLLM=0.31.0 runs tests/vllm with that release of
# vLLM, in an environment of its own (.venv-vllm-0.31.0); docs/vllm.md says which releases were tested.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VLLM_DEFAULT := 0.32.0
VLLM ?= $(VLLM_DEFAULT)
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
VLLM_VENV := .venv-vllm$(if $(filter-out $(VLLM_DEFAULT),$(VLLM)),-$(VLLM))
VLLM_BIN := $(VLLM_VENV)/bin
SKYRL_VENV := .venv-skyrl
SKYRL_BIN := $(SKYRL_VENV)/bin
# With another release of vLLM only what is about vLLM itself.
VLLM_ONLY := $(if $(filter-out $(VLLM_DEFAULT),$(VLLM)),--deselect=tests/trl --deselect=tests/benchmarks)
QUICK := not slow and not dist and not vllm and not skyrl and not s3 and not gpu
# With TORCH_DELTA_LANE=vllm none of them is skipped, and the run fails if none passed (tests/lanes.py).
VLLM_TESTS := TORCH_DELTA_LANE=vllm $(VLLM_BIN)/python -m pytest -m vllm tests/vllm $(wildcard tests/trl) tests/benchmarks
SKYRL_TESTS := TORCH_DELTA_LANE=skyrl $(SKYRL_BIN)/python -m pytest -m skyrl tests/skyrl
NOTHING_SELECTED := 5

.DEFAULT_GOAL := help
.PHONY: help demo demo-vllm test test-vllm test-skyrl quick lint format clean install

help:
	@sed -n '3,10s/^#   //p' Makefile

demo: $(VENV)/.installed
	$(BIN)/python -m examples.demo $(ARGS)

demo-vllm: $(VLLM_VENV)/.installed
	$(VLLM_BIN)/python -m examples.demo_vllm $(ARGS)

# Only where ARGS chose tests may the other lanes be left with none.
test: $(VENV)/.installed $(VLLM_VENV)/.installed $(SKYRL_VENV)/.installed
	$(BIN)/python -m pytest -m "not vllm and not skyrl" $(ARGS)
	$(VLLM_TESTS) $(ARGS) || { status=$$?; $(if $(strip $(ARGS)),[ $$status -eq $(NOTHING_SELECTED) ] ||) exit $$status; }
	$(SKYRL_TESTS) $(ARGS) || { status=$$?; $(if $(strip $(ARGS)),[ $$status -eq $(NOTHING_SELECTED) ] ||) exit $$status; }

test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_TESTS) $(VLLM_ONLY) $(ARGS)

test-skyrl: $(SKYRL_VENV)/.installed
	$(SKYRL_TESTS) $(ARGS)

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
	rm -rf $(VENV) .venv-vllm .venv-vllm-* $(SKYRL_VENV) demo-out demo-vllm-out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
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

# The same for vLLM, whose wheel is not of the package index's making and needs a hand (scripts/install_vllm.py).
$(VLLM_VENV)/.created:
	@$(PYTHON) scripts/check_python.py
	@echo "creating $(VLLM_VENV)"
	@$(PYTHON) -m venv $(VLLM_VENV) || { echo "python's venv module is missing (Debian, Ubuntu: install python3-venv)"; exit 1; }
	@touch $@

$(VLLM_VENV)/.vllm: $(VLLM_VENV)/.created scripts/install_vllm.py
	@echo "installing $(TORCH) and vLLM $(VLLM)"
	@$(VLLM_BIN)/python scripts/install_vllm.py --torch "$(TORCH)" --vllm "$(VLLM)"
	@touch $@

$(VLLM_VENV)/.installed: $(VLLM_VENV)/.vllm pyproject.toml
	@echo "installing torch_delta beside it"
	@$(VLLM_BIN)/python -m pip --disable-pip-version-check --no-input install --quiet --editable ".[dev-vllm]" "$(TORCH)"
	@touch $@

# SkyRL without its requirements, on top of the environment of vLLM (scripts/install_skyrl.py).
$(SKYRL_VENV)/.installed: $(VLLM_VENV)/.installed scripts/install_skyrl.py
	@echo "installing SkyRL beside it"
	@test -x $(SKYRL_BIN)/python || $(PYTHON) -m venv $(SKYRL_VENV)
	@$(SKYRL_BIN)/python scripts/install_skyrl.py --beside $(VLLM_VENV)
	@touch $@
