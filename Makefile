# Everything works on a fresh machine with Python 3.10 or later: the first target that needs it makes .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The last release with the MPS backend, and the first line without it.
EXECUTORCH := 1.4.1 1.5.1
INPUTS := setup.cfg pyproject.toml constraints.txt stream_pack/_version.py

# Tests run in this many processes, and draw as many examples for a property as tests/conftest.py says of this profile.
WORKERS := 2
PROFILE := quick
PYTEST := $(BIN)/python -m pytest -n $(WORKERS)

.PHONY: help demo test test-slow test-all test-executorch lint docs perf clean

help:
	@echo "make demo             pipe a checkpoint generated for it into a pack, then inspect and verify it"
	@echo "make test             the tests, but for the slow ones and those that need ExecuTorch"
	@echo "make test-slow        the slow ones: gigabytes, every byte of a file, packages from the network"
	@echo "make test-all         both"
	@echo "make test-executorch  those, with ExecuTorch $(EXECUTORCH)"
	@echo "make lint             ruff, formatting, types, import contracts"
	@echo "make docs             write the reference in docs/python.md from the docstrings"
	@echo "make perf             benchmarks against cp, cat and safetensors"
	@echo "make clean            remove what these targets made"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# One stamp for each set of extras: it is older than setup.cfg or constraints.txt when something may have changed.
$(VENV)/.installed-%: $(INPUTS) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

demo: $(VENV)/.installed-progress
	@PYTHON="$(CURDIR)/$(BIN)/python" bash examples/demo.sh

test: $(VENV)/.installed-test
	$(PYTEST) -m "not slow" --hypothesis-profile $(PROFILE)

test-slow: $(VENV)/.installed-test
	$(PYTEST) -m slow --hypothesis-profile ci

test-all: $(VENV)/.installed-test
	$(PYTEST) --hypothesis-profile ci

# Each release in an environment of its own: two cannot be had in one.
$(VENV)-executorch-%/.installed: $(INPUTS)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[test]' 'executorch==$*'
	@touch $@

test-executorch: $(EXECUTORCH:%=$(VENV)-executorch-%/.installed)
	@set -e; for version in $(EXECUTORCH); do \
		echo "ExecuTorch $$version"; \
		$(VENV)-executorch-$$version/bin/python -m pytest tests/executorch; \
	done

lint: $(VENV)/.installed-dev $(VENV)/.installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.installed-test
	$(BIN)/python docs/reference.py

perf: $(VENV)/.installed-test
	$(BIN)/python -m perf

clean:
	rm -rf $(VENV) $(VENV)-executorch-* build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
