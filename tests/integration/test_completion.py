"""What a shell gets at Tab: jobs, steps, hooks, engines and keys of all three programs, fast, and never an error."""

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from beds import probe
from beds.silent import silent
from support.cli import LONG, environment

pytest.importorskip("pydantic", reason="two of the programs read a job's file")

import explorer_hooks.cli.main
import syncd.cli.main
import trainer.cli.main
from syncd import completion
from syncd.console import SHELLS

PROGRAMS = {
    "syncd": syncd.cli.main.run,
    "trainer": trainer.cli.main.run,
    "explorer": explorer_hooks.cli.main.run,
}
ENGINES = ["vllm", "sglang", "transformers"]
HOOKS = "callback command lora sglang sglang-lora transformers vllm webhook"
BIN = Path(sys.executable).parent


def asked(program, *words, shell="bash"):
    """Return the environment in which a shell asks for completions of a line; bash splits words at `=` and `:`."""
    typed = (
        re.split("([=:]+)", "\n".join((program, *words)))
        if shell == "bash"
        else ["\n".join((program, *words))]
    )
    pieces = "\n".join(typed).split("\n")
    # A break at the end of the line is the word that is typed, not an empty one after it.
    pieces = pieces[:-1] if len(typed) > 1 and not typed[-1] else pieces
    return {
        "COMP_WORDS": "\n".join(pieces),
        "COMP_CWORD": str(len(pieces) - 1),
        f"_{program.upper()}_COMPLETE": f"{shell}_complete",
    }


@pytest.fixture
def complete(monkeypatch, capsys):
    """Return what answers a line, the word to complete last, as the shell reads it."""
    monkeypatch.setattr(completion, "PATIENCE", LONG)

    def answered(*line, shell="bash"):
        capsys.readouterr()
        with monkeypatch.context() as patch:
            for name, value in asked(*line, shell=shell).items():
                patch.setenv(name, value)
            assert PROGRAMS[line[0]]([]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out.splitlines()

    return answered


@pytest.fixture
def job(tmp_path):
    """Return a job directory with three steps, one of them pinned."""
    for name in (
        "global_step_1",
        "global_step_12",
        "global_step_5",
        ".global_step_7.x",
        "notes",
        ".syncd/pins",
    ):
        (tmp_path / "job" / name).mkdir(parents=True)
    (tmp_path / "job/.syncd/pins/global_step_5.json").write_text("{}")
    return str(tmp_path / "job")


def plain(words):
    return [f"plain,{word}" for word in (words.split() if isinstance(words, str) else words)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["syncd", "st"], "status"),
        (["trainer", ""], "train stages import republish config plot export"),
        (["explorer", ""], "run serve bench config"),
        (["syncd", "--show-completion", ""], SHELLS),
        (["syncd", "pin", "JOB", ""], "12 5 1"),
        (["syncd", "pin", "JOB", "1"], "12 1"),
        (["syncd", "verify", "JOB", "--deep", "5"], "5"),
        (["syncd", "unpin", "JOB", ""], "5"),
        (["syncd", "publish", "JOB", ""], ""),
        (["syncd", "publish", "JOB", "13", "DIR", "--delta-from", ""], "12 5 1"),
        (["trainer", "export", "JOB", ""], "12 5 1"),
        (["syncd", "follow", "JOB", "--hook", ""], HOOKS),
        (["syncd", "follow", "JOB", "--hook=vl"], "vllm"),
        (["syncd", "follow", "--hook=vllm=http://127.0.0.1:8000", "JOB", "--stag"], "--stage"),
        (["syncd", "init", "DIR", "--engine", ""], ENGINES),
        (["trainer", "train", "job.toml", "--engine.na"], "--engine.name"),
        (["trainer", "train", "job.toml", "--engine.name", "ve"], "verl verl_legacy"),
        (["trainer", "train", "job.toml", "--engine.name=ti"], "tinker"),
        (["trainer", "stages", "job.toml", "--engine.packing="], "true false"),
        (["trainer", "train", "job.toml", "--allow-change", "critic.en"], "critic.enabled"),
        (["trainer", "import", "theirs.yaml", "--from", "t"], "trinity trl"),
        (["explorer", "run", "job.toml", "--explorer.engine.ki"], "--explorer.engine.kind"),
        (["explorer", "run", "job.toml", "--explorer.engine.kind", "s"], "sglang"),
        (["explorer", "run", "job.toml", "--explorer.name", ""], ""),
        (["explorer", "run", "job.toml", "--nonsense", ""], ""),
    ],
)
def test_completion_offers_what_may_stand_there(complete, job, line, expected):
    assert complete(*(job if word == "JOB" else word for word in line)) == plain(expected)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("syncd status", "dir"), ("syncd follow", "dir"), ("trainer plot", "dir"), ("trainer train", "file"),
        ("explorer run", "file"), ("trainer republish", "dir"), ("syncd watch JOB --config", "file"),
        ("syncd publish JOB 1", "dir"),
    ],
)  # fmt: skip
def test_the_shell_itself_completes_jobs_and_files(complete, line, kind):
    assert complete(*line.split(), "") == [f"{kind},"]


def test_zsh_and_fish_get_each_command_with_its_line_of_help(complete):
    about = syncd.cli.main.VERBS["status"]
    assert complete("syncd", "statu", shell="zsh") == ["plain", "status", about.replace(":", r"\:")]
    line = ["explorer", "run", "job.toml", "--explorer.engine.kind=v"]
    assert complete(*line, shell="zsh")[:2] == ["plain", "vllm"]


@pytest.mark.parametrize("line", [["pin", "/nowhere", ""], ["unpin", "JOB", "1"], ["nonsense", ""]])
def test_what_cannot_be_completed_is_no_error(complete, tmp_path, line):
    (tmp_path / "global_step_3").write_text("a file")
    words = [str(tmp_path) if word == "JOB" else word for word in line]
    assert complete("syncd", *words) in ([], plain(syncd.cli.main.syncd.verbs))


def ask(program, *words):
    """Ask in a process of its own, as a shell does."""
    where = environment(PATH=f"{BIN}:{os.environ['PATH']}", **asked(program, *words))
    return subprocess.run(
        [BIN / program], env=where, capture_output=True, text=True, timeout=LONG, check=False
    )


def test_completion_imports_neither_torch_nor_tables():
    script = (
        "import sys, atexit; from {0}.cli.main import run\n"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr)); sys.exit(run([]))"
    )
    lines = {
        "syncd": ["syncd", "follow", "job", "--hook", "v"],
        "trainer": ["trainer", "train", "job.toml", "--engine.name", "v"],
        "explorer_hooks": ["explorer", "run", "job.toml", "--explorer.engine.kind", "v"],
    }
    for package, line in lines.items():
        done = subprocess.run(
            [sys.executable, "-c", script.format(package)],
            env=environment(**asked(*line)), capture_output=True, text=True, timeout=LONG, check=True,
        )  # fmt: skip
        assert "plain,v" in done.stdout
        assert not {"torch", "numpy", "pyarrow", "transformers", "verl", "rich"} & set(done.stderr.split())


@pytest.mark.group("mounts")
def test_completion_ends_on_a_mount_that_never_answers(job):
    if (reason := probe.silent_mount()) is not None:
        pytest.skip(reason)
    with silent(job):
        for program, verb in (("syncd", "pin"), ("trainer", "export")):
            done = ask(program, verb, job, "")
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class Terminal:
    """An interactive bash on a terminal, in a directory."""

    def __init__(self, directory):
        pid, self._end = pty.fork()
        if pid == 0:
            os.chdir(directory)
            where = environment(
                PATH=f"{BIN}:{os.environ['PATH']}", PS1="$ ", INPUTRC="/dev/null", TERM="dumb"
            )
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], where)
        self._pid, self.shown = pid, ""

    def type(self, text):
        """Type something; what was shown before is forgotten."""
        self.shown = ""
        os.write(self._end, text.encode())

    def until(self, text):
        """Wait until a text is shown."""
        ends = time.monotonic() + LONG
        while text not in self.shown and time.monotonic() < ends:
            if select.select([self._end], [], [], 0.2)[0]:
                self.shown += os.read(self._end, 4096).decode()
        assert text in self.shown, self.shown

    def close(self):
        os.close(self._end)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def test_an_interactive_bash_completes_after_sourcing_the_scripts(job):
    with contextlib.closing(Terminal(os.path.dirname(job))) as bash:
        for program in PROGRAMS:
            bash.type(f'eval "$({program} --show-completion bash)"; echo "{program}"-sourced\n')
            bash.until(f"{program}-sourced\r\n")
        for typed, shown in (
            ("syncd pin jo\t", "job/"),
            ("\x15syncd unpin job \t", "job 5 "),
            ("\x15syncd follow --hook=vl\t", "--hook=vllm "),
            ("\x15trainer train x --engine.name=verl_\t", "verl_legacy "),
            ("\x15explorer run x --explorer.engine.kind sg\t", "sglang "),
        ):
            bash.type(typed)
            bash.until(shown)
        bash.type("\x15exit\n")
