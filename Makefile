# `make run` does the main job on embedded data, `make test` checks, `make test-long` runs the tests that take long.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.run
READY := $(VENV)/.ready
DOCS := .venv-docs
PEER := .venv-peer
INTEGRATIONS := .venv-integrations
NOTEBOOKS := .venv-notebooks

.PHONY: run docs docs-serve notebooks release test test-long test-browser test-integrations test-rounding attack check bench setup lint types imports \
	pytest uci peer clean

run: $(RUN)
	PYTHONDONTWRITEBYTECODE= $(BIN)/lapwing demo --out out

# mypy takes one core for a minute: beside it, the tests have begun.
test: $(READY)
	$(MAKE) --no-print-directory -j 2 lint imports types pytest

setup: $(READY)

# Set up once; again only when the pins or the dependencies change. `make run` needs nothing for development; what the
# checks need holds that too, so that they take one installation. No bytecode in advance: most modules are never imported.
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

$(RUN): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e ".[run]"
	touch $@

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e ".[test]"
	touch $(RUN) $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

# Two workers, one thread each: more threads than cores only wait for each other. Each takes one half of the tests in
# order, so that tests of one file share their fixtures and caches; the faster one then takes from the other. Bytecode is
# kept for the next run: without it each worker compiles all tests and the library, and every child process the library.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

# Experiments in their quick forms, the demo and tutorials, and grids of methods by networks: over a minute, and whoever
# changes one of them runs it. Continuous integration runs all.
LONG := tests/experiments tests/unit/demo tests/unit/test_tutorials.py tests/conformance/test_long.py \
	tests/unit/methods/test_hfl_long.py \
	tests/unit/tuners/test_linear_mode.py \
	tests/unit/tuners/test_sample_em.py tests/unit/posteriors/test_variance_of.py

pytest: $(READY)
	$(PYTEST) tests/unit tests/conformance lapwing experiments README.md $(LONG:%=--ignore=%)

test-long: $(READY)
	$(PYTEST) $(LONG)

# Reports and the site in headless Chromium, on a phone and a desk; screenshots of reports are written to out/browser.
test-browser: $(READY) docs
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
		{ echo "make test-browser needs Chromium: apt-get install chromium"; exit 1; }
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/browser

# Against the real scikit-learn, skorch, Lightning, BoTorch, ONNX and laplace-torch, in an environment of their own.
test-integrations: $(INTEGRATIONS)/.ready
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(INTEGRATIONS)/bin/pytest tests/integrations

# laplace-torch asks for torchvision, whose build does not load beside a CPU build of torch, and does not need it.
$(INTEGRATIONS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,integrations]" laplace-torch==0.3
	$(INTEGRATIONS)/bin/pip uninstall --quiet --yes torchvision
	touch $@

# The whole suite under other vector units, other orders of summation, two threads and other seeds; an hour or more.
# Some of them: make test-rounding REGIMES="avx2 seed1"; some tests: ARGS=tests/unit/linalg.
test-rounding: $(READY)
	$(BIN)/python -m tests.rounding $(REGIMES) -- $(ARGS)

# Thousands of damaged files and other attacks with random cases; one of them: make attack ARGS="files --count 100".
attack: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.attack $(ARGS)

# One part of the suite, in seconds: make check FILE=tests/unit/linalg (or a file of the library: its tests run).
check: $(READY)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/pytest $(FILE)

bench: $(READY)
	$(BIN)/python -m benchmarks.spine --peer $(PEER)/bin/python --out out/spine.json

# laplace-torch 0.3 in an environment of its own, for the comparison in `make bench`.
peer:
	$(PYTHON) -m venv $(PEER)
	$(PEER)/bin/pip install --quiet -c constraints.txt torch laplace-torch==0.3
	$(PEER)/bin/pip uninstall --quiet --yes torchvision

# The documentation site, in site/: strict, so that a link or a name that does not exist ends the build. Needs no torch.
docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet

docs-serve: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs serve

$(DOCS)/.ready: docs/site/requirements.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check -r docs/site/requirements.txt
	touch $@

# The notebooks of the manual, executed in place, one core and less than two minutes each.
notebooks: $(NOTEBOOKS)/.ready
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(NOTEBOOKS)/bin/jupyter nbconvert --to notebook --execute --inplace \
		--ExecutePreprocessor.record_timing=False docs/notebooks/*.ipynb

$(NOTEBOOKS)/.ready: pyproject.toml constraints.txt docs/notebooks/requirements.txt
	$(PYTHON) -m venv $(NOTEBOOKS)
	$(NOTEBOOKS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -r docs/notebooks/requirements.txt -e ".[run]"
	touch $@

# What a release needs: versions that agree, wheel and sdist with what they should hold, the README's example and the tests
# from an installed copy in another folder, the site. Prints a line for each; CONTRIBUTING.md says what is left to do by hand.
release: $(READY) $(DOCS)/.ready
	$(BIN)/python -m tests.release $(ARGS)

uci: $(READY)
	@test -n "$(DATA)" || { echo "make uci needs the data folder: make uci DATA=DIR"; exit 1; }
	$(BIN)/python -m experiments uci --data-dir "$(DATA)" --out out

clean:
	rm -rf $(VENV) $(PEER) $(INTEGRATIONS) $(DOCS) $(NOTEBOOKS) out site dist
