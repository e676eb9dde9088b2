# Every target sets up what it needs: Python 3.11 or newer, git and make are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Else every rank of every test compiles all modules again.
unexport PYTHONDONTWRITEBYTECODE
# One thread for each process, as in a training run: several ranks share the cores.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations=12 --durations-min=20
# Tests of a single process share the cores. Ranks wait for each other part of the time: two tests of
# them are run at once (a third took as long, and tests of launched ranks up to 14 times as long as
# alone), and two of hosts that are launched, lost and found again. Whoever is done first takes half
# of what another has left, so that nobody is left alone with a long file. What measures time has the
# machine for itself. Those that took longest are listed.
SINGLE := $(TEST) -n auto --dist worksteal tests/unit tests/property
SEVERAL := $(TEST) -n 2 --dist worksteal tests/distributed tests/gpu
BEDS := $(TEST) -n 2 --dist worksteal tests/testbed
ALONE := $(TEST) tests/distributed tests/gpu tests/testbed
# What another Python or other versions of what we build on would break first.
SMOKE := tests/unit/planner/test_planning.py tests/unit/planner/test_solver.py tests/unit/planner/test_wire.py tests/unit/test_imports.py tests/distributed/test_training.py
# Of the command line all but what plans a lot, or runs a lot of it, which takes minutes.
SMOKE += tests/unit/cli --ignore tests/unit/cli/test_planning.py --ignore tests/unit/cli/test_mutations.py

# Installed without what they bring, or it would be another torch: what is not here already is named.
FRAMEWORKS := accelerate psutil lightning-fabric lightning-utilities tensorboard
FRAMEWORKS += absl-py grpcio markdown protobuf tensorboard-data-server werkzeug

.PHONY: help demo test test-all test-long smoke lint types docs lock bench-prediction bench-memory bench-gpu bench-planner bench-deeppool bench-lossy bench-advise bench-local-steps bench-laysa bench-zoo bench-exchange bench-sharded bench-burst bench-unequal bench-checkpoint testbed clean

help:
	@echo "make demo              measure, plan, verify and train on this machine"
	@echo "make test              the quick tests"
	@echo "make test-all          those and the slow ones"
	@echo "make test-long         those that take many minutes, and other random examples"
	@echo "make smoke             the few that run under every Python (VENV=folder PYTHON=python3.13)"
	@echo "make lint, make types  ruff, mypy"
	@echo "make docs              the documentation as a site, in build/site"
	@echo "make lock              constraints.txt anew, from constraints.in"
	@echo "make bench-prediction  predicted against measured step times and their order, on a test bed (needs root)"
	@echo "make bench-memory      predicted against measured peak memory"
	@echo "make bench-gpu         predicted against measured steps and peaks on one GPU, two ranks that share it, their largest batch, and two models on it (else small models on the CPU)"
	@echo "make bench-planner     time, gap and memory of planning, by units and ranks"
	@echo "make bench-deeppool    plans against DeepPool's greedy search (TABLES=folder)"
	@echo "make bench-lossy       layer dropping and top-k against dense exchange (needs root)"
	@echo "make bench-advise      what advise says against what its ways reach, on a test bed (needs root)"
	@echo "make bench-local-steps hosts that train apart: accuracy, and predicted against measured steps (needs root)"
	@echo "make bench-laysa       memory policies and sparse exchange, alone and together (needs root)"
	@echo "make bench-zoo         architectures of other packages: units, verdicts, peak memory"
	@echo "make bench-sharded     sharded against dense exchange and FSDP2, on a test bed (needs root)"
	@echo "make bench-exchange    priority exchange, DDP, FSDP2 and the bound, on a test bed (needs root)"
	@echo "make bench-checkpoint  what a checkpoint every 50 steps costs"
	@echo "make bench-unequal     plans for hosts of unequal links and speed, on a test bed (needs root)"
	@echo "make bench-burst       bursts with background jobs: 1,024 simulated devices, and a test bed (needs root)"
	@echo "make testbed           hosts as network namespaces, until Ctrl-C (needs root)"
	@echo "make clean             remove the environment and everything built"

# A stamp is made anew when what is to be installed has changed.
$(VENV)/run.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e ".[data]"
	touch $@

$(VENV)/test.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e ".[data,test]"
	touch $(VENV)/run.stamp $@

# Models of other packages, for the zoo alone and beside the environment: transformers imports
# torchvision where it is installed, and its package for CUDA does not load beside a CPU build.
$(VENV)/vision.stamp: $(VENV)/test.stamp
	$(PIP) --no-deps --upgrade --target $(VENV)/vision timm torchvision
	touch $@

# Frameworks that examples train in, and TensorBoard, for the tests of these alone and beside the
# environment: where accelerate is installed, transformers loads models in another way.
$(VENV)/frameworks.stamp: $(VENV)/test.stamp
	$(PIP) --no-deps --upgrade --target $(VENV)/frameworks $(FRAMEWORKS)
	touch $@

demo: $(VENV)/run.stamp
	$(BIN)/meshwright demo

test: $(VENV)/frameworks.stamp
	$(SINGLE) -m "not slow and not long"
	$(SEVERAL) -m "not slow and not long and not alone"
	$(BEDS) -m "not slow and not long and not alone"
	$(ALONE) -m "not slow and not long and alone"

test-all: $(VENV)/vision.stamp $(VENV)/frameworks.stamp
	$(SINGLE) -m "not long"
	$(SEVERAL) -m "not long and not alone"
	$(BEDS) -m "not long and not alone"
	$(ALONE) -m "not long and alone"

test-long: $(VENV)/frameworks.stamp
	$(TEST) -m long
	HYPOTHESIS_PROFILE=search $(TEST) -n auto tests/property

smoke: $(VENV)/test.stamp
	$(TEST) -n auto --dist worksteal -m "not slow and not long" $(SMOKE)

lint: $(VENV)/test.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# The root is the package: mypy finds it under its name through a link.
types: $(VENV)/test.stamp
	mkdir -p build/types
	ln -sfn ../.. build/types/meshwright
	$(BIN)/mypy
	$(BIN)/mypy --config-file benchmarks/mypy.ini benchmarks/*.py

$(VENV)/docs.stamp: $(VENV)/test.stamp
	$(PIP) -e ".[docs]"
	touch $@

# The root is the package: its docstrings are found under its name, through links to nothing else.
docs: $(VENV)/docs.stamp
	mkdir -p build/docs/meshwright
	for name in *.py cli executor models planner profiler; do ln -sfn ../../../$$name build/docs/meshwright; done
	$(BIN)/mkdocs build --strict --quiet

lock:
	.ci/lock

bench-prediction: $(VENV)/test.stamp
	$(BIN)/python benchmarks/prediction.py --markdown docs/results/prediction.md
	$(BIN)/python benchmarks/prediction.py --ranking --markdown docs/results/prediction.md

bench-memory: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/memory.py

bench-gpu: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/gpu.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/gpu_pair.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/gpu_batch.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/gpu_background.py

bench-planner: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/planner.py

TABLES ?= profiler/data/deeppool_a100
bench-deeppool: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/deeppool.py $(TABLES) --markdown docs/results/deeppool.md

bench-lossy: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/lossy.py --markdown docs/results/lossy.md

bench-advise: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/advise.py --markdown docs/results/advise.md

bench-local-steps: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/local_steps.py --markdown docs/results/local-steps.md

bench-laysa: $(VENV)/test.stamp
	$(BIN)/python benchmarks/laysa.py --own --markdown docs/results/laysa.md

bench-zoo: $(VENV)/vision.stamp
	PYTHONPATH=$(VENV)/vision OMP_NUM_THREADS=1 $(BIN)/python benchmarks/zoo.py --markdown docs/results/zoo.md

bench-sharded: $(VENV)/test.stamp
	$(BIN)/python benchmarks/sharded.py --optimizers momentum adamw --ratios 0.5 1 2 --fsdp

bench-exchange: $(VENV)/test.stamp
	$(BIN)/python benchmarks/exchange.py
	$(BIN)/python benchmarks/exchange.py --wire

bench-burst: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/burst.py --markdown docs/results/burst.md

bench-checkpoint: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/checkpoint.py

bench-unequal: $(VENV)/test.stamp
	$(BIN)/python benchmarks/unequal.py
	$(BIN)/python benchmarks/unequal.py --slow 0.5

testbed: $(VENV)/run.stamp
	$(BIN)/python -m benchmarks.testbed

clean:
	rm -rf $(VENV) build dist runs *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
