# `make vit` trains, `make test` tests, `make lint` checks types and style. Each sets up .venv first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NPROC ?= 4
ARGS ?=
export OMP_NUM_THREADS ?= 1
# Jobs and tests start many interpreters, each of which would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: vit test matrix zero edits models models-pp models-tp models-sp models-others models-features others docs wheel oldest gpu gpu-test gpu-nccl gpu-fp16 gpu-launches gpu-memory gpu-llama gpu-compile \
	gpu-profile lint clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,examples]'
	touch $(READY)

vit: $(READY)
	$(BIN)/torchrun --standalone --nproc-per-node $(NPROC) examples/vit/train.py $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal $(ARGS)

# The same, with all cases of tests of which `make test` runs some that cover their parameters (see tests/covering.py).
matrix: $(READY)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal --matrix $(ARGS)

# Every stage of ZeRO in every layout, schedule and precision (60 cases). ARGS="--processes --only 'dp2 .* bf16'" runs some
# of them on gloo processes.
zero: $(READY)
	HF_HUB_OFFLINE=1 PYTHONPATH=.:plugins:tests $(BIN)/python tests/plugins/zero_matrix.py $(ARGS)

# Runs that go on in new processes, bit for bit: every layout, schedule, precision, stage of ZeRO (83 cases, 6 minutes on 2
# cores); and what a save leaves whose ranks are killed. ARGS="--only 'dp2 .* bf16'" runs some.
.PHONY: resume kills
resume: $(READY)
	HF_HUB_OFFLINE=1 PYTHONPATH=.:plugins:tests $(BIN)/python tests/plugins/resume_matrix.py $(ARGS)

kills: $(READY)
	HF_HUB_OFFLINE=1 PYTHONPATH=.:plugins:tests $(BIN)/python tests/plugins/kill_matrix.py $(ARGS)

# 2,000 random edits of saved folders, each of which is refused or read right (3 minutes on 2 cores). ARGS="--seed 5000" draws
# others; ARGS="--only 'run pp2' --verbose" tells what became of each of one kind.
edits: $(READY)
	HF_HUB_OFFLINE=1 PYTHONPATH=.:plugins:tests $(BIN)/python tests/plugins/random_edits.py $(ARGS)

# 200 random training scripts, as people write them, each against plain torch (10 minutes on 2 cores). ARGS="--only 17" runs
# one; ARGS="--seed 200" draws others.
.PHONY: scripts
scripts: $(READY)
	HF_HUB_OFFLINE=1 PYTHONPATH=.:plugins:tests $(BIN)/python tests/plugins/random_scripts.py $(ARGS)

# 10,000 random settings and 10,000 random command lines: each is accepted, or refused in a message that says what is
# wrong. ARGS="--seed 1" draws others.
.PHONY: fuzz
fuzz: $(READY)
	HF_HUB_OFFLINE=1 PYTHONPATH=.:plugins:tests $(BIN)/python tests/config/fuzz_settings.py $(ARGS)
	HF_HUB_OFFLINE=1 PYTHONPATH=.:plugins:tests $(BIN)/python tests/cli/fuzz_command_lines.py $(ARGS)

# Examines every architecture that transformers registers and writes docs/models.md: models-pp cuts them into stages (40
# minutes on 2 cores), models-tp lets ranks share their layers, models-sp their sequences, too. What is in the folder
# MODELS is not examined again, so ARGS="--seconds 120" does it in pieces.
MODELS ?= /tmp/hybridpp-models
SWEEP = HF_HUB_OFFLINE=1 PYTHONPATH=.:plugins:tests $(BIN)/python tests/models/sweep.py --cache $(MODELS) \
	--page docs/models.md
models: models-pp models-tp models-sp

models-pp: $(READY)
	$(SWEEP) cuts $(ARGS)

models-tp: $(READY)
	$(SWEEP) layers $(ARGS)

models-sp: $(READY)
	$(SWEEP) sequences $(ARGS)

# The same for models of other libraries: 12 MB to download, and an hour on 2 cores. Their tests run wherever they are
# installed, so `make others test` runs them, too. Torchvision, which timm wants for files of images, is left out: one
# that is for another build of torch keeps transformers from being imported.
models-others: others
	$(SWEEP) others $(ARGS)

# Images, losses that balance experts, attentions and packed rows in five layouts (57 cases, an hour on 2 cores).
models-features: $(READY)
	$(SWEEP) features $(ARGS)

others: $(VENV)/.others

$(VENV)/.others: $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[others]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps timm
	touch $@

# The site of docs/, the README and ARCHITECTURE.md, in the folder site/: open site/index.html.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

$(VENV)/.docs: $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

# The wheel, in an environment of its own and an empty folder: its commands, a boost, make vit's script.
# ARGS="" takes the newest torch, which is for CUDA.
wheel: ARGS = --constraint constraints.txt
wheel: $(READY)
	PYTHON=$(BIN)/python tests/scripts/try_wheel.sh $(ARGS)

# The lower bounds of pyproject.toml, in an environment of its own, which takes 6 GB: no older torch for the CPU alone
# is on PyPI. Of the tests, those that meet most of what torch, transformers and the others changed. Old packages beside
# new ones of their own dependencies may warn: that is shown, and is no error. The test that is left out forks a process
# that has traced a model, which the CUDA build of torch 2.11 does not survive on a host without a device.
OLDEST := .venv-oldest
oldest: $(OLDEST)/.ready
	HF_HUB_OFFLINE=1 PYTHONPATH=.:plugins $(OLDEST)/bin/python -m pytest -q -p no:cacheprovider -W default tests/schedule tests/doctor \
		tests/cli/test_main.py tests/cli/test_app.py tests/cli/test_partition.py tests/optim tests/test_readme.py \
		tests/plugins/test_parity.py tests/plugins/test_weights.py tests/plugins/test_run_saves.py \
		--deselect tests/plugins/test_parity.py::test_processes_give_what_the_in_process_ranks_give $(ARGS)

$(OLDEST)/.ready: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install --quiet --constraint constraints-oldest.txt . pytest pytest-timeout filelock peft
	$(OLDEST)/bin/pip uninstall --quiet --yes hybridpp
	touch $@

# On a host with a CUDA device and torch, transformers and pytest; needs no set-up. A test that fails does not keep the
# benchmarks from running. Other hosts have other packages: what those warn of is shown, and is no error.
ON_GPU = HF_HUB_OFFLINE=1 PYTHONPATH=.:plugins $(PYTHON)
gpu:
	$(MAKE) --keep-going gpu-test gpu-nccl gpu-fp16 gpu-launches gpu-memory gpu-llama gpu-compile gpu-profile

# Each case of each has a limit of 60 s, after which its processes are ended: a hang is a result.
gpu-test:
	$(ON_GPU) benchmarks/gpu/run_tests.py $(ARGS)

gpu-nccl:
	$(ON_GPU) benchmarks/gpu/nccl.py

gpu-fp16:
	$(ON_GPU) benchmarks/gpu/fp16.py

gpu-launches:
	$(ON_GPU) benchmarks/gpu/launches.py

gpu-memory:
	$(ON_GPU) benchmarks/gpu/memory.py
	$(ON_GPU) benchmarks/gpu/memory.py --ranks 2 --schedules 1f1b zb-h1 zb-v

gpu-llama:
	$(ON_GPU) benchmarks/gpu/llama.py

# Inductor may compile for longer than a minute.
gpu-compile:
	$(ON_GPU) benchmarks/gpu/llama.py --compile --limit 180

gpu-profile:
	$(ON_GPU) benchmarks/gpu/profile_step.py --trace /tmp/hybridpp-step.json

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(OLDEST) outputs site .mypy_cache .pytest_cache .ruff_cache
