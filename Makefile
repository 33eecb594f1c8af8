# `make demo` and `make test` set up everything on a fresh machine; `make help` lists the rest.
# Needed beforehand: Python 3.11 or newer with its headers and venv, make, a C compiler.

PYTHON  ?= python3
VENV    ?= .venv
# More arguments for pytest, e.g. make test ARGS="-m 'not slow'"
ARGS    ?=

PY      := $(VENV)/bin/python
PIP     := $(PY) -m pip --quiet --disable-pip-version-check
KERNELS := $(wildcard mamba_fast/*.pyx mamba_fast/*.pxi mamba_fast/*.pxd mamba_fast/*.h)
# Taken when make starts, so that the demo can leave out of its training time what the set-up took.
STARTED := $(shell date +%s)

.DEFAULT_GOAL := help
.PHONY: help demo test conformance bench bench-compare bench-ops bench-peers lint format dev dist clean
.DELETE_ON_ERROR:

help:
	@echo "make demo         set up, train a small model on Python's own source, print samples (< 5 minutes)"
	@echo "make test         set up, run all tests (< 10 minutes; ARGS=\"-m 'not slow'\" for the quick ones)"
	@echo "make dev          set up $(VENV) and rebuild the kernels that changed"
	@echo "make conformance  the backend contract on every backend of the checkout"
	@echo "make bench        the table of docs/performance.md, measured here (8 minutes; the peers need bench-peers)"
	@echo "make bench-compare  the same, and fail where a ratio is a fifth worse than this machine's baseline"
	@echo "make bench-ops    every op, a block, training and decoding, with pytest-benchmark"
	@echo "make bench-peers  install what the table compares with (torch, transformers, mambapy)"
	@echo "make lint         ruff and cython-lint;  make format  lets ruff rewrite the files"
	@echo "make dist         sdist and wheel in dist/"
	@echo "make clean        remove what the targets above made"
	@echo "PYTHON=python3.12 chooses the interpreter (now: $(PYTHON))"

# ---- set-up: one stamp for each step, kept in the environment it speaks of ----

$(VENV)/.made:
	@$(PYTHON) tools/preflight.py
	@echo "Setting up $(VENV) (once; a minute or two) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install 'setuptools>=77' 'Cython>=3.2'
	@touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml gpu_plugin/pyproject.toml
	@echo "Installing mamba-fast and mamba-fast-wgpu, both editable, with the tests' dependencies ..."
	@$(PIP) install --no-build-isolation -e '.[test]' -e ./gpu_plugin
	@touch $(VENV)/.kernels $@

# An installation has just built them, so the recipe looks for itself whether something is newer.
$(VENV)/.kernels: $(VENV)/.installed setup.py $(KERNELS)
	@if [ ! -e $@ ] || [ -n "$$(find setup.py $(KERNELS) -newer $@)" ]; then \
		echo "Building the kernels that changed ..."; \
		$(PY) setup.py --quiet build_ext --inplace; \
	fi
	@touch $@

# The extra "dev" without the package itself, which would be built for it.
DEV := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["dev"])

$(VENV)/.linters: $(VENV)/.made pyproject.toml
	@$(PIP) install $$($(PY) -c '$(DEV)')
	@touch $@

# ---- what people run ----

dev: $(VENV)/.kernels

demo: $(VENV)/.kernels
	@$(PY) examples/stdlib_demo.py --out demo-out --set-up-seconds $$(( $$(date +%s) - $(STARTED) ))

test: $(VENV)/.kernels
	@$(PY) -m pytest $(ARGS)

conformance: $(VENV)/.kernels
	@$(PY) -m pytest -k "conformance" $(ARGS)

# The peers have an environment of their own: nothing else here needs torch. A torch for the CPU alone is enough,
# and PEERS_PIP can say where from: make bench-peers PEERS_PIP="--find-links DIRECTORY".
PEERS     := build/bench-venv
PEERS_PIP ?=

$(PEERS)/.installed: pyproject.toml
	@echo "Setting up $(PEERS) ..."
	@$(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/python -m pip --quiet --disable-pip-version-check install $(PEERS_PIP) \
		$$($(PEERS)/bin/python -c '$(BENCH_NEEDS)')
	@touch $@

# What a benchmark run imports, without the package itself: it runs from the checkout.
BENCH_NEEDS := import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; o = p["optional-dependencies"]; \
	print(*p["dependencies"], *o["bench"], *o["plot"], *(n for e in o for n in o[e] if e.startswith("bench-")))

bench-peers: $(PEERS)/.installed

# The environment with the peers where there is one; BENCH_PY=python names another. What chooses OpenBLAS's kernels
# and blocking by hand would move the floor, so it is left out.
BENCH_PY ?= $(if $(wildcard $(PEERS)/.installed),$(PEERS)/bin/python,$(PY))
BENCH    := env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE PYTHONPATH=. $(BENCH_PY)

bench: $(VENV)/.kernels
	@$(BENCH) bench/table.py $(ARGS)

bench-compare: $(VENV)/.kernels
	@$(BENCH) bench/table.py --compare --no-picture $(ARGS)

bench-ops: $(VENV)/.kernels
	@$(BENCH) -m pytest bench --benchmark-enable --benchmark-only $(ARGS)

lint: $(VENV)/.linters
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@PATH="$(abspath $(VENV))/bin:$$PATH" cython-lint mamba_fast

format: $(VENV)/.linters
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

dist: $(VENV)/.linters
	@rm -rf dist
	@$(PY) -m build

clean:
	rm -rf $(VENV) build dist demo-out .pytest_cache .ruff_cache .hypothesis .benchmarks
	rm -rf *.egg-info gpu_plugin/*.egg-info gpu_plugin/build
	rm -f mamba_fast/*.so mamba_fast/*.pyd mamba_fast/*.c
