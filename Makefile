# Two commands set everything up on a fresh machine with Python 3.11: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := $(VENV)/.demo
WORKERS ?= 2
# Most tests wait for files, mounts and machines: two workers for each of two cores.
TEST_WORKERS ?= 4
# Seconds of each test of `make test`, and seconds of a processor, a line each: `sort -rn out/durations.txt | head -25`,
# and `sort -k2 -rn`.
DURATIONS ?= out/durations.txt
SCHEDULES ?= 10000
SEED ?= 1
FAULTS ?= 100
RACES ?= 200
MINUTES ?= 60
# Runs a long target and records its result in tests/targets.json; a part of one, by PYTEST_ARGS, is not recorded.
RECORDED = $(PYTHON) tests/targets.py run $@ $(if $(PYTEST_ARGS),--partial) --

PARTS := $(sort $(notdir $(wildcard tests/parts/[a-z]*)))

# pytest keeps what it makes of a test file beside it; each worker would make all of them anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-vllm demo-agents demo-daemon test test-fast publish-races test-gpu test-matrices test-faults test-kills-ppo test-kills-lora test-proof test-exam test-slurm test-vllm test-sglang test-verifiers test-openai-clients test-mirror test-tinker test-verl08 test-verl-legacy test-megatron lint test-without test-without-each format test-install docs soak soak-simulator soak-parts test-rolling broadcast-faults agent-kills delta-versions test-peers bench learn learn-tasks learn-verifiers clean

## help: this list
help:
	@echo 'make TARGET; the first run of each sets up its environment.'
	@awk -F ': ' '/^## / { printf "  %-20s%s\n", substr($$1, 4), substr($$0, length($$1) + 3) }' $(MAKEFILE_LIST)

## setup: .venv alone, for machines that have no network later
setup: $(DEMO)
	@echo '$(VENV) is ready, for make demo and for you: source $(BIN)/activate'

## demo: the whole loop: daemon, trainer, two explorers (3 minutes)
demo: $(DEMO)
	$(BIN)/python examples/demo/run.py

## demo-vllm: the same with a real vLLM server for each explorer, on the CPU: 3.4 GB more to install
demo-vllm: $(DEMO) $(if $(SYNCD_VLLM_PYTHON),,.venv-vllm/.ready)
	$(BIN)/python examples/demo/run.py --engine vllm --out out/demo-vllm

## demo-agents: an agent with a tool learns to use it (4 minutes); ENGINE=vllm: with a real vLLM server
demo-agents: $(DEMO) $(if $(filter vllm,$(ENGINE)),$(if $(SYNCD_VLLM_PYTHON),,.venv-vllm/.ready))
	$(BIN)/python examples/demo/run.py demo-agents --engine $(or $(ENGINE),transformers)

## demo-daemon: the daemon alone, in half a minute
demo-daemon: $(DEMO)
	$(BIN)/python examples/daemon_demo.py

# What tests start imports the tree thousands of times: compiled once, also where Python is told to write no bytecode.
## test: all tests but the long ones
test: $(READY)
	$(BIN)/python -m compileall -q syncd trainer explorer_hooks tests
	mkdir -p $(dir $(DURATIONS)) && : > $(DURATIONS)
	SYNCD_DURATIONS=$(DURATIONS) $(BIN)/python -m pytest -n $(TEST_WORKERS) --max-worker-restart=0 $(PYTEST_ARGS)

# After each edit, in five minutes on two cores: what needs no mount, no other machine and no long matrix. The
# mark `slow` and the directories below say what that is.
FAST := tests/unit tests/contract tests/sim tests/trainer tests/explorer tests/parts
VERL_TESTS := tests/trainer/engines tests/parts/agents/test_agents_train.py tests/parts/importing/test_resume_from_verl.py tests/contract/test_policy_losses.py tests/trainer/test_export_fsdp.py
WHOLE_ENGINES := tests/trainer/engines tests/explorer/engines $(addprefix tests/parts/,broadcast megatron verl_legacy)
## test-fast: after each edit: the tests that need no mount, no other machine and no long matrix (5 minutes)
test-fast: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --max-worker-restart=0 -m "not slow and not sweep and not beds" \
		$(FAST) $(addprefix --ignore=,$(WHOLE_ENGINES)) $(PYTEST_ARGS)

# Two `syncd publish` of one step at once, 200 times: one wins, and the sealed bytes are its own.
## publish-races: two `syncd publish` of one step at once, 200 times (RACES)
publish-races: $(READY)
	SYNCD_RACES=$(RACES) $(BIN)/python -m pytest tests/integration/test_publish_race.py $(PYTEST_ARGS)

## test-gpu: the trainer, files, whole jobs and broadcasts on CUDA, where there is a GPU
test-gpu: $(READY)
	$(BIN)/python -m pytest tests/gpu $(wildcard tests/parts/*/test_*_cuda.py) $(PYTEST_ARGS)

# Of some matrices `make test` runs the rows that differ most (tests/support/matrices.py); this runs all rows.
MATRICES := tests/explorer/test_matrix.py tests/explorer/test_follow_processes.py tests/integration/test_init.py \
	tests/integration/test_tutorial_vllm.py \
	tests/integration/test_one_bad_document.py tests/integration/test_verbs_on_dead_mounts.py \
	tests/parts/agents/test_gateway_serve.py tests/parts/broadcast/test_broadcast_faults.py \
	tests/parts/broadcast/test_broadcast_jobs.py tests/parts/broadcast/test_broadcast_members.py \
	tests/parts/broadcast/test_engine_push_ipc.py tests/parts/importing/test_resume_from_verl.py \
	tests/parts/memory/test_memory_jobs.py tests/trainer/test_ended_ranks.py tests/trainer/test_kills.py \
	tests/trainer/engines/test_resharding.py tests/trainer/engines/test_verl_gpu_parts.py
## test-matrices: all rows of the matrices of which make test runs a part
test-matrices: $(READY)
	SYNCD_MATRICES=full $(RECORDED) $(BIN)/python -m pytest -n $(TEST_WORKERS) --max-worker-restart=0 $(MATRICES) $(PYTEST_ARGS)

# Every fault at every point, a thousand markers on each NFS mount, fifty kills of ranks: an hour or two. `make test` takes
# a part of the points, with a kill at one and an error at the next.
## test-faults: every fault at every point, 50 kills of ranks: an hour or two
test-faults: $(READY)
	SYNCD_SWEEP=full SYNCD_MATRICES=full SYNCD_NFS=full SYNCD_KILLS=50 SYNCD_RACES=$(RACES) $(RECORDED) $(BIN)/python -m pytest -n $(TEST_WORKERS) \
		--max-worker-restart=0 tests/integration/test_syscall_sweep.py \
		tests/integration/test_sweep_full_disk.py tests/trainer/test_delta_save_faults.py \
		tests/integration/test_powercut.py tests/integration/test_nfs.py tests/integration/test_nfs_dead_server.py \
		tests/integration/test_nfs_machines.py tests/parts/doctor/test_doctor.py \
		tests/integration/test_publish_race.py tests/trainer/test_kills.py tests/trainer/test_elastic.py $(PYTEST_ARGS)

# A hundred kills of ranks that train an actor and a critic, half of them while a full checkpoint is written.
## test-kills-ppo: 100 kills of ranks that train an actor and a critic
test-kills-ppo: $(READY)
	SYNCD_MATRICES=full SYNCD_ENGINE=ppo SYNCD_KILLS=$(or $(KILLS),50) $(BIN)/python -m pytest tests/trainer/test_kills.py $(PYTEST_ARGS)

## test-kills-lora: the same with adapters as steps
test-kills-lora: $(READY)
	SYNCD_MATRICES=full SYNCD_ENGINE=lora SYNCD_KILLS=$(or $(KILLS),50) $(BIN)/python -m pytest tests/trainer/test_kills.py $(PYTEST_ARGS)

## test-proof: 100 faults of engine and files, 200 good loads
test-proof: $(READY)
	SYNCD_PROOF=full $(BIN)/python -m pytest tests/explorer/test_proof_faults.py $(PYTEST_ARGS)

# Every kind of tensor of five architectures is left out of a load in turn; the table of docs/proof.md follows from it.
## test-exam: every kind of tensor of five architectures, left out of a load in turn (10 minutes)
test-exam: $(READY)
	mkdir -p out && rm -f out/exam_rows.jsonl
	SYNCD_MATRICES=full SYNCD_EXAM_ROWS=out/exam_rows.jsonl $(BIN)/python -m pytest tests/parts/exam/test_exam.py -k every_kind $(PYTEST_ARGS)
	$(BIN)/python tests/programs/exam_table.py out/exam_rows.jsonl docs/proof.md

# The shipped sbatch files on a real Slurm, the long way too: warned, drained, requeued, resumed exactly.
## test-slurm: the shipped sbatch files on a real Slurm, also the exact resume
test-slurm: $(READY)
	SYNCD_SLURM=1 $(RECORDED) $(BIN)/python -m pytest tests/trainer/test_slurm_files.py tests/trainer/test_slurm_servers.py \
		tests/trainer/test_tutorial_slurm.py $(PYTEST_ARGS)

# Real engines on the CPU, each in an environment of its own; SYNCD_VLLM_PYTHON and SYNCD_SGLANG_PYTHON name another.
## test-vllm: a real vLLM on the CPU (SYNCD_VLLM_PYTHON, else it is installed)
test-vllm: $(READY) $(if $(SYNCD_VLLM_PYTHON),,.venv-vllm/.ready)
	SYNCD_LORA_VERSIONS=$(or $(VERSIONS),20) SYNCD_DELTA_VERSIONS=$(or $(VERSIONS),40) \
		$(RECORDED) $(BIN)/python -m pytest tests/explorer/engines/test_vllm_real.py \
		tests/explorer/engines/test_vllm_exam_real.py tests/explorer/engines/test_vllm_adapters_real.py tests/explorer/engines/test_vllm_matrix_real.py \
		tests/explorer/engines/test_vllm_lora_training_real.py tests/explorer/engines/test_vllm_tutorial_real.py tests/parts/agents/test_vllm_gateway_real.py \
		tests/parts/rolling/test_rolling_vllm_real.py $(PYTEST_ARGS)

## test-sglang: a real SGLang on the CPU (SYNCD_SGLANG_PYTHON, else it is installed)
test-sglang: $(READY) $(if $(SYNCD_SGLANG_PYTHON),,.venv-sglang/.ready)
	SYNCD_LORA_VERSIONS=$(or $(VERSIONS),20) SYNCD_DELTA_VERSIONS=$(or $(VERSIONS),40) \
		$(RECORDED) $(BIN)/python -m pytest tests/explorer/engines/test_sglang_real.py tests/explorer/engines/test_sglang_exam_real.py \
		tests/explorer/engines/test_sglang_adapters_real.py tests/explorer/engines/test_sglang_matrix_real.py \
		tests/explorer/engines/test_sglang_lora_training_real.py tests/parts/agents/test_sglang_gateway_real.py $(PYTEST_ARGS)

# Environments of verifiers behind the gateway; SYNCD_VERIFIERS_PYTHON names the interpreter of another environment.
## test-verifiers: environments of a real verifiers (SYNCD_VERIFIERS_PYTHON, else it is installed)
test-verifiers: $(READY) $(if $(SYNCD_VERIFIERS_PYTHON),,.venv-verifiers/.ready)
	$(RECORDED) $(BIN)/python -m pytest tests/parts/agents/test_verifiers_real.py $(PYTEST_ARGS)

# Agents' clients before the gateway; SYNCD_OPENAI_CLIENTS_PYTHON names the interpreter of another environment.
## test-openai-clients: openai, openai-agents, LangChain and litellm (SYNCD_OPENAI_CLIENTS_PYTHON, else installed)
test-openai-clients: $(READY) $(if $(SYNCD_OPENAI_CLIENTS_PYTHON),,.venv-openai-clients/.ready)
	$(BIN)/python -m pytest tests/parts/agents/test_openai_clients.py $(PYTEST_ARGS)

# Two sites with moto's S3 between them: mirrors killed at random instants, outages, experiences on their way back.
## test-mirror: mirrors over moto's S3 (VERSIONS, SEED; SYNCD_MOTO_SERVER, else it is installed)
test-mirror: $(READY) $(if $(SYNCD_MOTO_SERVER),,.venv-moto/.ready)
	SYNCD_S3=1 SYNCD_MIRROR_VERSIONS=$(or $(VERSIONS),200) SYNCD_SEED=$(SEED) $(RECORDED) $(BIN)/python -m pytest \
		tests/parts/mirror/test_mirror_s3.py tests/parts/mirror/test_mirror_objects.py tests/parts/mirror/test_mirror_nfs.py $(PYTEST_ARGS)

.venv-moto/.ready: tests/parts/mirror/moto.txt
	$(PYTHON) -m venv .venv-moto
	.venv-moto/bin/python -m pip --disable-pip-version-check install --quiet -r $<
	touch $@

# The engine `tinker` and explorers against a real tinker server on the CPU; SYNCD_TINKER_PYTHON names another one's Python.
## test-tinker: a real tinker server on the CPU (SYNCD_TINKER_PYTHON, else it is installed)
test-tinker: $(READY) $(if $(SYNCD_TINKER_PYTHON),,.venv-tinker/.ready)
	$(RECORDED) $(BIN)/python -m pytest tests/parts/tinker/test_tinker_real.py tests/parts/tinker/test_tinker_explorer_real.py \
		$(PYTEST_ARGS)

# The tests of training engines under another release of verl, in an environment with it.
## test-verl08: training engines with verl 0.8
test-verl08: .venv-verl08/.ready
	SYNCD_MATRICES=full $(RECORDED) .venv-verl08/bin/python -m pytest -n $(WORKERS) --max-worker-restart=0 $(VERL_TESTS) $(PYTEST_ARGS)

## test-verl-legacy: training engines with verl 0.7.1
test-verl-legacy: .venv-verl-legacy/.ready
	$(RECORDED) .venv-verl-legacy/bin/python -m pytest -n $(WORKERS) --max-worker-restart=0 tests/parts/verl_legacy/test_verl_legacy.py \
		tests/trainer/engines/test_engine_contract.py $(PYTEST_ARGS)

# verl's Megatron engine and megatron-core on the CPU, by the layers of its local spec.
## test-megatron: verl's Megatron engine on the CPU
test-megatron: .venv-megatron/.ready
	$(RECORDED) .venv-megatron/bin/python -m pytest -n $(WORKERS) --max-worker-restart=0 tests/parts/megatron/test_megatron_real.py \
		tests/parts/megatron/test_megatron_options.py $(PYTEST_ARGS)

.venv-megatron/.ready .venv-verl08/.ready .venv-verl-legacy/.ready: .venv-%/.ready: \
		tests/trainer/engines/environments/%.txt tests/trainer/engines/environments/install.sh
	sh tests/trainer/engines/environments/install.sh $(PYTHON) .venv-$* $<
	touch $@

# SGLang's environment has a copy of this file.
.venv-sglang/.ready: tests/support/sglang_on_cpu.py

.venv-%/.ready: tests/explorer/engines/%.txt tests/explorer/engines/install_%.sh
	sh tests/explorer/engines/install_$*.sh $(PYTHON) .venv-$*
	touch $@

## lint: ruff, mypy, import contracts, generated pages; and which long targets are due, as a reminder
lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@mkdir -p out
	$(BIN)/python -m pytest --collect-only -qqq -r N > out/collected.txt || { tail -n 40 out/collected.txt; exit 1; }
	$(BIN)/python docs/generate --check
	@$(BIN)/python tests/targets.py due

# Copies the tree, takes a part out, and runs lint and fast tests there (PYTEST_ARGS: other tests).
## test-without: the tree passes without a part (make test-without PART=memory)
test-without: $(READY)
	$(BIN)/python tests/programs/without_part.py $(PART) $(PYTEST_ARGS)

## test-without-each: the same for each part (15 minutes)
test-without-each: $(READY)
	$(RECORDED) sh -e -c 'for part in $(PARTS); do $(BIN)/python tests/programs/without_part.py $$part; done'

## format: fix and format the code
format: $(READY)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

# Gigabytes, and whatever the index has today: not a part of `make test`.
## test-install: the wheel with its newest dependencies, without constraints, and a training of two steps with it
test-install:
	$(RECORDED) tests/programs/try_install.sh $(PYTHON) .venv-install

# Strict: a link to a page or heading that does not exist ends it. `make lint` compares the generated pages.
## docs: the generated pages, and the site of docs/ and docstrings in out/site
docs: .venv-docs/.ready
	.venv-docs/bin/python docs/generate
	.venv-docs/bin/zensical build --strict --clean

.venv-docs/.ready: setup.cfg constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

## soak: both soaks, one after the other: a little more than an hour
soak: soak-simulator soak-parts

# Random schedules of the whole system in a simulated world; a failing seed is printed with the command that replays it.
# DEEDS=all, none or names with commas (tests/simulator/deeds.py) says what they contain beyond faults of calls.
## soak-simulator: random schedules of the whole system in a simulated world (SCHEDULES, SEED, DEEDS)
soak-simulator: $(READY)
	PYTHONPATH=.:tests $(BIN)/python -m simulator --schedules $(SCHEDULES) --seed $(SEED) --workers $(WORKERS) \
		$(if $(DEEDS),--deeds $(DEEDS))

# Real processes for an hour: a trainer, eight explorers and two daemons, killed, stopped, cut off, on full and frozen
# disks, by a schedule of SEED. As root; without, the disks and cuts are left out, and it says so.
## soak-parts: real processes for an hour, killed and cut off, as root (MINUTES, SEED)
soak-parts: $(READY)
	PYTHONPATH=.:tests $(BIN)/python -m soak --minutes $(MINUTES) --seed $(SEED)

# Rolling updates in simulated fleets whose engines, followers and daemons go wrong, and each rule broken: half an hour.
## test-rolling: 10,000 schedules of rolling updates (SCHEDULES)
test-rolling: $(READY)
	ROLLING_SCHEDULES=$(or $(SCHEDULES),10000) $(BIN)/python -m pytest --timeout 7200 tests/parts/rolling $(PYTEST_ARGS)

# Broadcasts that break off at random phases, on either side, by SIGKILL and SIGSTOP.
## broadcast-faults: broadcasts that break off at random phases (FAULTS, SEED)
broadcast-faults: $(READY)
	SYNCD_BROADCAST_FAULTS=$(FAULTS) SYNCD_SEED=$(SEED) \
		$(BIN)/python -m pytest tests/parts/broadcast/test_broadcast_faults.py

# Agents, gateways, engines and writers, half with agents of `explorer run`, half with a driver of `explorer serve`.
## agent-kills: a thousand kills of agents, gateways, engines and writers (KILLS, SEED)
agent-kills: $(READY)
	PYTHONPATH=.:tests:tests/parts/agents $(BIN)/python -m agent_kills --kills $(or $(KILLS),1000) --seed $(SEED)

# VERSIONS by deltas and keyframes (make test: 50): readers die and come back, daemons fail over, rewinds, rollbacks.
## delta-versions: a thousand versions by deltas while everything else happens (VERSIONS, SEED)
delta-versions: $(READY)
	SYNCD_DELTA_VERSIONS=$(or $(VERSIONS),1000) SYNCD_SEED=$(SEED) \
		$(BIN)/python -m pytest tests/explorer/test_delta_versions.py $(PYTEST_ARGS)

# Namespaces with limited links, as root; without, it says why it is skipped. An hour: hosts x ways x faults, each held to its targets
# (benchmarks/results/peers.json), and a hundred random schedules of kills.
## test-peers: hosts that read together, in network namespaces: every fault, 100 schedules of kills (as root)
test-peers: $(READY)
	SYNCD_PEERS=full $(RECORDED) $(BIN)/python -m pytest tests/parts/hosts/test_peers_bed.py $(PYTEST_ARGS)

## bench: the daemon, measured
bench: $(READY)
	$(BIN)/python benchmarks/daemon.py

## learn: does it learn? 20 minutes, three seeds
learn: $(READY)
	$(BIN)/python benchmarks/learning.py

## learn-tasks: three generators of reasoning_gym at once, 50 steps, three seeds (20 minutes)
learn-tasks: $(READY)
	$(BIN)/python benchmarks/learning_tasks.py

## learn-verifiers: three environments of verifiers, 50 steps each (an hour)
learn-verifiers: $(READY) $(if $(SYNCD_VERIFIERS_PYTHON),,.venv-verifiers/.ready)
	$(BIN)/python examples/environments/train.py --python $(or $(SYNCD_VERIFIERS_PYTHON),$(CURDIR)/.venv-verifiers/bin/python)

$(DEMO): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[trainer,explorer,gateway,plot]' 'openai >=2'
	touch $@

$(READY): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,lint]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]' \
		|| echo 'playwright cannot be installed here: the tests of pages in a browser are skipped'
	# 45 MB beside what is there already; two of its parts are compiled where the index has no wheels.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[tasks]' \
		|| echo 'reasoning-gym and math-verify cannot be installed here: their tests are skipped'
	# Chat templates and a real vocabulary, where Python does not look: with trl 1.16 installed, verl imports from it what it
	# has no more.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/chat-templates trl==1.16.0 mistral-common==1.13.1
	touch $@ $(DEMO)

## clean: remove environments, builds and caches
clean:
	rm -rf $(VENV) .venv-vllm .venv-sglang .venv-tinker .venv-verifiers .venv-openai-clients .venv-moto .venv-verl08 .venv-verl-legacy .venv-megatron .venv-docs .venv-install build dist out/site .cache *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
