"""Without the extras every verb works, or names the extra that it needs; processes in which nothing else imports."""

import subprocess
import sys

import pytest
from support.cli import ROOT, environment
from support.job_file import LEAST

from explorer_hooks.cli.main import explorer
from syncd.extras import extra_of, install_command
from trainer.cli.main import trainer

CONFIG = 78
CALLS = {
    ("trainer", "train"): (["FILE"], "trainer"),
    ("trainer", "stages"): (["FILE"], "trainer"),
    ("trainer", "config"): (["schema"], "trainer"),
    ("trainer", "plot"): (["JOB"], "plot"),
    ("trainer", "export"): (["JOB", "1", "OUT"], "trainer"),
    ("trainer", "import"): (["FILE"], "trainer"),
    ("trainer", "republish"): (["JOB", "--to", "OUT"], "trainer"),
    ("explorer", "run"): (["FILE"], "explorer"),
    ("explorer", "serve"): (["FILE"], "explorer"),
    ("explorer", "bench"): (["JOB", "--config", "FILE"], "explorer"),
    ("explorer", "config"): (["schema"], "explorer"),
    ("syncd", "follow"): (
        ["JOB", "--hook", "transformers=json:dumps", "--once", "--wait", "0"],
        "transformers",
    ),
    ("syncd", "probe"): (["JOB"], "transformers"),
    ("syncd", "materialise"): (["JOB", "1", "--to", "OUT"], "delta"),
}
"""Each verb with what it is given, and the extra that it then asks for."""


def plain(program, *arguments):
    bare = [sys.executable, str(ROOT / "tests/programs/bare.py"), program]
    return subprocess.run(
        [*bare, *arguments], check=False, capture_output=True, text=True, env=environment(), timeout=120
    )


@pytest.fixture
def given(tmp_path):
    """Return what the words in capitals stand for: a file, and a job with one line of metrics."""
    (tmp_path / "file.toml").write_text(LEAST)
    (tmp_path / "job").mkdir()
    (tmp_path / "job/metrics.jsonl").write_text('{"step": 1, "metrics": {"critic/score/mean": 0.5}}\n')
    return {
        "FILE": str(tmp_path / "file.toml"), "JOB": str(tmp_path / "job"), "OUT": str(tmp_path / "out")
    }  # fmt: skip


def test_every_verb_is_in_the_table_of_calls():
    called = {("trainer", verb) for verb in trainer.verbs} | {("explorer", verb) for verb in explorer.verbs}
    needing = {("syncd", verb) for verb in ("follow", "probe", "materialise")}
    assert called | needing == set(CALLS)


@pytest.mark.parametrize(("program", "verb"), CALLS)
def test_a_verb_without_its_extra_names_the_extra(program, verb, given):
    arguments, extra = CALLS[program, verb]
    ended = plain(program, verb, *(given.get(word, word) for word in arguments))
    assert ended.returncode == CONFIG, ended.stderr
    assert install_command(extra) in ended.stderr
    assert "a bug in" not in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("program", ["trainer", "explorer", "syncd"])
def test_help_works_without_extras(program):
    ended = plain(program, "--help")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_missing_module_is_mapped_to_its_extra_or_none():
    assert extra_of("nowhere", "trainer") is None
    assert extra_of("torch.cuda", "explorer") == "transformers"
    assert extra_of("torch.cuda", "trainer") == "trainer"


def test_a_rank_without_its_extra_names_the_extra(given, monkeypatch, capsys):
    """Where pydantic is installed and verl is not, ranks are the first to notice."""
    pytest.importorskip("pydantic", reason="the trainer needs pydantic")
    from trainer.config.load import load_config
    from trainer.launch import train

    def lacking(*_):
        raise ModuleNotFoundError("No module named 'verl.workers'", name="verl.workers")

    monkeypatch.setenv("TRAINER_CONFIG", load_config(given["FILE"]).model_dump_json())
    monkeypatch.setattr(train, "run_here", lacking)
    assert train.main("trainer.run:run_rank") == CONFIG
    assert f"error: verl is not installed\nhint: {install_command('trainer')}" in capsys.readouterr().err
