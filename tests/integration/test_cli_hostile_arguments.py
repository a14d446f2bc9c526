"""Command lines that nobody means: wrong usage and never a bug; and verbs that nobody can read or hear."""

import json
import os
import shlex
import subprocess
import sys

import click
import pytest
from support.jobs import start, write_step

from syncd.cli.main import run, syncd
from syncd.console import UncheckedPath
from syncd.protocol.layout import Job
from syncd.protocol.version import encode_version, read_version

HOSTILE = [
    "nan",
    "inf",
    "-inf",
    "-1",
    "1e300",
    "1" + "0" * 400,
    "9" * 5000,
    "",
    "a\0b",
    "\udcff",
    "x" * 100_000,
]
NUMBERS = {"nan", "inf", "-inf", "-1", "1e300", "1" + "0" * 400, "9" * 5000}
ENDS = frozenset({"status", "ls", "verify", "wait", "publish", "pin", "unpin", "prune", "rollback", "watch"})
"""Verbs that end by themselves; of the others only the command line is read."""

VERBS = [name for name in syncd.list_commands(click.Context(syncd))]  # noqa: C416 - a list of its own
ALWAYS = {
    "watch": ["--once", "--log-level", "error"],
    "wait": ["--timeout", "0"],
    "rollback": ["--timeout", "0"],
}


@pytest.fixture
def job(tmp_path):
    job = Job.at(tmp_path / "job")
    os.mkdir(job.root)
    write_step(job, 1)
    daemon, _, _ = start(job)
    daemon.tick(woken=True)
    daemon.close()
    return job


def command_of(verb: str) -> click.Command:
    command = syncd.get_command(click.Context(syncd), verb)
    assert command is not None
    return command


def is_number(param: click.Parameter) -> bool:
    kinds = type(click.INT), type(click.FLOAT), click.IntRange, click.FloatRange
    return isinstance(param.type, kinds) or param.name == "max_bytes"


def given_for(command: click.Command, job: Job, hostile: click.Parameter, value: str) -> list[str]:
    """Return a command line that is good but for one value."""
    good = {"job": job.root, "step": "1", "directory": f"{job.root}/global_step_1/actor"}
    line = list(ALWAYS.get(command.name or "", []))
    if isinstance(hostile, click.Option):
        line.append(f"{hostile.opts[-1]}={value}")
    for param in command.params:
        if isinstance(param, click.Argument) and (param.required or param is hostile):
            line += ["--"] if param is hostile and "--" not in line else []
            line.append(value if param is hostile else good.get(str(param.name), "x"))
    return line


@pytest.mark.parametrize("verb", VERBS)
def test_invalid_parameter_values_are_usage_errors_and_never_a_bug(job, verb, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    command = command_of(verb)
    if verb not in ENDS:
        monkeypatch.setattr(command, "callback", lambda **_: None)
    for param in command.params:
        if isinstance(param, click.Option) and param.is_flag:
            continue
        for value in HOSTILE:
            line = [verb, *given_for(command, job, param, value)]
            code = run(line)
            said = capsys.readouterr()
            where = shlex.join(line)[:300]
            assert code != 1, (where, said.err)
            assert "Traceback" not in said.err, where
            assert "a bug in" not in said.err, where
            if is_number(param) and value in NUMBERS:
                assert code == 2, (where, said.err)
            if isinstance(param.type, UncheckedPath) and value in ("", "a\0b"):
                assert code == 2, (where, said.err)
    strays = {"daemon.lock", "pins", "requests", "version.json"} & set(os.listdir(tmp_path))
    assert not strays, "nothing was written into the current directory"


def test_an_empty_state_dir_is_refused_and_an_empty_variable_ignored(job, capsys, monkeypatch):
    assert run(["status", job.root, "--state-dir", ""]) == 2
    assert "is a shell variable unset?" in capsys.readouterr().err
    monkeypatch.setenv("SYNCD_STATE_DIR", "")
    assert run(["status", job.root]) == 0


CLOSED = [">&-", "2>&-", "<&- >&- 2>&-"]


def shell(command: str) -> int:
    return subprocess.run(
        ["bash", "-c", command], check=False, stdin=subprocess.DEVNULL, capture_output=True, timeout=60
    ).returncode


@pytest.mark.parametrize("closed", CLOSED)
def test_verbs_with_closed_streams_keep_their_exit_codes(job, closed):
    syncd = f"{shlex.quote(sys.executable)} -m syncd"
    root = shlex.quote(job.root)
    write_step(job, 2)
    assert shell(f"{syncd} watch {root} --once {closed}") == 0
    assert read_version(job).step == 2
    assert shell(f"{syncd} status {root} {closed}") == 0
    assert shell(f"{syncd} wait {root} --newer-than 9 --timeout 0 {closed}") == 4
    assert shell(f"{syncd} --nonsense {closed}") == 2


@pytest.mark.parametrize("uri", ["s3://bucket/\x1b]0;title\x07", "s3://bucket\nrm -rf /", "s3://a\r"])
def test_a_uri_with_control_characters_is_not_printed(job, uri, capsys):
    version = read_version(job)
    document = json.loads(encode_version(version)) | {"kind": "remote", "path": uri}
    with open(job.version, "w") as file:
        json.dump(document, file)
    assert run(["wait", job.root, "--print", "path", "--timeout", "0"]) == 65
    said = capsys.readouterr()
    assert said.out == ""
    assert uri not in said.err
    assert run(["wait", job.root, "--timeout", "0"]) == 0
    capsys.readouterr()
    assert run(["wait", job.root, "--json", "--timeout", "0"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed)["path"] == uri
    assert printed.replace("\n", "").isprintable()
