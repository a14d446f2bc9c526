"""Every command of README.md and docs/getting-started.md runs in a test; here run those that no other test runs."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

from support.fake_engines import FakeVllm
from support.foreign_jobs import SAMPLES
from support.jobs import write_step
from support.paths import ROOT

from syncd.protocol.layout import Job
from syncd.protocol.version import read_version

PAGES = (ROOT / "README.md", ROOT / "docs/getting-started.md")
BY_HAND = "docs/first-contact.md"
"""Has the output of what needs a network or minutes."""

_QUICKSTART = "integration/test_readme_quickstart.py::test_every_command_of_the_quickstart_succeeds"
_SLURM = "trainer/test_getting_started.py::test_the_commands_of_the_page_train_a_model_on_slurm"
_ONE_MACHINE = "integration/test_init.py::test_the_command_for_one_machine_trains"
_AGENT = (
    "explorer/test_agents.py"
    "::test_the_agent_of_the_page_is_twenty_lines_and_plays_in_the_job_that_the_page_begins_with"
)
RUN_BY = {
    "README.md#Install": BY_HAND,
    "README.md#Quickstart": _QUICKSTART,
    "make setup": BY_HAND,
    "make demo": BY_HAND,
    "make demo-daemon": BY_HAND,
    "make demo-vllm": BY_HAND,
    "make demo-agents": BY_HAND,
    "syncd watch /ckpt/job --state-dir /var/tmp/syncd-state": (
        "integration/test_readme_commands.py::test_a_foreign_job_is_read_as_it_is"
    ),
    "trainer train grpo.toml": _ONE_MACHINE,
    "torchrun --nnodes 4 --nproc-per-node 8 --no-python trainer train grpo.toml": (
        "trainer/test_launch_names.py::test_a_job_of_several_processes_ends_without_meeting_another_trainer"
    ),
    "srun trainer train grpo.toml": _SLURM,
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --port 8000": BY_HAND,
    "syncd follow /ckpt/job --hook vllm=http://127.0.0.1:8000 --stage /dev/shm/syncd": (
        "integration/test_readme_commands.py::test_a_server_that_already_runs_is_followed"
    ),
    "explorer run grpo.toml --name e0": _ONE_MACHINE,
    "explorer serve grpo.toml --name e0": (
        "explorer/test_gateway_serve.py::test_eight_sessions_at_once_with_a_kill_and_a_version_in_the_middle_are_recorded_exactly"
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


def commands():
    """Yield each command of the pages: its section, whether it is in the first block of that, and itself."""
    for page in PAGES:
        for part in page.read_text().split("\n## ")[1:]:
            heading, _, text = part.partition("\n")
            blocks = re.findall(r"(?:^ {4}\S.*\n)+", text, re.MULTILINE)
            for number, block in enumerate(blocks):
                for line in block.splitlines():
                    yield f"{page.name}#{heading}", number == 0, re.sub(r"  +#.*", "", line.strip())


def line_of(start):
    """Return the command that begins in a way."""
    return next(command for _, _, command in commands() if command.startswith(start))


def test_each_command_is_run_by_a_test_or_shown_with_its_output():
    used = set()
    for section, is_first, command in commands():
        # "The end" of getting-started is typed with its section; the agent is a file, which its test reads.
        is_whole = is_first or "getting" in section or RUN_BY.get(section) == _AGENT
        known = command if command in RUN_BY else section if is_whole else ""
        assert known in RUN_BY, f"{section}: nothing runs {command!r}"
        used.add(known)
    assert used == set(RUN_BY)
    for test in set(RUN_BY.values()) - {BY_HAND}:
        path, _, name = test.partition("::")
        tree = ast.parse((ROOT / "tests" / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test
    shown = (ROOT / BY_HAND).read_text()
    for command, where in RUN_BY.items():
        assert where != BY_HAND or "#" in command or command in shown, command


def typed(line, place, **more):
    """Type a line in bash with the programs of this environment; return what it printed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line],
        env=os.environ | {"PATH": path, "no_proxy": "*", **more}, cwd=place, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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
