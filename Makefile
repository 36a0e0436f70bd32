# Everything a fresh machine needs is done by the targets themselves:
#   make demo    five Permuted-MNIST tasks, six methods: SGD forgets, RGO does not
#   make test    the test suite
#   make check   what CI asks of a change: ruff, mypy --strict, tests with warnings as errors
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test check lint docs install clean

demo: install
	$(BIN)/rgo demo

test: install
	$(BIN)/python -m pytest -m "not paper"

check: lint test docs

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

install: $(VENV)/installed

# torch comes first, from the pin: a later resolver must not replace the CPU build with a CUDA one.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit('rgo needs Python 3.11 or newer; this is ' + sys.version.split()[0] + '. Say: make PYTHON=python3.12 ...') if sys.version_info < (3, 11) else None"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache build dist
