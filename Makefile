# Everything runs in .venv, which is made on first use. `make demo` and `make test` are all that is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
# Every worker is a process of its own: none should compile again what another has compiled.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup system demo test tests lint style types docs bench compatibility clean

setup: $(VENV)/ready

INSTALL := $(BIN)/pip install --no-compile --progress-bar off --disable-pip-version-check --constraint constraints.txt --editable

$(BIN)/python:
	@echo "make: creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# What the demo needs is a part of what the tests need.
$(VENV)/demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "make: installing paceline, PyTorch and scikit-learn into $(VENV); PyTorch is large: some minutes, once"
	@$(INSTALL) '.[examples]'
	@touch $@

$(VENV)/ready: $(VENV)/demo
	@echo "make: installing what tests, benchmarks and docs need into $(VENV): Ray, frameworks, tools; some minutes, once"
	@$(INSTALL) '.[dev,examples]'
	@touch $@

demo: $(VENV)/demo
	@$(BIN)/python examples/demo.py

# Each part reports, also if one before it has failed.
lint: setup
	@$(MAKE) --no-print-directory --keep-going style types

style: setup
	@echo "make: style (ruff)"
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: setup
	@echo "make: types (mypy; minutes the first time, seconds later)"
	@$(BIN)/mypy

# Tests of several machines make network namespaces with ip(8); those of pages look at them in chromium.
system:
	@missing=""; \
	command -v ip >/dev/null || missing="$$missing iproute2"; \
	command -v chromium >/dev/null || missing="$$missing chromium"; \
	[ -z "$$missing" ] && exit 0; \
	echo "make: installing$$missing with apt-get"; \
	{ [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq $$missing >/dev/null; } \
	  || { echo "make: please install$$missing; this user may not" >&2; exit 1; }

# Tests mostly wait, so three at a time take little more than a third as long; long ones (chaos) come first.
# One that fails beside others is run again by itself: what fails twice fails, and the rest is named in the first run's last lines.
PYTEST := $(BIN)/python -m pytest
tests: setup system
	@echo "make: tests (pytest, three at a time)"
	@$(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder tests/chaos tests/integration tests/unit || { \
	  [ $$? = 1 ] && echo "make: again, one at a time, the tests that have failed beside others (the first to fail again ends it)" \
	  && $(PYTEST) --exitfirst --last-failed --last-failed-no-failures none tests/chaos tests/integration tests/unit; }

test: setup
	@$(MAKE) --no-print-directory --keep-going style types tests

# Strict: a link that leads nowhere, or a page that is not in the nav of mkdocs.yml, is an error.
docs: setup
	@echo "make: docs (mkdocs)"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "make: open build/site/index.html"

bench: setup
	$(BIN)/python benchmarks/all_reduce.py
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/policies.py
	$(BIN)/python benchmarks/parameter_server.py
	$(BIN)/python benchmarks/time_to_accuracy.py
	$(BIN)/python benchmarks/recording.py
	$(BIN)/python benchmarks/recording_ddp.py
	$(BIN)/python benchmarks/faults.py
	$(BIN)/python benchmarks/report.py
	$(BIN)/python benchmarks/simulator.py
	$(BIN)/python benchmarks/prediction.py
	$(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/advice.py
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/bubble.py
	$(BIN)/python benchmarks/partition.py
	$(BIN)/python benchmarks/tensor.py
	$(BIN)/python benchmarks/mesh.py
	$(BIN)/python benchmarks/split_machines.py
	$(BIN)/python benchmarks/network.py --servers

# What every script of tests/zoo does under every strategy.
compatibility: setup
	$(BIN)/python tests/zoo/table.py > docs/compatibility.md

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
