"""Every command of README.md and the tutorials runs in a test; here run those that no other test runs."""

import ast
import os
import re
import shutil
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.fake_engines import FakeVllm
from support.foreign_jobs import SAMPLES
from support.jobs import write_step
from support.paths import ROOT
from support.readme import commands, typed

from syncd.cli.main import syncd as syncd_commands
from syncd.protocol.layout import Job
from syncd.protocol.version import read_version

BY_HAND = "tests/FIRST_CONTACT.md"
"""Has the output of what needs a network, minutes or an engine."""

_HERE = "integration/test_readme_commands.py"
_VLLM = (
    "integration/test_tutorial_vllm.py"
    "::test_the_commands_of_the_page_train_and_the_server_answers_with_the_last_version"
)
_SLURM = "trainer/test_tutorial_slurm.py::test_the_commands_of_the_page_train_a_model_on_slurm"
_ONE_MACHINE = "integration/test_init.py::test_the_command_for_one_machine_trains"
_SYSTEMD = "integration/test_systemd.py::test_the_user_unit_runs_the_daemon_without_root"
_TABLE = f"{_HERE}::test_every_verb_succeeds"
_AGENT = (
    "parts/agents/test_agents.py"
    "::test_the_agent_of_the_page_is_twenty_lines_and_plays_in_the_job_that_the_page_begins_with"
)
RUN_BY = {
    "git clone https://github.com/syncd-project/syncd && cd syncd": BY_HAND,
    "python3.11 -m venv .venv && source .venv/bin/activate": BY_HAND,
    "pip install -e '.[transformers,explorer]' -c constraints.txt": BY_HAND,
    "python3.11 -m venv .venv-vllm && .venv-vllm/bin/pip install 'vllm>=0.27.1'": BY_HAND,
    "make demo": BY_HAND,
    "make test": BY_HAND,
    "README.md#Your own trainer to vLLM": _VLLM,
    "syncd init first --model /models/Qwen3-8B --engine vllm": _TABLE,
    "cd first && sbatch together.sbatch job.toml job": _SLURM,
    "syncd doctor /ckpt": _TABLE,
    "syncd install-units --user": _SYSTEMD,
    "syncd status /ckpt/job --check --max-age 600": _TABLE,
    "tutorial-vllm.md#What you need": _VLLM,
    "tutorial-vllm.md#Start the daemon, the server and the follower": _VLLM,
    "tutorial-vllm.md#Publish from your loop": _VLLM,
    "tutorial-vllm.md#Watch it": _VLLM,
    "tutorial-slurm.md#What you need": BY_HAND,
    "tutorial-slurm.md#Check the mount": _SLURM,
    "tutorial-slurm.md#A model": _SLURM,
    "tutorial-slurm.md#A job": _SLURM,
    "tutorial-slurm.md#Start it": _SLURM,
    "tutorial-slurm.md#Watch it": _SLURM,
    "tutorial-slurm.md#The end": _SLURM,
    "tutorial-slurm.md#On one machine": _ONE_MACHINE,
    "trainer train job.toml --trainer.total_steps 5 --algorithm.optimizer.warmup_steps 0"
    " & explorer run job.toml --name e0": _ONE_MACHINE,
    "pip install -e '.[trainer,gateway,transformers,plot]' -c constraints.txt openai": BY_HAND,
    "tutorial-agent.md#What you need": _AGENT,
    "tutorial-agent.md#Write the agent": _AGENT,
    "tutorial-agent.md#The job": _AGENT,
    "syncd status job --watch": "integration/test_cli_verbs.py",
    "trainer plot job": _ONE_MACHINE,
}
"""What runs each command, or each section; tests below tests/."""

VERBS = """
syncd init new --model base --engine vllm
syncd watch job 2>watch.log & daemon=$!
syncd publish job 1 weights
syncd wait job --newer-than 0 --timeout 60
syncd publish job 2 weights
syncd wait job --newer-than 1 --timeout 60
syncd status job
syncd status job --check --max-age 600
syncd ls job
syncd verify job
syncd verify job 1 --deep
syncd materialise job 1 --to made
syncd pin job 1
syncd unpin job 1
syncd rolling job || [ $? = 3 ]
mkdir mirrored; syncd mirror job mirrored --once
syncd rollback job 1
syncd follow job --hook command --once -- touch '{label}'
coproc syncd serve job --port 0
read -r url <&${COPROC[0]}; kill $COPROC_PID; wait $COPROC_PID || true; echo "page $url"
kill $daemon; wait $daemon || true
syncd prune job --dry-run
syncd prune job
syncd doctor . --seconds 0.1
syncd doctor . --peer --seconds 2 >peer & syncd doctor . --peer --seconds 2; wait $!
syncd doctor job --security
syncd install-units --dir units
HOME=$PWD syncd install-units --user
"""
"""Every verb of `syncd`, with values for its words."""


def test_each_command_is_run_by_a_test_or_shown_with_its_output():
    used, shown = set(), (ROOT / BY_HAND).read_text()
    for section, command in commands():
        known = command if command in RUN_BY else section
        assert known in RUN_BY, f"{section}: nothing runs {command!r}"
        # It was typed in the checkout.
        typed_there = command.replace("/shared/syncd/", "").replace("'/shared/syncd[", "'.[")
        assert RUN_BY[known] != BY_HAND or re.search(rf"{re.escape(typed_there)}[`\s]", shown), command
        used.add(known)
    assert used == set(RUN_BY)
    for test in {*RUN_BY.values()} - {BY_HAND}:
        path, _, name = test.partition("::")
        tree = ast.parse((ROOT / "tests" / path).read_text())
        assert not name or name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (
            test
        )


def test_each_verb_is_run_by_a_test():
    lines = VERBS.splitlines()
    verbs = set(syncd_commands.list_commands(None)) - {"probe"}  # tests/trainer/test_probe_command.py
    assert {verb for verb in verbs if not any(f"syncd {verb}" in line for line in lines)} == set()


@pytest.mark.slow
def test_every_verb_succeeds(tmp_path):
    for name in ("job", "weights", "base"):
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / "base/config.json").write_text("{}")
    save_file({"w": np.ones((4, 4))}, tmp_path / "weights/model.safetensors")
    said = typed(f"set -e\n{VERBS}", tmp_path).splitlines()
    assert [line for line in said if re.fullmatch(r"\d\.\d", line)] == ["1.1", "1.2"]
    assert list(tmp_path.glob("2.1.*")), "the follower has loaded what was rolled back to"
    assert [line for line in said if line.startswith("page http://127.0.0.1:")]
    weights = (tmp_path / "weights/model.safetensors").read_bytes()
    assert (tmp_path / "made/model.safetensors").read_bytes() == weights
    assert (tmp_path / ".config/systemd/user/syncd-user@.service").is_file()


@pytest.mark.slow
def test_the_demo_of_the_daemon_holds(tmp_path):
    """`make` runs in a copy of its files, with the environment of this test."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Makefile", "setup.cfg", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    python = tmp_path / ".venv/bin/python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / ".venv/.demo").touch()
    said = typed("make demo-daemon", tmp_path, MAKEFLAGS="--no-print-directory")
    assert "$ kill -9 the daemon" in said
    assert said.endswith("everything held\n")


def test_a_foreign_job_is_read_as_it_is(tmp_path):
    sample = next(one for one in SAMPLES if one.name == "fsdp")
    sample.place(tmp_path / "job")
    (tmp_path / "job/latest_checkpointed_iteration.txt").write_text("20")
    before = sorted(path.name for path in (tmp_path / "job").rglob("*"))
    state = f"--state-dir {tmp_path}/syncd-state"
    line = f"syncd watch {tmp_path}/job {state}"
    end = f"syncd wait {tmp_path}/job {state} --newer-than 0 --timeout 120; kill %1; wait"
    assert typed(f"set -m; {line} 2>/dev/null & {end}", tmp_path) == "1.20\n"
    assert sorted(path.name for path in (tmp_path / "job").rglob("*")) == before, "nothing is written into it"


def test_a_server_that_already_runs_is_followed(tmp_path):
    job = Job.at(tmp_path / "job")
    os.makedirs(job.root)
    write_step(job, 3)
    typed(f"syncd watch {job.root} --once --log-level warning", tmp_path)
    server = FakeVllm()
    try:
        line = f"syncd follow {job.root} --hook vllm={server.address} --stage {tmp_path}/stage"
        typed(f"{line} --once --wait 120", tmp_path)
        assert server.label.startswith("1.3.")  # and the beginning of the digest
    finally:
        server.stop()
    version = read_version(job)
    assert version is not None
    assert version.pair == (1, 3)
