# Every target sets up what it needs first; `make setup` does only that.
PY := $(CURDIR)/.venv/bin/python
BIN := $(CURDIR)/.venv/bin
# Spark starts its Python workers with this interpreter, not with whatever is on the PATH.
export PYSPARK_PYTHON := $(PY)
export PYSPARK_DRIVER_PYTHON := $(PY)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-cluster lint format types check chaos damage power flood simulate memory bench-state bench-recovery bench-scaling bench-fragments bench-topk bench-lrb lock clean soak

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install what is missing: Java 17, the virtual environment, the locked packages
	@scripts/setup

demo: setup ## word counts on a cluster that scales and loses a node (ARGS="" for a live view)
	@$(BIN)/anabranch demo $(if $(filter undefined,$(origin ARGS)),--nodes 4,$(ARGS))

test: setup ## all tests and doctests (ARGS="-k topk" for some)
	$(PY) -m pytest -n 2 --dist loadfile --doctest-modules --durations=10 $(if $(ARGS),$(ARGS),-m "not cluster" src tests bench/src bench/tests)

test-cluster: setup ## queries on a cluster whose nodes are killed, compared with a model in plain Python
	$(PY) -m pytest -m cluster tests bench/tests $(ARGS)

lint: setup ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup ## let ruff rewrite the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup ## mypy, strict
	$(BIN)/mypy

check: lint types test ## everything a change must pass

chaos: setup ## kills at random moments, compared with a model in plain Python (KILLS=100 FAULTS=200 SEED=)
	KILLS=$(or $(KILLS),100) FAULTS=$(or $(FAULTS),200) $(PY) -m pytest tests/chaos -s

damage: setup ## files of checkpoint folders damaged in every way (DAMAGE=100000 SEED=)
	DAMAGE=$(or $(DAMAGE),100000) $(PY) -m pytest tests/coordinator/test_damage.py -s -q --timeout 36000 -p no:logging

simulate: setup ## the protocols under faults, in a model of a cluster, on all cores (FAULTS=1000000 SEED=)
	cd tests && $(PY) -m protocols.many $(or $(FAULTS),1000000) $(SEED)

power: setup ## queries on a machine that loses its power, and whose disk fails (POWER=2000)
	POWER=$(or $(POWER),2000) $(PY) -m pytest tests/coordinator/test_power_failure.py -s -q --timeout 36000 -p no:logging

flood: setup ## requests that an agent must refuse, beside which it serves others (FLOOD=1000000)
	FLOOD=$(or $(FLOOD),1000000) $(PY) -m pytest tests/nodes/test_flood.py tests/standing/test_ring_flood.py -s

memory: setup ## the private memory of nodes that store, restore and merge a large state (STATE=4096 MB)
	STATE=$(or $(STATE),4096) $(PY) -m pytest tests/nodes/test_memory.py -s

bench-state: setup ## state benchmarks, Spark's side and ours (ARGS="--quick")
	@mkdir -p results
	$(BIN)/anabranch bench state --json results/state.json --plot results/state.png $(ARGS)

bench-recovery: setup ## a node is killed: recovery of ours and of Spark's (ARGS="--quick")
	@mkdir -p results
	$(BIN)/anabranch bench recovery --json results/recovery.json --plot results/recovery.png $(ARGS)

bench-scaling: setup ## an operator grows while it runs, against Spark's stop and restart
	@mkdir -p results
	$(BIN)/anabranch bench scaling --json results/scaling.json --plot results/scaling.png $(ARGS)

bench-fragments: setup ## backups as fragments against a shared store, models, rings (ARGS="--quick")
	@mkdir -p results
	$(BIN)/anabranch bench fragments --json results/fragments.json --plot results/fragments.png $(ARGS)

bench-topk: setup ## rankings every 30 s from 18 sources that do not wait
	@mkdir -p results
	$(BIN)/anabranch bench topk --json results/topk.json --plot results/topk.png $(ARGS)

bench-lrb: setup ## Linear Road at the pace of the clock (ARGS="--xways 350 --warm 7 --check")
	@mkdir -p results
	$(BIN)/anabranch bench lrb --json results/lrb.json --plot results/lrb.png $(ARGS)

soak: setup ## hours under faults, compared with DuckDB, growth drawn (MINUTES=120 SEED=)
	@mkdir -p results
	$(BIN)/anabranch bench soak --minutes $(or $(MINUTES),120) $(if $(SEED),--seed $(SEED)) \
	  --json results/soak.json --plot results/soak.png $(ARGS)

lock: setup ## resolve the dependencies again and write requirements.lock
	`scripts/setup --print-uv` pip compile pyproject.toml bench/pyproject.toml --universal --generate-hashes \
	  --no-annotate --no-header --no-emit-index-url --no-emit-package anabranch --group dev --all-extras \
	  --quiet -o requirements.lock

clean: ## forget the virtual environment, caches and results
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis results spark-warehouse
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
