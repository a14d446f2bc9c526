"""Every command of README.md and docs/getting-started.md runs in a test; here run those that no other test runs."""

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
from support.readme import commands, line_of, table_commands, typed

from syncd.protocol.layout import Job
from syncd.protocol.version import read_version

BY_HAND = "docs/first-contact.md"
"""Has the output of what needs a network or an engine."""

_HERE = "integration/test_readme_commands.py"
_QUICKSTART = "integration/test_readme_quickstart.py::test_every_command_of_the_quickstart_succeeds"
_SLURM = "trainer/test_getting_started.py::test_the_commands_of_the_page_train_a_model_on_slurm"
_ONE_MACHINE = "integration/test_init.py::test_the_command_for_one_machine_trains"
_TRAINER = "trainer/test_readme_trainer.py"
_SYSTEMD = "integration/test_systemd.py::test_the_user_unit_runs_the_daemon_without_root"
_CLI = "trainer/test_trainer_cli.py"
_CONFIG = f"{_CLI}::test_the_config_command_prints_schema_docs_and_algorithms"
_AGENT = (
    "parts/agents/test_agents.py"
    "::test_the_agent_of_the_page_is_twenty_lines_and_plays_in_the_job_that_the_page_begins_with"
)
RUN_BY = {
    "README.md#Install": BY_HAND,
    "README.md#Quickstart": _QUICKSTART,
    "make setup": BY_HAND,
    "make demo": BY_HAND,
    "make test": BY_HAND,
    "make demo-daemon": f"{_HERE}::test_the_demo_of_the_daemon_holds",
    "make demo-vllm": BY_HAND,
    "make demo-agents": BY_HAND,
    "syncd watch /ckpt/job --state-dir /var/tmp/syncd-state": f"{_HERE}::test_a_foreign_job_is_read_as_it_is",
    "syncd install-units --user && systemctl --user daemon-reload": _SYSTEMD,
    'systemctl --user enable --now "syncd-user@$(systemd-escape -p /ckpt/job).service"': _SYSTEMD,
    'systemctl --user status "syncd-user@$(systemd-escape -p /ckpt/job).service"': _SYSTEMD,
    "trainer train grpo.toml": f"{_TRAINER}::test_the_trainer_alone_and_under_torchrun_trains",
    "torchrun --nnodes 4 --nproc-per-node 8 --no-python trainer train grpo.toml": (
        f"{_TRAINER}::test_the_trainer_alone_and_under_torchrun_trains"
    ),
    "srun trainer train grpo.toml": "trainer/test_slurm_files.py::test_srun_trains_with_one_rank_a_task",
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --port 8000": BY_HAND,
    "syncd follow /ckpt/job --hook vllm=http://127.0.0.1:8000 --stage /dev/shm/syncd": (
        f"{_HERE}::test_a_server_that_already_runs_is_followed"
    ),
    "explorer run grpo.toml --name e0": _ONE_MACHINE,
    "explorer serve grpo.toml --name e0": (
        "parts/agents/test_gateway_serve.py::test_eight_sessions_at_once_with_a_kill_and_a_version_in_the_middle_are_recorded_exactly"
    ),
    "README.md#An agent of your own": _AGENT,
    "getting-started.md#Environment": BY_HAND,
    "getting-started.md#Check the mount": _SLURM,
    "getting-started.md#A model": _SLURM,
    "getting-started.md#A job": _SLURM,
    "getting-started.md#Start it": _SLURM,
    "getting-started.md#Watch it": _SLURM,
    "trainer train job.toml & explorer run job.toml --name e0": _ONE_MACHINE,
}
"""What runs each command, or each first block of a section; tests below tests/."""

TABLES = {
    "trainer train CONFIG [--dry-run] [--section.key value]": (
        f"{_CLI}::test_a_dry_run_prints_the_resolved_file_and_changes_nothing"
    ),
    "trainer stages CONFIG": f"{_TRAINER}::test_the_stages_of_a_file_train_one_after_the_other",
    "trainer plot JOB": _ONE_MACHINE,
    "trainer import FILE --to JOB.TOML": (
        "parts/importing/test_importing.py::test_a_file_becomes_one_that_trainer_and_explorer_read"
    ),
    "trainer republish JOB --to DIR": (
        "parts/importing/test_republish.py::test_steps_are_served_while_the_job_runs_and_after_it_was_rewound"
    ),
    "trainer export JOB STEP OUT [--critic]": _ONE_MACHINE,
    "trainer config schema": _CONFIG,
    "trainer config docs": _CONFIG,
    "trainer config algorithms": _CONFIG,
}
"""What runs the commands of README's tables that do not begin with `syncd`."""

VERBS = """
syncd init new --model base
syncd watch job 2>watch.log & daemon=$!
syncd publish job 1 weights
syncd wait job --newer-than 0 --timeout 60
syncd publish job 2 weights
syncd wait job --newer-than 1 --timeout 60
syncd status job
syncd ls job
syncd verify job
syncd verify job 1 --deep
syncd materialise job 1 --to made
syncd pin job 1
syncd unpin job 1
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
"""Every verb of README's table, with values for its words."""


def test_each_command_is_run_by_a_test_or_shown_with_its_output():
    used, shown = set(), (ROOT / BY_HAND).read_text()
    for section, is_first, command in commands():
        # "The end" of getting-started is typed with its section; the agent is a file, which its test reads.
        is_whole = is_first or "getting" in section or RUN_BY.get(section) == _AGENT
        known = command if command in RUN_BY else section if is_whole else ""
        assert known in RUN_BY, f"{section}: nothing runs {command!r}"
        # The page was typed in the checkout.
        typed_there = command.replace("/shared/syncd/", "").replace("'/shared/syncd[", "'.[")
        assert RUN_BY[known] != BY_HAND or re.search(rf"{re.escape(typed_there)}[`\s]", shown), command
        used.add(known)
    assert used == set(RUN_BY)
    for test in {*RUN_BY.values(), *TABLES.values()} - {BY_HAND}:
        path, _, name = test.partition("::")
        tree = ast.parse((ROOT / "tests" / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


def test_each_command_of_a_table_is_run_by_a_test():
    ours = [command for command in table_commands() if command.startswith("syncd ")]
    assert set(table_commands()) == {*ours, *TABLES}
    for command in ours:
        verb = " ".join(command.split()[:2])
        lines = [line for line in VERBS.splitlines() if verb in line]
        assert lines, f"nothing runs {command!r}"
        for option in re.findall(r"--[a-z-]+", command):
            assert any(option in line for line in lines), f"nothing runs {command!r} with {option}"


@pytest.mark.slow
def test_every_command_of_the_table_succeeds(tmp_path):
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
    said = typed(line_of("make demo-daemon"), tmp_path, MAKEFLAGS="--no-print-directory")
    assert "$ kill -9 the daemon" in said
    assert said.endswith("everything held\n")


def test_a_foreign_job_is_read_as_it_is(tmp_path):
    sample = next(one for one in SAMPLES if one.name == "fsdp")
    sample.place(tmp_path / "job")
    (tmp_path / "job/latest_checkpointed_iteration.txt").write_text("20")
    before = sorted(path.name for path in (tmp_path / "job").rglob("*"))
    line = line_of("syncd watch /ckpt").replace("/ckpt", str(tmp_path)).replace("/var/tmp", str(tmp_path))
    state = f"--state-dir {tmp_path}/syncd-state"
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
        line = line_of("syncd follow /ckpt").replace("/ckpt", str(tmp_path))
        line = line.replace("http://127.0.0.1:8000", server.address).replace(
            "/dev/shm/syncd", f"{tmp_path}/stage"
        )
        typed(f"{line} --once --wait 120", tmp_path)
        assert server.label.startswith("1.3.")  # and the beginning of the digest
    finally:
        server.stop()
    version = read_version(job)
    assert version is not None
    assert version.pair == (1, 3)
