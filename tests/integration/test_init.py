"""`syncd init`: what it writes is read by the real loaders, trains, is in the wheel, and never replaces a file."""

import configparser
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support import matrices
from support.cli import environment
from support.paths import ROOT
from support.readme import line_of, typed

from syncd.cli.init import ENGINES, RECIPES
from syncd.cli.main import run

COMBINATIONS = [
    (recipe, engine) for recipe in RECIPES for engine in (ENGINES if recipe != "sft" else (None,))
]
DEFINITION = ROOT / "syncd" / "recipes" / "syncd.def"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the directory of a model that can be trained; its name has what TOML and shells must quote."""
    pytest.importorskip("transformers", reason="the model is made by transformers")
    sys.path.insert(0, str(ROOT / "examples" / "arithmetic"))
    from tiny_model import make_model

    directory = tmp_path_factory.mktemp("models") / 'a "tiny" \\ model'
    make_model(directory, 1)
    return directory


def init(directory, model, recipe, engine=None):
    """Run the verb and return its exit code."""
    more = ["--engine", engine] if engine else []
    return run(["init", str(directory), "--model", str(model), "--recipe", recipe, *more])


@pytest.mark.parametrize(("recipe", "engine"), COMBINATIONS)
def test_the_loaders_read_what_is_written(tmp_path, model, recipe, engine):
    from explorer_hooks.run.load import load_file
    from explorer_hooks.run.served import ServerEngine
    from explorer_hooks.tasks.sources import open_tasks
    from trainer.config.load import load_config
    from trainer.config.model_files import check_model

    place = tmp_path / "new" / "job"
    assert init(place, model, recipe, engine) == 0
    job = load_config(str(place / "job.toml"))
    check_model(job)
    assert (job.model.path, job.job.dir) == (str(model), f"{place}/job")
    assert (job.model.lora is not None and job.model.publishes_adapters) == (recipe == "lora")
    assert (job.data.groups * job.data.group_size) % job.algorithm.mini_batches == 0
    assert "@" not in (place / "job.toml").read_text()
    if engine is None:
        rows = [json.loads(line) for line in Path(job.data.sft_path).read_text().splitlines()]
        assert len(rows) >= job.data.groups * job.data.group_size
        assert all(set(row) == {"prompt", "response"} for row in rows)
        return
    file = load_file(str(place / "job.toml"))
    assert file.explorer.engine.kind == engine
    assert len(open_tasks(file.explorer.training_sets)) >= job.data.groups
    if engine != "transformers":
        assert not file.explorer.engine.address
        assert ("--enable-lora" in file.explorer.engine.command) == (recipe == "lora")
        address = ["--explorer.engine.address=http://127.0.0.1:1", "--explorer.engine.command="]
        hook = ServerEngine(load_file(str(place / "job.toml"), address)).hook
        assert hook.kinds == frozenset({"lora" if recipe == "lora" else "weights"})


@pytest.mark.parametrize(("recipe", "engine"), COMBINATIONS)
def test_the_batch_files_are_valid_and_the_reward_scores_its_tasks(tmp_path, model, recipe, engine):
    from explorer_hooks.run.rewards import plain_task
    from explorer_hooks.run.scoring import ScoredGroup, ScoredText, open_scorer
    from explorer_hooks.tasks.sources import open_tasks
    from syncd.jobfile.explorer_sections import RewardSection
    from syncd.jobfile.task_sets import TaskSetSection

    assert init(tmp_path, model, recipe, engine) == 0
    written = sorted(path.name for path in tmp_path.glob("*.sbatch"))
    array = {
        "transformers": "explorers.sbatch",
        "vllm": "explorers-vllm.sbatch",
        "sglang": "explorers-sglang.sbatch",
    }
    expected = ["trainer.sbatch"] if engine is None else [array[engine], "together.sbatch", "trainer.sbatch"]
    assert written == expected
    assert (tmp_path / "syncd.def").read_text() == DEFINITION.read_text()
    for name in written:
        done = subprocess.run(["bash", "-n", tmp_path / name], check=False, capture_output=True)
        assert (done.returncode, done.stderr) == (0, b"")
    if engine is None:
        return
    tasks = open_tasks([TaskSetSection(source=str(tmp_path / "tasks.jsonl"))])
    scorer = open_scorer(RewardSection(function="reward:score", timeout=60.0), [str(tmp_path)])
    try:
        texts = (ScoredText(tasks[0].answer), ScoredText("no"))
        ((right, wrong),) = scorer.score([ScoredGroup("p", plain_task(tasks[0]), texts)])
    finally:
        scorer.close()
    assert (right.reward, wrong.reward) == (1.0, 0.0)


def test_nothing_is_replaced_and_nothing_else_is_written(tmp_path, model, capsys):
    (tmp_path / "reward.py").write_text("mine")
    assert init(tmp_path, model, "grpo", "vllm") == 2
    assert "nothing was written, because these files exist: reward.py" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["reward.py"]
    assert (tmp_path / "reward.py").read_text() == "mine"


def test_what_cannot_be_meant_is_refused(tmp_path, model, capsys):
    assert init(tmp_path / "a", model, "sft", "vllm") == 2
    assert "sft has no explorers" in capsys.readouterr().err
    assert init(tmp_path / "a", tmp_path, "grpo") == 2
    assert f"hint: hf download ORG/MODEL --local-dir {tmp_path}" in capsys.readouterr().err
    assert init(tmp_path / "a", f"{model}/$HOME", "grpo") == 2
    assert "a job's file cannot name this path" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "tied", [{"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}]
)
def test_a_tied_head_that_vllm_would_reload_is_pointed_out(tmp_path, capsys, tied):
    models = {"tied": tied, "untied": {"tie_word_embeddings": False}, "odd": ["no table"]}
    for name, config in models.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    cases = [("tied", "grpo", None), ("untied", "grpo", None), ("odd", "grpo", None)]
    cases += [("tied", "grpo", "sglang"), ("tied", "lora", "vllm"), ("tied", "sft", None)]
    warned = []
    for number, (name, recipe, engine) in enumerate(cases):
        assert init(tmp_path / str(number), tmp_path / name, recipe, engine) == 0
        warned.append('reload = "restart"' in capsys.readouterr().err)
    assert warned == [True, False, False, False, False, False]


def test_it_needs_no_package_of_an_extra(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    bare = [sys.executable, str(ROOT / "tests/programs/bare.py"), "syncd", "init", str(tmp_path / "job")]
    done = subprocess.run(
        [*bare, "--model", str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "sbatch together.sbatch job.toml job" in done.stdout


def test_the_image_installs_extras_that_exist_with_and_without_a_checkout():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    installs = re.findall(r"(?m)^ +(# )?pip install (.*)$", DEFINITION.read_text())
    assert [("-c /src/constraints.txt" in line, "syncd-*.whl" in line) for _, line in installs] == [
        (True, False),
        (False, True),
        (True, False),
    ]
    extras = [re.search(r"\[([a-z,]+)\]", line)[1].split(",") for _, line in installs]
    assert extras[0] == extras[1]
    assert {name for names in extras for name in names} <= set(settings.options("options.extras_require"))
    assert [bool(comment) for comment, _ in installs] == [False, True, True]


def test_one_node_is_enough_for_each_batch_file(tmp_path, model):
    for recipe, engine in COMBINATIONS:
        assert init(tmp_path / f"{recipe}-{engine}", model, recipe, engine) == 0
    for path in tmp_path.glob("*/*.sbatch"):
        assert set(re.findall(r"(?m)^#SBATCH .*--nodes=(\d+)", path.read_text())) == {"1"}, path


@pytest.mark.slow
def test_the_wheel_of_what_the_image_copies_has_the_recipes(tmp_path):
    """The image takes no .git, no environment and no output of the checkout."""
    section = DEFINITION.read_text().partition("%files\n")[2].partition("\n\n")[0]
    for source, target in (line.split() for line in section.splitlines()):
        assert target == f"/src/{source}"
        copied, into = ROOT / source, tmp_path / source
        into.parent.mkdir(parents=True, exist_ok=True)
        if copied.is_dir():
            shutil.copytree(copied, into, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(copied, into)
    build = "import setuptools.build_meta as build; print(build.build_wheel('.'))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", build],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with zipfile.ZipFile(tmp_path / done.stdout.splitlines()[-1]) as wheel:
        names = set(wheel.namelist())
    assert {
        f"syncd/recipes/{path.name}" for path in (ROOT / "syncd" / "recipes").iterdir() if path.is_file()
    } <= names
    assert any(name.endswith("share/syncd/monitoring/syncd.rules.yml") for name in names)


SMALL = {"total_steps": 2, "warmup_steps": 0, "groups": 4, "group_size": 2, "max_tokens": 4}
"""What makes a job short; the commands are typed as they are."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("recipe", "weights"),
    matrices.rows(
        [("grpo", "model.safetensors.index.json"), ("lora", "adapter_model.safetensors")],
        ("grpo", "model.safetensors.index.json"),
    ),
)
def test_the_command_for_one_machine_trains(tmp_path, model, recipe, weights):
    pytest.importorskip("verl", reason="the trainer needs verl")
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    assert init(tmp_path, model, recipe, "transformers") == 0
    text = (tmp_path / "job.toml").read_text()
    for key, value in SMALL.items():
        text = re.sub(rf"(?m)^{key} = \d+", f"{key} = {value}", text)
    (tmp_path / "job.toml").write_text(text)
    both = line_of("trainer train job.toml --trainer.total_steps 5").replace("total_steps 5", "total_steps 2")
    line = f"{both}; code=$?; wait $! && (exit $code) && trainer plot job && trainer export job 2 out"
    typed(line, tmp_path, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    metrics = [json.loads(line) for line in (tmp_path / "job" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2]
    assert (tmp_path / "job" / "global_step_2" / "actor" / weights).is_file()
    assert list((tmp_path / "job").glob("*.png"))
    assert (tmp_path / "out").is_dir()
