# Two commands do everything on a fresh machine with Python >= 3.11: `make demo` and `make test`.

PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))))
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test lint bench clean

demo: $(VENV)/demo.stamp
	$(BIN)/terrafirma demo

test: lint
	NUMBA_DISABLE_JIT=1 $(BIN)/python -m pytest -q -m "not jit" tests
	$(BIN)/python -m pytest -q

lint: $(VENV)/test.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(VENV)/test.stamp
	$(PIP) -e ".[bench]"
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) terrafirma-demo

$(VENV)/created.stamp:
	@test -n "$(PYTHON)" || { echo "terrafirma needs Python 3.11 or newer: none was found. Try make PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/demo.stamp: $(VENV)/created.stamp pyproject.toml
	$(PIP) -e ".[plots]"
	touch $@

# torch by this exact spelling: others bring gigabytes of packages for graphics cards
$(VENV)/test.stamp: $(VENV)/created.stamp pyproject.toml
	$(PIP) torch==2.13.0
	$(PIP) -e ".[test]"
	touch $@
