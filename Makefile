# Every target sets up what it needs by itself, once; `make help` lists them.

VENV ?= .venv
CONSTRAINTS ?= constraints/dev.txt
OVERRIDES ?=
PYTHON ?=
PYTEST_ARGS ?=
# By files: the code blocks of a page build on one another.
PYTEST_WORKERS ?= 2
SLIME_DIR ?=
# An interpreter that has SGLang, its router and transformers; empty for an environment without a
# GPU that is made in the cache directory. And what they run on, cpu or cuda.
SGLANG_PYTHON ?=
SGLANG_DEVICE ?= cpu
# One more package index, for torch: the builds for Linux elsewhere often bring CUDA, 3 GB of it.
TORCH_INDEX ?=

# What slime's rollout side imports, beside torch and what turnleaf's own tests need.
SLIME_IMPORTS = pillow pybase64 pylatexenc ray requests sympy tqdm wandb

# The agent clients of docs/clients.md. strands-agents needs openai 2; the others go with 3, too.
CLIENTS_OF_OPENAI3 = langchain langchain-openai litellm openai-agents pydantic-ai-slim smolagents
CLIENTS = $(CLIENTS_OF_OPENAI3) strands-agents

# What AgentCoreRuntimeApp and AgentCoreHttpSession must get on with.
TOOLKIT = agentcore-rl-toolkit[core]

# What a target of its own adds to an environment: see scripts/make-venv.
PREFERRED =
PACKAGES =
TORCH =

TRY_AGENT = examples/calculator/agent.py:run
TRY_PAYLOAD = {"prompt": "What is 17 * 23?", "answer": 391}
TRY_CALL = {"name": "calculator", "arguments": {"a": 17, "operation": "*", "b": 23}}

SHELL_SCRIPTS = .ci/run scripts/find-python scripts/make-sglang-env scripts/make-venv \
	$(wildcard examples/*/*.sh src/turnleaf/adapters/slime/scripts/*.sh)

BIN = $(VENV)/bin
# Named after what it was made under, so that a change of constraints is seen.
EMPTY =
SPACE = $(EMPTY) $(EMPTY)
STAMP = $(VENV)/.made-under-$(subst $(SPACE),-,$(strip $(basename $(notdir $(CONSTRAINTS) $(OVERRIDES)))))

export COVERAGE_FILE = $(VENV)/.coverage

.PHONY: help venv test demo try lint benchmark math-agent clients-venv test-clients test-openai3 test-interop test-slime test-sglang clean

help:
	@echo "make test          run the tests; core must be covered to 95 %"
	@echo "make demo          watch a small policy learn through the whole path; about a minute"
	@echo "make try           run one rollout of an example agent and show what would be trained"
	@echo "make math-agent    rollouts of a strands agent through the slime hooks, and what would be trained"
	@echo "make lint          ruff, mypy, import-linter, shellcheck"
	@echo "make benchmark     what a turn costs the gateway, and the one of agentcore-rl-toolkit; some ten minutes"
	@echo "make test-clients  real agent clients (strands, langgraph, litellm, …) against the gateway"
	@echo "make test-openai3  the tests that use openai, agent clients included, under openai 3"
	@echo "make test-interop  agents and clients of agentcore-rl-toolkit, each with turnleaf's other side"
	@echo "make test-slime    the tests of the slime hooks, on a checkout of slime: SLIME_DIR=…"
	@echo "make test-sglang   the gateway on SGLang itself, without a GPU: log-probabilities, ledger, cache"
	@echo "make venv          only set up the environment"
	@echo "make clean         remove the environments, caches and build products"
	@echo
	@echo "Variables: PYTHON=…, VENV=$(VENV), CONSTRAINTS=$(CONSTRAINTS), OVERRIDES=…, PYTEST_ARGS=…, PYTEST_WORKERS=$(PYTEST_WORKERS), BENCHMARK_ARGS=…"
	@echo "TORCH_INDEX=… is a package index with a torch for CPUs, for make test-slime and test-sglang."
	@echo "With TURNLEAF_REQUIRE_ALL=1 a skipped test fails."

venv: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS) $(OVERRIDES) scripts/make-venv scripts/find-python
	@VENV='$(VENV)' CONSTRAINTS='$(CONSTRAINTS)' OVERRIDES='$(OVERRIDES)' PYTHON='$(PYTHON)' \
		PREFERRED='$(PREFERRED)' PACKAGES='$(PACKAGES)' TORCH='$(TORCH)' \
		TORCH_INDEX='$(TORCH_INDEX)' scripts/make-venv
	@rm -f $(VENV)/.made-under-*
	@touch $@

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses=$(PYTEST_WORKERS) --dist=loadfile --cov --cov-report= $(PYTEST_ARGS)
	$(BIN)/python -m coverage report --include='*/turnleaf/core/*' --fail-under=95

demo: $(STAMP)
	$(BIN)/turnleaf demo

try: $(STAMP)
	$(BIN)/turnleaf try $(TRY_AGENT) --payload '$(TRY_PAYLOAD)' \
		--reply '<tool_call>$(TRY_CALL)</tool_call>' --reply '17 * 23 is 391.'

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/shellcheck --external-sources $(SHELL_SCRIPTS)
	$(BIN)/python -m mypy --strict src
	$(BIN)/lint-imports

benchmark: $(STAMP)
	$(BIN)/python benchmarks/gateway.py $(BENCHMARK_ARGS)

clients-venv:
	$(MAKE) venv VENV=.venv-clients OVERRIDES=constraints/clients.txt PACKAGES='$(CLIENTS)'

math-agent: clients-venv
	.venv-clients/bin/python -m tests.math_agent

test-clients: clients-venv
	.venv-clients/bin/python -m pytest tests/test_clients.py docs/clients.md $(PYTEST_ARGS)

test-openai3:
	$(MAKE) venv VENV=.venv-openai3 PACKAGES='$(CLIENTS_OF_OPENAI3)' \
		OVERRIDES='constraints/openai3.txt constraints/clients.txt'
	.venv-openai3/bin/python -m pytest -m openai_client $(PYTEST_ARGS)

test-interop:
	$(MAKE) venv VENV=.venv-interop OVERRIDES=constraints/interop.txt PACKAGES='$(TOOLKIT)'
	.venv-interop/bin/python -m pytest tests/test_interop.py $(PYTEST_ARGS)

test-slime:
	@test -f '$(SLIME_DIR)/slime/rollout/sglang_rollout.py' || { \
		echo "SLIME_DIR='$(SLIME_DIR)' is no checkout of slime: make test-slime SLIME_DIR=/path/to/slime" >&2; \
		exit 1; }
	$(MAKE) venv VENV=.venv-slime CONSTRAINTS=constraints/slime.txt \
		OVERRIDES=constraints/test-slime.txt PREFERRED=3.11 PACKAGES='$(SLIME_IMPORTS)' TORCH=yes
	TURNLEAF_SLIME_DIR="$$(cd '$(SLIME_DIR)' && pwd)" \
		.venv-slime/bin/python -m pytest -m slime $(PYTEST_ARGS)

# The tests run in $(VENV), the engine in an environment of its own. Starting engines takes a while.
test-sglang: $(STAMP)
	@python='$(SGLANG_PYTHON)'; [ -n "$$python" ] || \
		python="$$(TORCH_INDEX='$(TORCH_INDEX)' scripts/make-sglang-env)/bin/python" || exit 1; \
	TURNLEAF_SGLANG_PYTHON="$$python" TURNLEAF_SGLANG_DEVICE='$(SGLANG_DEVICE)' \
		$(BIN)/python -m pytest -m sglang -rP --timeout=900 \
		tests/test_sglang_real.py tests/test_sglang_parsers.py $(PYTEST_ARGS)

clean:
	rm -rf .venv .venv-* build dist htmlcov .coverage .hypothesis .import_linter_cache
	rm -rf .mypy_cache .pytest_cache .ruff_cache
	find conftest.py src tests benchmarks examples docs -name __pycache__ -type d -prune -exec rm -rf {} +
