# Every target sets up what it needs: Linux with Python >= 3.11 (and its venv module), g++ and make is enough.
# The first run creates .venv, installs the versions of constraints.txt and compiles; later runs reuse them.
# pip's own settings (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, ...) say where packages come from: point one at torch's CPU
# builds, which are preferred where offered, to spare yourself the gigabytes of a CUDA build.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install -qq --no-compile  # what is imported is compiled then: a small part
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --no-loadscope-reorder  # tests/conftest.py has sorted them

# A fork copies the tables of all memory that its process has. So tests that fork by the hundred run by themselves, in
# processes that have not imported Lightning, Ray and the libraries that tests compare with.
FORKING := $(addprefix tests/,segment buffer checking checkpoint monitoring weights package/test_faults.py)

# Hundreds of processes of the tests import the package: it is compiled to bytecode once.
unexport PYTHONDONTWRITEBYTECODE

# $(call pytest,marks)
define pytest
$(if $(ARGS),,$(PYTEST) --dist loadfile -m "$(1)" $(FORKING))
$(PYTEST) --dist loadfile -m "$(1)" $(or $(ARGS),tests $(FORKING:%=--ignore=%))
endef

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all lint format bench docs soak soak-cpp soak-tests soak-fuzzers build compiled playable \
    faults wheel release-check clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' Makefile tests/fuzz/fuzz.mk | expand -t 15

demo:  ## learn CartPole-v1 with Ape-X: Ray explorers, Lightning learner
	@$(MAKE) --no-print-directory --jobs 2 playable
	$(BIN)/python examples/apex_cartpole.py $(ARGS)

test: build faults  ## every promise in about five minutes: the tests that are quick
	$(call pytest,not slow and not soak)

test-all: build faults  ## the slow tests, too, and the C++ unit tests (sanitized)
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target test-cpp
	$(call pytest,not soak)

bench: build $(STAMPS)/bench  ## measure torchreplay beside its peers
	$(BIN)/python -m benchmarks $(ARGS)

docs: build  ## the site, in build/docs/index.html; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q -b html -d build/doctrees docs build/docs
	@echo build/docs/index.html

soak: build  ## the long tests, eighty minutes: C++ under all sanitizers, pytest -m soak, fuzzers
	$(MAKE) --no-print-directory --keep-going soak-cpp soak-tests soak-fuzzers

soak-cpp:
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target --keep-going test-cpp CPP_VARIANTS="plain address thread"
soak-tests:
	$(PYTEST) --dist load --maxschedchunk 1 -m soak -o faulthandler_timeout=3600 $(ARGS)
soak-fuzzers:
	$(MAKE) --no-print-directory fuzz ARGS=

build:  ## compile the native modules in place, and install what development needs
	@$(MAKE) --no-print-directory --jobs 2 compiled
compiled: $(STAMPS)/env $(STAMPS)/build
	@:
playable: $(STAMPS)/examples $(STAMPS)/build
	@:

faults: build  ## compile the module with which tests let processes die where they choose
	$(BIN)/python tests/support/fault_build.py

wheel: build  ## one cp311-abi3 wheel in dist/
	rm -rf build/lib.* build/bdist.*
	$(PIP) wheel -qq --no-build-isolation --no-deps --wheel-dir dist .
	@ls -t dist/*.whl | head -n 1

release-check: build $(STAMPS)/release  ## an sdist and a manylinux wheel, each learning CartPole in a fresh environment
	$(BIN)/python .ci/release_check.py $(ARGS)

clean:  ## remove what was built; the environment stays
	rm -rf build dist *.egg-info torchreplay/*.abi3.so $(STAMPS)/build

# clang-tidy sees all core headers as one unit, and each binding as another.
CPP_FILES = $(wildcard cpp/*.cpp cpp/*/*.h tests/cpp/*/*.h tests/cpp/*/*.cpp tests/fuzz/*.cpp)
CPP_CORE = $(patsubst cpp/%,%,$(filter-out cpp/python/% cpp/ops/%,$(wildcard cpp/*/*.h)))
CPP_INCLUDES = $(shell $(BIN)/python -c 'import importlib.util as u, os, sysconfig as s; \
    print("-Icpp -isystem", s.get_path("include"), "-isystem", os.path.dirname(u.find_spec("torch").origin) + "/include")')

TIDY := $(BIN)/clang-tidy --quiet

lint: build  ## ruff, mypy, import-linter, clang-format, clang-tidy, abi3audit
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint-types lint-bindings lint-ops lint-core lint-rest

.PHONY: lint-types lint-bindings lint-ops lint-core lint-rest
lint-types:
	$(BIN)/mypy
lint-bindings:
	$(TIDY) cpp/python.cpp -- -std=c++20 -DPy_LIMITED_API=0x030B0000 $(CPP_INCLUDES)
lint-ops:
	$(TIDY) cpp/ops.cpp -- -std=c++20 -DTORCH_TARGET_VERSION=0x020b000000000000 $(CPP_INCLUDES)
lint-core:
	@mkdir -p build/lint && printf '#include "%s"\n' $(CPP_CORE) > build/lint/core.cpp
	$(TIDY) build/lint/core.cpp -- -std=c++20 -DNDEBUG $(CPP_INCLUDES)
lint-rest:
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	$(BIN)/abi3audit --strict --assume-minimum-abi3 3.11 torchreplay/*.abi3.so

format: $(STAMPS)/env  ## rewrite the sources in the house format
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format --quiet .
	$(BIN)/clang-format -i $(CPP_FILES)

# Set-up. A stamp is younger than everything it was made from.

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	    "torchreplay needs Python >= 3.11, and $(PYTHON) is older; name another: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(@D) && touch $@

# torch goes first and alone, so that no other package's wishes choose its build.
$(STAMPS)/torch: constraints.txt | $(STAMPS)/venv
	$(INSTALL) -c constraints.txt torch
	$(INSTALL) -c constraints.txt numpy setuptools wheel
	@touch $@

$(STAMPS)/examples: pyproject.toml $(STAMPS)/torch
	TORCHREPLAY_NATIVE=0 $(INSTALL) --no-build-isolation --no-deps -e .
	$(INSTALL) -c constraints.txt "torchreplay[examples]"
	@touch $@

$(STAMPS)/env: $(STAMPS)/examples
	$(INSTALL) -c constraints.txt "torchreplay[dev]"
	@touch $@

$(STAMPS)/bench: $(STAMPS)/env
	$(INSTALL) -c constraints.txt "torchreplay[bench]"
	@touch $@

$(STAMPS)/release: $(STAMPS)/env
	$(INSTALL) -c constraints.txt "torchreplay[release]"
	@touch $@

# It needs torch alone: packages are installed meanwhile. setuptools compiles again only the module whose sources changed.
$(STAMPS)/build: setup.py $(wildcard cpp/*.cpp cpp/*/*.h) $(STAMPS)/torch
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

include tests/cpp/tests.mk
include tests/fuzz/fuzz.mk
