"""The command line of the trainer, in this process and as a process."""

import json
import os
import subprocess
import sys
import tomllib
import types

import pytest
from support.job_file import LEAST

pytest.importorskip("pydantic", reason="the trainer needs pydantic")

from support.cli import environment
from support.stand_ins import leave_model

from syncd.errors import StorageError
from syncd.jobfile.model import KEYS
from trainer.cli.main import run, trainer
from trainer.config.job_config import enter_job_dir
from trainer.config.load import load_config
from trainer.launch import rank_env  # noqa: F401 - before `module` puts another package there


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file.toml"
    path.write_text(LEAST)
    leave_model(tmp_path / "model")
    return str(path)


@pytest.fixture
def shell(capsys):
    def shell(*arguments):
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return shell


@pytest.fixture
def module(monkeypatch):
    """Put a module of one function where a verb looks for it, and return the calls that it gets."""

    def put(path, name, answer=None):
        calls = []

        def called(*arguments, **_options):
            calls.append(arguments)
            if isinstance(answer, Exception):
                raise answer
            return answer

        parent = path.rpartition(".")[0]
        if parent not in sys.modules:
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        found = types.ModuleType(path)
        setattr(found, name, called)
        monkeypatch.setitem(sys.modules, path, found)
        return calls

    return put


LIGHT = """
import sys
from trainer.cli.main import run
code = run(sys.argv[2:])
heavy = sorted({name.partition('.')[0] for name in sys.modules} & set(sys.argv[1].split(',')))
print(code, heavy, file=sys.stderr)
"""
HEAVY = "torch,verl,ray,transformers,pyarrow,numpy,safetensors"


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], f"{HEAVY},pydantic,structlog"),
        (["train", "--help"], f"{HEAVY},pydantic,structlog"),
        (["stages", "--help"], f"{HEAVY},pydantic,structlog"),
        (["config", "schema"], HEAVY),
        (["train", "FILE", "--dry-run"], HEAVY),
        (["train", "FILE", "--nope", "1"], HEAVY),
    ],
)
def test_heavy_modules_are_imported_only_when_needed(file, arguments, heavy):
    arguments = [file if part == "FILE" else part for part in arguments]
    command = [sys.executable, "-c", LIGHT, heavy, *arguments]
    ended = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=60, env=environment()
    )
    expected = "78 []" if "--nope" in arguments else "0 []"
    assert ended.stderr.splitlines()[-1] == expected


def test_python_m_trainer_reports_errors_like_the_command(file):
    command = [sys.executable, "-m", "trainer", "train", file, "--sync.interval", "0"]
    ended = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=60, env=environment()
    )
    assert ended.returncode == 78
    assert ended.stderr == (
        "error: sync.interval = 0 is not a whole number at least 1: the command line\nhint: trainer config docs\n"
    )


def test_a_dry_run_prints_the_resolved_file_and_changes_nothing(shell, file, tmp_path):
    code, out, err = shell(
        "train", file, "--dry-run", "--sync.interval", "3", "--algorithm.entropy_coeff", "-1e-3"
    )
    assert code == 0
    table = tomllib.loads(out)
    assert (table["sync"]["interval"], table["algorithm"]["entropy_coeff"]) == (3, -1e-3)
    assert err == f"job directory: {tmp_path}/job\n"
    assert sorted(os.listdir(tmp_path)) == ["file.toml", "model"]


def test_a_dry_run_reports_contradictions(shell, file, tmp_path, module):
    enter_job_dir(load_config(file))
    code, _, err = shell("train", file, "--data.groups=4", "--dry-run")
    assert code == 0
    assert err.splitlines()[1] == f"contradiction: data.groups: 8 in {tmp_path}/job/config.toml, 4 now"
    anew = "--trainer.continue_from_checkpoint=false"
    assert (
        shell("train", file, "--data.groups=4", "--dry-run", anew)[2] == f"job directory: {tmp_path}/job-2\n"
    )


@pytest.mark.parametrize("code", [0, 75, 3])
def test_train_exits_with_the_trainer_s_exit_code(shell, file, module, code):
    calls = module("trainer.launch.train", "train", code)
    assert shell("train", file, "--nproc", "2", "--sync.interval=3")[0] == code
    ((config, nproc),) = calls
    assert (config.sync.interval, nproc) == (3, 2)


def test_train_without_nproc_uses_the_number_of_ranks_of_the_file(shell, file, module):
    calls = module("trainer.launch.train", "train", 0)
    shell("train", file)
    assert calls[0][1] is None


def test_train_refuses_a_file_with_stages_and_hints_at_trainer_stages(shell, file):
    with open(file, "a", encoding="utf-8") as config:
        config.write('[[stages]]\nname = "a"\n')
    code, _, err = shell("train", file)
    assert code == 78
    assert f"hint: trainer stages {file}" in err


@pytest.fixture
def stages(file):
    with open(file, "a", encoding="utf-8") as config:
        config.write('[[stages]]\nname = "a"\n')
    return file


def test_the_stages_command_trains_each_stage(shell, stages, module, tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    calls = module("trainer.launch.train", "train", 75)
    code, _, err = shell("stages", stages, "--nproc", "2")
    assert code == 75
    assert err.startswith("stage a: 1 of 1, from ")
    ((config, nproc),) = calls
    assert (config.job.dir, nproc) == (f"{tmp_path}/job/a", 2)


IN_SLURM = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
RANK_OF_TWO = {
    "srun": {**IN_SLURM, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2",
             "SLURM_STEP_NODELIST": "n0"},
    "torchrun": {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                 "MASTER_ADDR": "n0", "MASTER_PORT": "29500"},
}  # fmt: skip


def test_the_script_of_a_slurm_job_runs_stages(shell, stages, module, monkeypatch):
    for name, value in IN_SLURM.items():
        monkeypatch.setenv(name, value)
    calls = module("trainer.launch.train", "train", 0)
    assert shell("stages", stages)[0] == 0
    assert len(calls) == 1


@pytest.mark.parametrize("launcher", RANK_OF_TWO)
def test_a_rank_of_several_runs_no_stages(shell, stages, monkeypatch, launcher):
    for name, value in RANK_OF_TWO[launcher].items():
        monkeypatch.setenv(name, value)
    code, _, err = shell("stages", stages)
    assert code == 2
    assert "this is rank 0 of 2, and stages are started once" in err
    assert "start it without torchrun and srun" in err


def test_a_dry_run_of_stages_prints_each_configuration(shell, stages, tmp_path):
    code, out, err = shell("stages", stages, "--dry-run")
    assert (code, out.startswith("# stage a\n"), err) == (0, True, f"job directory: {tmp_path}/job/a\n")
    assert not (tmp_path / "job").exists()


def test_a_dry_run_of_stages_shows_a_placeholder_for_a_later_model(shell, stages, tmp_path):
    with open(stages, "a", encoding="utf-8") as config:
        config.write('[[stages]]\nname = "b"\n')
    code, out, err = shell("stages", stages, "--dry-run", "--trainer.continue_from_checkpoint", "false")
    first, second = (tomllib.loads(text) for text in out.split("# stage b\n"))
    assert code == 0
    assert first["model"]["path"] == f"{tmp_path}/model"
    assert second["model"]["path"] == "(the newest full checkpoint of stage a)"
    assert "contradiction" not in err


def test_export_passes_its_arguments_on(shell, module):
    exports = module("trainer.export", "export")
    assert shell("export", "/job", "7", "/out", "--dtype", "float32")[0] == 0
    assert shell("export", "/job", "7", "/out")[0] == 0
    assert exports == [("/job", 7, "/out", "float32"), ("/job", 7, "/out", None)]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (StorageError("full", path="/x", hint="df -h /x"), 74, "error: full: /x\nhint: df -h /x\n"),
        (OSError(28, "No space left on device", "/x"), 74, "error: No space left on device: /x\n"),
        (KeyError("a"), 1, "error: a bug in trainer"),
    ],
)
def test_errors_are_one_line_with_an_exit_code(shell, module, error, code, said):
    module("trainer.export", "export", error)
    ended, out, err = shell("export", "/job", "7", "/out")
    assert (ended, out) == (code, "")
    assert err.startswith(said)
    assert "Traceback" not in err
    assert "Traceback" in shell("--debug", "export", "/job", "7", "/out")[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ["nope"],
        ["train"],
        ["train", "--dry-run"],
        ["train", "--sync.interval", "2"],
        ["export", "j", "-1", "o"],
    ],
)
def test_usage_errors_exit_with_2(shell, arguments):
    assert shell(*arguments)[0] == 2


def test_a_misspelt_command_gets_a_suggestion(shell):
    assert "did you mean 'train'" in shell("tarin")[2]


def test_every_command_has_help(shell):
    for verb in trainer.verbs:
        code, out, _ = shell(verb, "--help")
        assert code == 0
        assert out.startswith("Usage: ")
    assert all(verb in shell("--help")[1] for verb in trainer.verbs)


def test_the_config_command_prints_schema_docs_and_algorithms(shell):
    assert json.loads(shell("config", "schema")[1])["title"] == "JobFile"
    assert shell("config", "docs")[1] == KEYS.documentation(without="explorer")
    out = shell("config", "algorithms")[1].splitlines()
    assert out[0].split() == ["name", "advantage", "loss", "clip", "loss_agg_mode"]
    gspo = next(line for line in out if line.startswith("gspo"))
    assert gspo.split()[:5] == ["gspo", "grpo", "gspo", "0.0003/0.0004", "seq-mean-token-mean"]
    assert "reinforce_plus_plus" in next(line for line in out if line.startswith("ppo"))
