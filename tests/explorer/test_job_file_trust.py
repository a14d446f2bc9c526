"""Code that a file in a job names runs only if nobody but its user and root could have written it."""

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("pydantic", reason="explorers need pydantic")

from support.stand_ins import leave_model

from explorer_hooks.cli.main import run as explorer
from syncd.errors import ConfigError
from syncd.jobfile.code_trust import require_own_model
from syncd.jobfile.model import KEYS
from trainer.cli.main import run as trainer

ROOT = Path(__file__).parents[2]
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user: needs root")

PLAIN = """
[job]
dir = "{job}"
permissions = "group"
group = "0"
[model]
path = "model"
{model}
[data]
group_size = 2
"""
TASKS = '[explorer]\ntasks = "tasks.jsonl"\n'
MEASURED = '[explorer.evaluation]\ntasks = "held-out.jsonl"\n'
SERVED = '[explorer.engine]\nkind = "vllm"\ncommand = "serve {model} {host} {port}"\n'

CODE_OF_MODEL = "trust_remote_code = true"
KERNEL = 'attn_implementation = "somebody/kernel"'

CODE = {
    "model.attn_implementation": ("run", KERNEL),
    "model.trust_remote_code": ("run", CODE_OF_MODEL),
    "explorer.engine.command": ("run", TASKS + SERVED),
    "explorer.reward.function": ("bench", MEASURED + '[explorer.reward]\nfunction = "rewards:score"\n'),
    "explorer.reward.functions": (
        "run", TASKS + '[explorer.reward]\nfunctions = { math = 1.0, "rewards:short" = 0.2 }\n',
    ),
    "explorer.evaluation.reward": ("bench", MEASURED + 'reward = "rewards:score"\n'),
    "explorer.evaluation.sets.NAME.reward": (
        "bench", '[explorer.evaluation.sets.drawn]\ntasks = "held-out.jsonl"\nreward = "rewards:score"\n',
    ),
    "explorer.agent.command": ("run", TASKS + '[explorer.agent]\ncommand = "python agent.py"\n'),
    "explorer.agent.function": ("run", TASKS + '[explorer.agent]\nfunction = "agent:play"\n'),
    "explorer.agent.environment": ("run", '[explorer.agent]\nenvironment = "verifiers:sums"\n'),
    "explorer.agent.python": ("run", '[explorer.agent]\nenvironment = "verifiers:sums"\npython = "/x/python"\n'),
}  # fmt: skip
"""For each key that may name code, a program that reads it and what its file has."""


@pytest.fixture
def job(tmp_path):
    """Return the directory of a job that is this user's alone."""
    (tmp_path / "job/.syncd").mkdir(parents=True)
    for path in (tmp_path, tmp_path / "job"):
        path.chmod(0o755)
    return tmp_path / "job"


def write(job, more, directory=None):
    path = (directory or job) / "config.toml"
    path.unlink(missing_ok=True)
    is_model = more in (CODE_OF_MODEL, KERNEL)
    text = PLAIN.replace("{job}", str(job)).replace("{model}", more if is_model else "")
    path.write_text(text + (TASKS if is_model else more))
    path.chmod(0o644)
    return path


def started(program, path, *more):
    """Start a program with a file as far as it reads it; return its exit code."""
    if program == "bench":
        bench = pytest.importorskip("explorer_hooks.parts.evaluation.load")
        bench.load_bench_file(str(path.parent), None, [one for one in more if one != "--trust-job-file"],
                        trust="--trust-job-file" in more)  # fmt: skip
        return 0
    return explorer([program, str(path), *more, "--dry-run"])


def outcome(capsys, program, path, *more):
    """Return the error of a start, empty if there is none."""
    try:
        code = started(program, path, *more)
    except ConfigError as error:
        return str(error)
    said = capsys.readouterr().err
    assert (code == 0) == (said == ""), said
    return said


def test_each_key_that_may_name_code_is_tried_here():
    pytest.importorskip("explorer_hooks.parts.agents.tables")
    assert {name for name, key in KEYS.all.items() if key.code} == set(CODE)


@pytest.mark.parametrize("key", CODE)
def test_a_file_in_a_job_that_others_can_write_runs_no_code(job, capsys, key):
    program, more = CODE[key]
    path = write(job, more)
    assert outcome(capsys, program, path) == ""
    for weak in (path, job):
        weak.chmod(weak.stat().st_mode | 0o020)
        refused = outcome(capsys, program, path)
        assert "can write to it" in refused
        assert key.rpartition(".")[2] in refused or key.endswith("python")  # the environment is named first
        assert outcome(capsys, program, path, "--trust-job-file") == ""
        weak.chmod(weak.stat().st_mode & ~0o020)


@as_root
@pytest.mark.parametrize("key", ["explorer.reward.function", "explorer.engine.command"])
def test_a_file_of_another_user_runs_no_code(job, capsys, key):
    program, more = CODE[key]
    path = write(job, more)
    os.chown(path, NOBODY, NOBODY)
    assert f"belongs to user {NOBODY}" in outcome(capsys, program, path)
    (job / "mine.toml").write_text(path.read_text())
    os.unlink(path)
    os.symlink("mine.toml", path)
    os.lchown(path, NOBODY, NOBODY)
    if program == "run":
        assert f"belongs to user {NOBODY}" in outcome(capsys, program, path), "whose link it is matters"


def test_a_file_that_names_no_code_is_never_refused(job, capsys):
    plain = TASKS + MEASURED + "[explorer.reward]\nfunctions = { math = 1.0, exact_match = 1.0 }\n"
    path = write(job, plain)
    path.write_text(path.read_text().replace("[model]", '[model]\nattn_implementation = "flash_attention_2"'))
    path.chmod(0o666)
    job.chmod(0o777)
    assert outcome(capsys, "run", path) == ""
    assert outcome(capsys, "bench", path) == ""


def test_a_file_outside_of_jobs_counts_as_its_users(job, tmp_path, capsys):
    (tmp_path / "own").mkdir()
    path = write(job, CODE["explorer.reward.functions"][1], tmp_path / "own")
    (tmp_path / "own").chmod(0o777)
    assert outcome(capsys, "run", path) == ""
    os.symlink(path, job / "config.toml")
    assert "can write to it" in outcome(capsys, "run", job / "config.toml")
    (tmp_path / "own/link.toml").symlink_to(write(job, CODE["explorer.agent.command"][1]))
    (job / "config.toml").chmod(0o666)
    assert "can write to it" in outcome(capsys, "run", tmp_path / "own/link.toml")


def test_the_file_of_a_named_job_is_of_a_job_whatever_others_have_removed(job, capsys):
    path = write(job, CODE["explorer.reward.function"][1])
    path.chmod(0o666)
    (job / ".syncd").rmdir()
    assert "can write to it" in outcome(capsys, "bench", path)


def test_what_the_command_line_gives_is_the_users(job, capsys):
    path = write(job, CODE["explorer.reward.function"][1])
    path.chmod(0o666)
    assert outcome(capsys, "bench", path, "--explorer.reward.function=math") == ""
    both = write(job, CODE["explorer.reward.functions"][1])
    both.chmod(0o666)
    assert "can write to it" in outcome(capsys, "run", both, '--explorer.reward.functions={ "math" = 1.0 }')


def test_where_modules_are_looked_for_nobody_else_may_add_one(job, capsys):
    path = write(job, CODE["explorer.reward.function"][1])
    job.chmod(0o1777)
    assert "everybody can write to it" in outcome(capsys, "bench", path)


@pytest.mark.parametrize("verb", ["train", "stages"])
def test_the_trainer_runs_no_code_of_a_model_that_such_a_file_allows(job, capsys, verb):
    stages = "[[stages]]\nname = 'one'\n" if verb == "stages" else ""
    path = job / "config.toml"
    path.write_text(
        f'[job]\ndir = "{job}"\n[model]\npath = "model"\ntrust_remote_code = true\n'
        f'[algorithm]\nname = "sft"\n[data]\nsft_path = "x.jsonl"\n{stages}'
    )
    path.chmod(0o664)
    assert trainer([verb, str(path), "--dry-run"]) == 78
    assert "model.trust_remote_code = true runs code" in capsys.readouterr().err
    trainer([verb, str(path), "--dry-run", "--trust-job-file"])
    assert "runs code" not in capsys.readouterr().err
    trainer([verb, str(path), "--dry-run", "--model.trust_remote_code", "false"])
    assert "runs code" not in capsys.readouterr().err


def test_a_dry_run_trusts_what_the_start_would_trust(job, tmp_path, capsys):
    leave_model(job / "model")
    job.chmod(0o777)
    path = tmp_path / "own.toml"
    path.write_text(f'[job]\ndir = "{job}"\n[model]\npath = "{job}/model"\ntrust_remote_code = true\n')
    assert trainer(["train", str(path), "--dry-run"]) == 78
    assert "runs code of the model" in capsys.readouterr().err
    assert trainer(["train", str(path), "--dry-run", "--trust-job-file"]) == 0


def test_code_of_a_model_in_a_job_must_be_this_users(job, tmp_path):
    """As of a stage that starts from the last step of the one before."""
    model = job / "global_step_4/actor/huggingface"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": "own.Config"}}))
    (model / "own.py").write_text("")
    (model / "own.py").chmod(0o644)
    for path in (model, model.parent, model.parent.parent):
        path.chmod(0o755)
    require_own_model(str(model), runs_code=True)
    for weak in (model, model / "own.py"):
        weak.chmod(weak.stat().st_mode | 0o020)
        with pytest.raises(ConfigError, match="can write to it"):
            require_own_model(str(model), runs_code=True)
        require_own_model(str(model), runs_code=False)
        weak.chmod(weak.stat().st_mode & ~0o020)
    (tmp_path / "models").mkdir()
    (tmp_path / "models").chmod(0o777)
    require_own_model(f"{tmp_path}/models", runs_code=True)
    with pytest.raises(ConfigError, match="can write to it"):
        require_own_model(f"{tmp_path}/models", runs_code=True, recorded=True)


def test_the_page_on_security_names_these_keys():
    text = (ROOT / "docs/security.md").read_text()
    assert [key for key in CODE if f"`{key}`" not in text] == []
