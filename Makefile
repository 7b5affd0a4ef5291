# The commands of the README are `make demo`, `make test`, `make docs` and `make bench`; each makes .venv.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Every process of a test or of the demo would compile the modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo pictures test test-long test-slow test-oldest lint docs bench wheel clean

$(STAMP): pyproject.toml requirements/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -c requirements/constraints.txt torch
	$(BIN)/python -m pip install -q -c requirements/constraints.txt -e '.[dev]'
	touch $@

# make demo TIER=s3: with a second tier on an S3 server that the demo starts; the local folder is lost, and the run resumes from S3.
demo: $(STAMP)
	$(BIN)/python examples/demo.py $(if $(TIER),--tier $(TIER))

# The pictures of the README, from a demo and from commands that run here.
pictures: demo
	cp demo-out/demo.svg docs/figures/demo.svg
	$(BIN)/python examples/record_terminal.py docs/figures/terminal.svg

# Two processes per core, because tests also wait; those of a file share what they start. Threads of torch that wait leave
# the cores to the others, and numpy has none, which each fork would end and start again.
QUIET := OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1
test: $(STAMP)
	$(QUIET) $(BIN)/python -m pytest --workers auto

# The cells of tests that `make test` leaves out, and tests of several seconds.
test-long: $(STAMP)
	$(QUIET) $(BIN)/python -m pytest -m 'long and not slow and not gpu' --workers auto

# Machines and servers that tests start themselves need the cores for themselves.
SLOW := -m 'slow or hypothesis' --timeout 3600 --hypothesis-profile explore
test-slow: $(STAMP)
	$(QUIET) $(BIN)/python -m pytest $(SLOW) --workers auto --ignore=tests/real
	$(BIN)/python -m pytest $(SLOW) tests/real

# The floors of pyproject.toml. What old libraries warn of is no error there.
test-oldest:
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/pip install -q -c requirements/oldest.txt torch -e '.[dev]'
	$(VENV)-oldest/bin/python -m pytest -m 'not slow and not gpu' --workers auto -W default --ignore=tests/house \
		--ignore=tests/typing

# The wheel and the source, and the wheel tried in a fresh environment.
wheel:
	rm -rf dist && $(PYTHON) -m venv dist/.venv && dist/.venv/bin/pip install -q build && dist/.venv/bin/python -m build -q
	rm -rf dist/.venv && $(PYTHON) -m venv dist/.venv
	dist/.venv/bin/pip install -q -c requirements/constraints.txt "$$(echo dist/*.whl)[all]"
	dist/.venv/bin/pip check && dist/.venv/bin/ckpt --version && dist/.venv/bin/python -c "import lightning_ckpt, accelerate_ckpt"
	rm -rf dist/.venv

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/typing/api.py
	$(BIN)/lint-imports

# The site, in `site/`; a broken link or anchor is an error, but with `-q` it would not be. No request leaves the machine.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(STAMP)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) $(VENV)-oldest build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis demo-out bench-out
