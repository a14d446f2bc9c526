"""The entry point: instant help, lazy verbs, one line an error."""

import contextlib
import importlib
import os
import pty
import re
import signal
import subprocess
import sys
import time

import click
import pytest
from support.cli import LONG, VERBS, command, environment, modules_loaded, spawn
from support.jobs import write_step

from syncd import __version__
from syncd.cli import main
from syncd.errors import CorruptDataError
from syncd.protocol.layout import Job

HEAVY = (
    "structlog",
    "rich",
    "watchdog",
    "prometheus_client",
    "asyncio",
    "syncd.daemon",
    "syncd.views",
    "xxhash",
)

MODULES_OF_HELP = 200


def process(*args, **more):
    where = environment(**more)
    return subprocess.run(command(*args), env=where, capture_output=True, text=True, check=False)


def loaded(*args, modules=HEAVY):
    """Return which of these modules a command line has imported."""
    script = (
        "import sys; from syncd.cli.main import run\n"
        f"try: run({list(args)!r})\nexcept SystemExit: pass\n"
        f"print([name for name in {modules!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment(), check=True
    )
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["--show-completion", "bash"], []])
def test_help_imports_no_heavy_module(args):
    assert loaded(*args) == "[]"


def test_help_of_a_verb_imports_no_module_that_only_the_verb_needs():
    for verb in ("status", "ls", "wait"):
        assert not re.search("structlog|rich|watchdog|asyncio", loaded(verb, "--help")), verb


@pytest.mark.parametrize("verb", ["ls", "status"])
def test_a_verb_that_needs_no_part_looks_for_none(tmp_path, verb):
    (tmp_path / "config.toml").write_text("[daemon]\nkeep_last = 3\n")
    assert loaded(verb, str(tmp_path), modules=("importlib.metadata",)) == "[]"


def test_help_loads_few_modules(record_line):
    times = []
    for _ in range(5):
        started = time.perf_counter()
        subprocess.run(command("--help"), capture_output=True, env=environment(), check=True)
        times.append(time.perf_counter() - started)
    modules = modules_loaded("--help")
    record_line(f"syncd --help: {min(times) * 1000:.0f} ms warm, {len(modules)} modules")
    # Start-up is what it takes, and modules are what start-up takes: a count that no load changes.
    assert len(modules) < MODULES_OF_HELP


def test_help_lists_every_verb_and_each_one_exists(shell):
    text = shell("--help").out
    for verb, line in main.syncd.verbs.items():
        assert f"{verb}  " in text
        assert line[:40] in text
        assert isinstance(main.syncd.get_command(click.Context(main.syncd), verb), click.Command)


def test_verbs_of_parts_stand_where_they_say(shell):
    verbs = list(main.syncd.verbs)
    assert verbs[-2:] == ["follow", "probe"]
    for name, point in main.syncd.others.items():
        after = getattr(importlib.import_module(point.module), "AFTER", None)
        assert after is None or verbs[verbs.index(name) - 1] == after


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb_shows_an_example(shell, verb):
    done = shell(verb, "--help")
    assert done.code == 0
    examples = done.out.split("Example")[1]
    assert re.search(rf"^ +(seen=.*\n.*)?.*syncd {verb} [/-]", examples, re.MULTILINE)
    assert "\\b" not in done.out


def test_the_version_option_prints_the_version(shell):
    assert shell("--version").out == f"syncd, version {__version__}\n"


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_show_completion_prints_a_shell_script(name):
    done = process("--show-completion", name)
    assert done.returncode == 0
    assert "_SYNCD_COMPLETE" in done.stdout


def test_shell_completion_completes_a_verb():
    more = {"_SYNCD_COMPLETE": "bash_complete", "COMP_WORDS": "syncd st", "COMP_CWORD": "1"}
    done = process(**more)
    assert done.stdout.split() == ["plain,status"]


def test_python_m_syncd_prints_the_same_version():
    done = process("--version")
    assert done.stdout == f"syncd, version {__version__}\n"


def test_an_unknown_verb_is_a_usage_error_with_the_closest_verb(shell):
    done = shell("statsu")
    assert done.code == 2
    assert "did you mean 'status'?" in done.err


@pytest.mark.parametrize(
    "args", [[], ["status"], ["status", "--nonsense"], ["wait", "/x", "--newer-than", "soon"]]
)
def test_usage_errors_exit_with_2(shell, args):
    assert shell(*args).code == 2


def test_an_error_is_printed_as_one_line_and_a_hint(shell, tmp_path):
    done = shell("status", tmp_path / "none")
    assert done.code == 74
    assert done.out == ""
    assert done.err.splitlines() == [
        f"error: the job directory does not exist: {tmp_path}/none",
        f"hint: findmnt -T {tmp_path}/none, or for a new one: mkdir -p {tmp_path}/none",
    ]


def fail_with(monkeypatch, error):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr("syncd.cli.options.open_job", fails)


def test_a_bug_says_how_to_report_it(shell, monkeypatch, tmp_path):
    fail_with(monkeypatch, KeyError("surprise"))
    done = shell("status", tmp_path)
    assert done.code == 1
    error, hint = done.err.splitlines()
    assert error.startswith(f"error: a bug in syncd {__version__}: KeyError: 'surprise' (test_cli_main.py:")
    assert hint == f"hint: report what this prints: syncd --debug status {tmp_path}"


def test_debug_shows_the_traceback(shell, monkeypatch, tmp_path):
    fail_with(monkeypatch, CorruptDataError("bad"))
    assert "Traceback" not in shell("status", tmp_path).err
    done = shell("--debug", "status", tmp_path)
    assert done.code == 65
    assert "Traceback" in done.err
    monkeypatch.setenv("SYNCD_DEBUG", "1")
    assert "Traceback" in shell("status", tmp_path).err


@pytest.mark.parametrize(
    ("number", "hint"), [(28, "df -h {0}"), (30, "findmnt -T {0}"), (13, "ls -ld {0}"), (5, "ls -ld {0}")]
)
def test_operating_system_errors_exit_with_74_and_a_hint(shell, monkeypatch, tmp_path, number, hint):
    fail_with(monkeypatch, OSError(number, os.strerror(number), f"{tmp_path}/not-there"))
    done = shell("status", tmp_path)
    assert done.code == 74
    assert done.err.splitlines() == [
        f"error: {os.strerror(number)}: {tmp_path}/not-there",
        f"hint: {hint.format(tmp_path)}",
    ]


def test_an_interrupt_exits_with_130(shell, monkeypatch, tmp_path):
    fail_with(monkeypatch, KeyboardInterrupt())
    done = shell("status", tmp_path)
    assert (done.code, done.err) == (130, "")


def until_it_sleeps(pid):
    """Wait until a thread of a process sleeps: an interpreter that still starts ends with a traceback."""
    ends = time.monotonic() + LONG
    while time.monotonic() < ends:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/wchan", encoding="ascii") as file:
                if "nanosleep" in file.read():
                    return
        time.sleep(0.05)
    raise AssertionError("it never waits")


def test_ctrl_c_ends_a_wait_without_a_traceback(tmp_path):
    with spawn("wait", tmp_path, "--timeout", 2 * LONG) as process:
        until_it_sleeps(process.pid)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LONG)
    assert (process.returncode, out, err) == (130, "", "")


def test_a_closed_pipe_exits_with_141_without_an_error(tmp_path):
    job = Job.at(tmp_path)
    write_step(job, 1)
    with spawn("status", tmp_path, "--watch", "--json", "--interval", "0.2") as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(LONG) == 141
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.parametrize("step", ["global_step_3", "global_step_3/"])
def test_a_step_given_as_a_job_is_refused_with_its_job(shell, tmp_path, step):
    done = shell("status", f"{tmp_path}/{step}")
    assert done.code == 2
    assert f"its job is {tmp_path}" in done.err


def test_an_empty_job_argument_is_reported_as_an_unset_variable(shell):
    assert "shell variable" in shell("wait", "").err


@pytest.mark.parametrize(("variable", "coloured"), [("", True), ("1", False)])
def test_errors_are_coloured_on_a_terminal_alone(variable, coloured):
    line = command("status", "/nowhere")
    ours, theirs = pty.openpty()
    with subprocess.Popen(line, stderr=theirs, env=environment(NO_COLOR=variable)) as process:
        os.close(theirs)
        said = b""
        with contextlib.suppress(OSError):  # the end, on a terminal
            while piece := os.read(ours, 4096):
                said += piece
    os.close(ours)
    assert process.returncode == 74
    assert said.startswith(b"\x1b[31m\x1b[1merror:\x1b[0m the job" if coloured else b"error: the job")
