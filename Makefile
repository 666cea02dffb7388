# Verbs for newcomers: each does its own set-up on a bare machine with Python 3.11 to 3.13.
.DEFAULT_GOAL := help
.PHONY: help demo box test test-kubernetes test-observability test-slurm test-flux test-ray test-ha test-random check docs bench proto format lock fuzz clean

VENV := .venv
BIN := $(VENV)/bin
# The first interpreter that is there and supported; override with PYTHON=...
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  "$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1 && echo "$$p" && break; done)
OUT ?= bench-out
SEEDS ?= 10
ROUNDS ?= 3
# Processes of the tests: more than the cores of a small machine, since tests of whole programs mostly wait.
WORKERS ?= 5

help:
	@echo "make demo    watch 1,213 agents and a controller place a production trace (about a minute)"
	@echo "make box     start a controller and an agent on this machine, to run jobs with eelctl run"
	@echo "make demo KEEP=1  the same, left running with Prometheus and the live page"
	@echo "make test    run every test"
	@echo "make test-kubernetes  the same rules and measurements on a real control plane (docs/explanation/kubernetes.md)"
	@echo "make test-slurm    jobs steered on a real Slurm, which is installed for it (Debian, as root)"
	@echo "make test-flux     jobs scheduled on a broker in memory, and on a real Flux where EELGRID_FLUX or the PATH has one"
	@echo "make test-ray      a real Ray cluster followed, its Serve scaled, its nodes from the queue; Ray is installed in .venv-ray"
	@echo "make test-ha       the journal on a real PostgreSQL, which is installed for it (Debian, as root)"
	@echo "make test-observability  metrics, dashboards, alerts, ledger and page, by a real Prometheus and Chromium"
	@echo "make test-random   every property on new random examples, ROUNDS=3 times"
	@echo "make check   formatting, lint, types, import contracts, fresh generated code and pages, the documentation's links"
	@echo "make docs    serve the documentation on http://127.0.0.1:8000"
	@echo "make bench   measure speed and size; writes $(OUT)/"
	@echo "make proto   lint the .proto files; generate eelgrid_protos.wire and the blocking Python client"

$(VENV)/made:
	@test -n "$(PYTHON)" || { echo "Eelgrid needs Python 3.11, 3.12 or 3.13; install one, or say PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "setting up $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { echo "python -m venv failed; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@touch $@

# Bytecode is made of what is imported, then: all of it takes longer than the installation, and without any each start does.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

# Kernels need two packages: what compiles them is the other processor's work, and no start waits for it afterwards.
$(VENV)/installed: $(VENV)/made requirements.lock requirements-build.lock requirements-kernels.lock pyproject.toml
	@echo "installing the agent and the controller (pinned in requirements.lock), and compiling the kernels, once: half a minute"
	@$(PIP_INSTALL) --require-hashes -r requirements-kernels.lock
	@PYTHONPATH=kernels $(BIN)/python -m eelgrid_kernels >/dev/null & compiling=$$!; \
	  $(PIP_INSTALL) --require-hashes -r requirements.lock -r requirements-build.lock \
	  && $(PIP_INSTALL) --no-deps --no-build-isolation --editable .; \
	  installed=$$?; wait $$compiling && exit $$installed
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed requirements-dev.lock
	@echo "installing the development tools (pinned in requirements-dev.lock)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	@touch $@

box: $(VENV)/installed
	@$(BIN)/eelctl box start $(BOX)

demo: $(VENV)/installed
	@$(BIN)/python -m eelgrid_controller.demo $(if $(KEEP),--keep) $(DEMO)

# Collecting once writes the tests' bytecode, which every process would otherwise make for itself at the same time.
test: $(VENV)/installed-dev
	@$(BIN)/python deploy/helm_program.py --fetch || echo "no helm: the tests of the chart are skipped"
	@echo "compiling the kernels, once for these sources (two minutes); beside it, kernels without their compiler, for what it hides"
	@{ $(BIN)/python -m eelgrid_kernels && $(BIN)/python -m pytest -q tests/props/moves_test.py; } & compiling=$$!; \
	  NUMBA_DISABLE_JIT=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile -q tests/props/placement_test.py tests/props/peers_test.py \
	  tests/props/fleet_test.py tests/props/partition_covers_test.py; tested=$$?; \
	  $(BIN)/python -m pytest --collect-only -qq >/dev/null; wait $$compiling && exit $$tested
	@$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST) || $(BIN)/python -m tests.again $$?

# On whatever EELGRID_KUBECONFIG, KUBEBUILDER_ASSETS or K8S_HOME names; without any only the API server in memory.
test-kubernetes: $(VENV)/installed-dev
	@$(BIN)/python deploy/helm_program.py --fetch || echo "no helm: the tests of the chart are skipped"
	@$(BIN)/python -m eelgrid_kernels
	@$(BIN)/python -m bench.kubernetes.beside $(BIN)/python -m pytest -q tests/contracts/kubernetes_*_test.py \
	  tests/e2e/kubernetes_*_test.py tests/e2e/deploy_*_test.py tests/props/kubernetes_admitting_test.py tests/kubelet
	@$(BIN)/python -m bench.kubernetes --out $(OUT)

# A real Slurm on loopback, without systemd; the daemons start as root.
test-slurm: $(VENV)/installed-dev
	@command -v munged >/dev/null && command -v slurmctld >/dev/null && command -v slurmrestd >/dev/null \
	  || { apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm slurmrestd munge; }
	@command -v slurmdbd >/dev/null && command -v mariadbd >/dev/null \
	  || { apt-get update -qq && apt-get install -y -qq --no-install-recommends slurmdbd mariadb-server-core mariadb-client-core; }
	@$(BIN)/python -m eelgrid_kernels
	@$(BIN)/python -m pytest -q tests/unit/slurm_*_test.py tests/contracts/slurm_*_test.py tests/e2e/slurm_*test.py \
	  tests/e2e/two_engines_test.py

# No broker is in Debian or on PyPI: EELGRID_FLUX is the flux of a flux-core 0.84 or later, whose Python has grpcio and protobuf.
test-flux: $(VENV)/installed-dev
	@$(BIN)/python -m eelgrid_kernels
	@$(BIN)/python -m pytest -q tests/unit/flux_*_test.py tests/props/flux_test.py tests/contracts/flux_contract_test.py

# A real Ray of several raylets with fake GPUs, in an environment of its own: it needs hundreds of megabytes, and nothing else here.
$(VENV)-ray/installed: $(VENV)/made requirements-ray.lock
	@echo "installing Ray in $(VENV)-ray (pinned in requirements-ray.lock)"
	@$(PYTHON) -m venv $(VENV)-ray
	@$(VENV)-ray/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-ray.lock
	@touch $@

test-ray: $(VENV)/installed-dev $(VENV)-ray/installed
	@$(BIN)/python -m eelgrid_kernels
	@EELGRID_RAY_PYTHON=$(CURDIR)/$(VENV)-ray/bin/python $(BIN)/python -m pytest -q tests/unit/ray_*_test.py \
	  tests/unit/client_ray_test.py tests/contracts/ray_*_test.py tests/e2e/ray_test.py tests/e2e/ray_capacity_test.py \
	  tests/e2e/ray_kuberay_test.py
	@EELGRID_RAY_PYTHON=$(CURDIR)/$(VENV)-ray/bin/python $(BIN)/python -m pytest -q -k ray tests/contracts/cluster_engines_contract_test.py

# A real PostgreSQL of the tests' own, which never becomes a service; its server runs as user postgres.
test-ha: $(VENV)/installed-dev
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null \
	  || { apt-get update -qq && apt-get install -y -qq --no-install-recommends postgresql-common \
	    && sed -i 's/^#*create_main_cluster.*/create_main_cluster = false/' /etc/postgresql-common/createcluster.conf \
	    && apt-get install -y -qq --no-install-recommends postgresql; }
	@$(BIN)/python -m eelgrid_kernels
	@$(BIN)/python -m pytest -q tests/contracts/journal_contract_test.py tests/unit/postgres_*_test.py tests/unit/store_*_test.py tests/unit/stale_reads_test.py tests/sim/pair_test.py tests/sim/pair_ingest_test.py \
	  tests/unit/leader_terms_test.py tests/unit/controller_addresses_test.py \
	  tests/e2e/postgres_leaders_test.py tests/e2e/failover_test.py

# Installs Debian's prometheus, chromium, victoria-metrics and strace where it may; what cannot be had is skipped, and says so.
test-observability: $(VENV)/installed-dev
	@command -v prometheus >/dev/null && command -v chromium >/dev/null && command -v victoria-metrics >/dev/null \
	  && command -v strace >/dev/null \
	  || { apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus chromium victoria-metrics strace; } \
	  || echo "no prometheus, chromium, victoria-metrics or strace: their tests are skipped"
	@$(BIN)/python -m eelgrid_kernels
	@$(BIN)/python -m pytest -q tests/unit/alert_rules_test.py tests/unit/label_values_test.py tests/unit/compressed_rules_test.py tests/unit/dashboards_test.py tests/unit/deploy_rules_test.py \
	  tests/unit/metrics_lint_test.py tests/unit/controller_metrics_test.py tests/unit/controller_exemplars_test.py \
	  tests/unit/openmetrics_page_test.py tests/unit/fleet_page_test.py tests/unit/*page*_test.py tests/props/energy_*_test.py \
	  tests/e2e/telemetry_test.py tests/e2e/dashboards_test.py tests/e2e/ledger_test.py tests/e2e/victoria_metrics_test.py tests/e2e/demo_keep_test.py \
	  tests/e2e/page*_test.py
	@echo "every alert in its fault (about twelve minutes)"
	@EELGRID_REHEARSAL=1 $(BIN)/python -m pytest -q -s tests/e2e/alerts_test.py
	@$(BIN)/python -m bench.scrape --out $(OUT)

check: $(VENV)/installed-dev
	@$(BIN)/ruff format --check --quiet . || { echo "run make format" >&2; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/buf lint
	@$(BIN)/python protos/generate.py --check
	@$(BIN)/python client/generate.py --check
	@$(BIN)/python deploy/dashboards/render.py --check
	@$(BIN)/python docs/generate.py --check
	@# Not quiet: it counts no warnings then, and a broken link is one.
	@said="$$(NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict 2>&1)" || { echo "$$said" >&2; exit 1; }
	@echo "check: all good"

docs: $(VENV)/installed-dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8000

format: $(VENV)/installed-dev
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --fix --quiet .

proto: $(VENV)/installed-dev
	@$(BIN)/buf lint
	@$(BIN)/buf format --write
	@$(BIN)/python protos/generate.py
	@$(BIN)/python client/generate.py

bench: $(VENV)/installed-dev
	@$(BIN)/python -m bench --out $(OUT)

# The tests try the same examples of a property each time; these are new ones in each round, until one fails.
test-random: $(VENV)/installed-dev
	@$(BIN)/python -m eelgrid_kernels
	@for round in $$(seq $(ROUNDS)); do \
	  $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -q -m hypothesis --hypothesis-profile=random tests || exit 1; done

fuzz: $(VENV)/installed-dev
	@EELGRID_FUZZ_MESSAGES=1000000 $(BIN)/python -m pytest -q tests/props/codec_test.py -k damaged
	@$(BIN)/python -m tests.fuzz

# One resolution for every supported Python, without a word about where packages come from.
lock: $(VENV)/installed-dev
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --custom-compile-command "make lock" --all-extras --group dev pyproject.toml -o requirements-dev.lock
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --custom-compile-command "make lock" --extra agent --extra controller \
	  --constraint requirements-dev.lock pyproject.toml -o requirements.lock
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --custom-compile-command "make lock" --group build \
	  --constraint requirements-dev.lock -o requirements-build.lock
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --custom-compile-command "make lock" --group kernels \
	  --constraint requirements-dev.lock -o requirements-kernels.lock
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --custom-compile-command "make lock" --extra agent --extra controller --group ray \
	  --constraint requirements.lock pyproject.toml -o requirements-ray.lock
	@for part in agent controller; do \
	  $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	    --custom-compile-command "make lock" --extra $$part $$(test $$part = agent || echo --extra tracing --extra postgresql) \
	    --constraint requirements-dev.lock pyproject.toml \
	    -o deploy/docker/requirements-$$part.lock || exit 1; done

clean:
	@rm -rf $(VENV) $(VENV)-ray build dist demo $(OUT) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
