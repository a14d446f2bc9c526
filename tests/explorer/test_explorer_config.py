"""The [explorer] table: what is wrong is said with the nearest key, and the page of all keys is true."""

import json
from pathlib import Path

import pytest

pytest.importorskip("pydantic", reason="explorers need pydantic")

from support.wrong_job_files import LEAST, WRONG

from explorer_hooks.cli.main import explorer
from explorer_hooks.cli.main import run as command
from explorer_hooks.hooks.restarting import RestartingHook
from explorer_hooks.run import extensions
from explorer_hooks.run.load import load_file
from explorer_hooks.run.pacing import (
    Allowance,
    ahead_of,
    decide,
    sync_is_due,
)
from explorer_hooks.run.served import ServerEngine
from syncd.client.sync_policy import SyncStyle
from syncd.errors import ConfigError
from syncd.jobfile.model import KEYS
from trainer.config.load import load_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def write(tmp_path):
    def one(text=LEAST):
        path = tmp_path / "job.toml"
        path.write_text(text)
        return str(path)

    return one


def test_paths_are_relative_to_the_file_and_other_keys_have_defaults(write, tmp_path):
    file = load_file(write())
    assert file.job.dir == str(tmp_path / "jobs" / "first")
    assert file.explorer.tasks == str(tmp_path / "tasks.jsonl")
    assert file.explorer_groups == file.data.groups == 8
    assert file.algorithm.temperature == 1.0


def test_sources_that_are_no_files_stay_as_they_are_and_sets_are_read_beside_the_file(write, tmp_path):
    for source in ("reasoning_gym:gcd", "datasets:some/sums"):
        (section,) = load_file(write(), ["--explorer.tasks", source]).explorer.training_sets
        assert (section.source, section.prompt_key) == (source, "prompt")
    (section,) = load_file(write(LEAST + "prompt_key = 'question'")).explorer.training_sets
    assert (section.source, section.prompt_key) == (str(tmp_path / "tasks.jsonl"), "question")
    tables = "[[explorer.task_sets]]\nsource = 'a.jsonl'\n[[explorer.task_sets]]\nsource = 'b.jsonl'\n"
    file = load_file(write(LEAST.replace('tasks = "tasks.jsonl"', "") + tables))
    assert ([one.source for one in file.explorer.training_sets], file.directory) == (
        ["a.jsonl", "b.jsonl"],
        str(tmp_path),
    )


def test_a_held_out_set_is_measured_and_not_taken(write):
    pytest.importorskip("explorer_hooks.parts.evaluation.tables")
    held_out = (
        "[[explorer.task_sets]]\nname = 'h'\nsource = 'a.jsonl'\nsplit = 'test'\nheld_out = true\nlimit = 7\n"
    )
    file = load_file(write(LEAST + held_out + "[explorer.evaluation]\ntasks = 'set:h'\nlimit = 5"))
    assert [one.shown_name for one in file.explorer.training_sets] == ["tasks"]
    found = file.explorer.held_out_set(file.explorer.evaluation.tasks, 5)
    assert (found.source, found.split, found.limit, file.explorer.held_out_set("set:h", 0).limit) == (
        "a.jsonl",
        "test",
        5,
        7,
    )
    with pytest.raises(ConfigError, match="no held-out set of tasks is called hh") as caught:
        file.explorer.held_out_set("set:hh", 0)
    assert caught.value.hint == "did you mean h?"


def test_the_command_line_overrides_the_file(write, tmp_path):
    pytest.importorskip("explorer_hooks.parts.evaluation.tables")
    more = [
        "--explorer.engine.kind=vllm",
        "--explorer.engine.address",
        "http://h:1",
        "--explorer.groups",
        "3",
    ]
    file = load_file(write(), [*more, "--explorer.evaluation.tasks=t.jsonl", "--explorer.name", "7"])
    assert (file.explorer.engine.kind, file.explorer_groups, file.explorer.name) == ("vllm", 3, "7")
    assert file.explorer.evaluation.tasks.endswith("/t.jsonl")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("taks = 'x'", ["unknown key explorer.taks", "did you mean explorer.tasks?"]),
        (
            "[explorer.engine]\nadress = 'x'",
            ["unknown key explorer.engine.adress", "explorer.engine.address"],
        ),
        ("[explorer.sampling]\nmax_token = 3", ["did you mean explorer.sampling.max_tokens?"]),
        ("[sync]\nintervall = 3", ["unknown key sync.intervall", "sync.interval"]),
        (
            "[explorer.sampling]\nmax_tokens = '3'",
            ['explorer.sampling.max_tokens = "3" is not a whole number'],
        ),
        ("[explorer.engine]\nkind = 'tgi'", ["one of transformers, vllm, sglang"]),
        ("[explorer.engine]\nkind = 'vllm'", ["needs explorer.engine.address"]),
        (
            "[explorer.engine]\ncommand = 'serve {model}'",
            ["a command starts a server, and kind is transformers"],
        ),
        (
            "[explorer.engine]\nkind = 'vllm'\naddress = 'http://127.0.0.1:1'\nreload = 'restart'\ncommand = 'serve'",
            ["needs a command with {model}", "needs explorer.engine.model"],
        ),
        (
            "[explorer.engine]\nkind = 'vllm'\naddress = 'http://127.0.0.1:1'\nreload = 'restart'\ncommand = \"'\"",
            ["explorer.engine.command is no command"],
        ),
        (
            "[explorer.engine]\nkind = 'vllm'\ncommand = 'serve {model}'",
            [
                "the server needs a command with {port}",
                'command = "env VLLM_SERVER_DEV_MODE=1 vllm serve {model} --host {host} --port {port}"',
            ],
        ),
        (
            "[explorer.engine]\nkind = 'sglang'\ncommand = 'serve {port}'",
            [
                "needs a command with {model}",
                'command = "python -m sglang.launch_server --model-path {model}',
            ],
        ),
        ("[explorer.engine]\naddress = 'http://h:1'", ['has no effect with kind = "transformers"']),
        ("[explorer.reward]\nfunction = 'maths'", ["neither auto, exact_match, math,", "did you mean math?"]),
        (
            "[explorer.reward]\nfunction = 'math'\nfunctions = { math = 1 }",
            ["[explorer.reward] has one function and several"],
        ),
        ("[explorer.reward]\nfunctions = { maths = 1 }", ['"maths" is neither', "did you mean math?"]),
        ("name = '../e0'", ["is not a name for files"]),
        (
            "[[explorer.task_sets]]\nsource = 'a.jsonl'",
            ["explorer.tasks names one set of tasks, and [[explorer.task_sets]] others"],
        ),
        (
            "[[explorer.task_sets]]\nsource = 'a.jsonl'\nheld_out = true\nweight = 2",
            ['the held-out set of tasks "a" is not measured', "has a weight, and is never taken"],
        ),
        (
            "[[explorer.task_sets]]\nsorce = 'a'\n[[explorer.task_sets]]\nsource = 'b'\nweight = 'x'",
            [
                "unknown key explorer.task_sets.0.sorce",
                "did you mean explorer.task_sets.source?",
                "explorer.task_sets.source is missing",
                'explorer.task_sets.weight = "x" is not a number above 0',
            ],
        ),
        ("[algorithm]\ntemperature = 0.0", ["algorithm.temperature = 0.0 is not a number above 0"]),
        (
            "[explorer.engine]\nkind='vllm'\naddress='http://h:1'\n[algorithm]\ntemperature = 0.7",
            ["gives log-probs at temperature 1", "processed_logprobs"],
        ),
        ("[data]\ngroups = 5000", ["4096"]),
        (
            "[explorer.engine]\nkind = 'own'",
            ['explorer.engine.kind = "own" is not one of transformers, vllm'],
        ),
        (
            "[explorer.nobody]\ndepth = 1",
            ["explorer.nobody, a table that nothing installed reads", "leave the"],
        ),
        (
            "[explorer.rewards]\ntimeout = 1",
            ["explorer.rewards, a table that", "did you mean explorer.reward?"],
        ),
    ],
)
def test_a_wrong_key_or_value_is_reported_with_a_suggestion(write, more, said):
    with pytest.raises(ConfigError) as caught:
        load_file(write(LEAST + more))
    whole = f"{caught.value} {caught.value.hint}"
    assert all(part in whole for part in said), whole
    assert caught.value.exit_code == 78


def test_all_problems_are_reported_at_once(write):
    with pytest.raises(ConfigError, match="2 problems") as caught:
        load_file(write(LEAST + "epoch = 3\n[explorer.engine]\nrows = 0"))
    assert "explorer.epochs" in str(caught.value)


def test_an_explorer_that_owns_its_server_starts_it_on_the_job_files_model(write, tmp_path):
    file = load_file(
        write(
            LEAST + "[explorer.engine]\nkind = 'vllm'\naddress = 'http://127.0.0.1:1'\nreload = 'restart'\n"
            "model = 'policy'\ncommand = \"env A='b c' serve {model} {port}\"\noptions = { stop_timeout = '3' }"
        )
    )
    hook = ServerEngine(file).hook
    assert isinstance(hook, RestartingHook)
    assert hook.options.command(hook.options.start_model, "127.0.0.1", 1) == [
        *("env", "A=b c", "serve", file.model.path, "1")
    ]
    assert hook.options.stop_timeout == 3.0


def test_a_file_without_the_explorer_table_is_refused(write):
    with pytest.raises(ConfigError, match=r"explorer\.tasks is missing"):
        load_file(write(LEAST.partition("[explorer]")[0]))


@pytest.mark.parametrize("load", [load_file, load_config])
@pytest.mark.parametrize("wrong", WRONG)
def test_each_reader_finds_what_is_wrong_in_any_table(write, wrong, load):
    more, said = WRONG[wrong]
    path = write(LEAST + more)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert said in str(caught.value)
    assert path in str(caught.value)
    assert caught.value.exit_code == 78


def test_trainer_and_explorer_read_the_same_file(write):
    pytest.importorskip("explorer_hooks.parts.evaluation.tables")
    example = str(ROOT / "examples" / "configs" / "grpo.toml")
    assert load_file(example).job.dir == load_config(example).job.dir
    assert load_file(example).explorer.reward.function == "math"


def test_every_key_and_table_has_a_description():
    assert [key.name for key in KEYS.all.values() if not key.about] == []
    assert [name for name, about in KEYS.tables.items() if not about] == []


def test_a_wrong_or_missing_file_exits_with_78(write, capsys):
    assert command(["run", write(LEAST + "taks = 1")]) == 78
    assert "did you mean explorer.tasks?" in capsys.readouterr().err
    assert command(["run", "/missing.toml"]) == 78
    assert command(["run", "--name", "e0"]) == 2


def test_a_dry_run_prints_the_resolved_configuration(write, capsys):
    assert command(["run", write(), "--name", "e7", "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out)["explorer"]["name"] == "e7"


def test_every_command_exists(capsys):
    for verb in explorer.verbs:
        assert explorer.get_command(None, verb) is not None
    assert command(["config", "schema"]) == 0
    assert "ExplorerSection" in capsys.readouterr().out


# --- what comes next ----------------------------------------------------------------------------------------------


def test_the_next_action_follows_from_the_pacing_facts():
    def now(**more):
        return decide(**{"is_over": False, "is_ready": True, "is_due": False, "has_room": True, **more})

    assert now() == "work"
    assert now(has_room=False) == "wait"
    assert now(is_due=True) == "sync"
    assert now(is_due=True, is_ready=False) == "engine"
    assert now(is_over=True, is_ready=False) == "end"


@pytest.mark.parametrize(
    ("interval", "offset", "due"),
    [(1, 0, [1, 2, 3, 4, 5, 6]), (2, 0, [2, 4, 6]), (2, 1, [3, 5]), (3, 2, [5])],
)
def test_a_sync_is_due_by_interval_and_offset(interval, offset, due):
    synced, found = 0, []
    for batches in range(7):
        if sync_is_due(SyncStyle.FIXED, batches, synced, interval, offset):
            found.append(batches)
            synced = batches
    assert found == due
    assert not any(sync_is_due(SyncStyle.FULLY_ASYNC, number, 0, interval, offset) for number in range(7))


def test_an_early_sync_counts_as_the_next_due_one():
    assert not sync_is_due(SyncStyle.FIXED, 4, 3, 2, 0)
    assert sync_is_due(SyncStyle.FIXED, 6, 3, 2, 0)


def test_the_allowed_lead_follows_interval_offset_and_style(write):
    def ahead(*more):
        return ahead_of(load_file(write(), more))

    assert ahead() == 0
    assert ahead("--sync.interval", "4") == 3
    assert ahead("--sync.interval", "4", "--sync.offset", "2") == 5
    assert ahead("--sync.interval", "4", "--sync.style", "fully_async") == 7
    assert ahead("--sync.interval", "4", "--explorer.ahead", "1") == 1


def test_the_allowance_is_shared_between_explorers():
    start = Allowance(step=4, written=10, batches=2, ahead=1)
    assert (start.room(4, 13), start.room(4, 14), start.room(5, 15)) == (1, 0, 1)


def test_explorers_accept_every_table_of_the_trainer(write):
    """One file is for both: a table that only the trainer reads must not stop an explorer."""
    file = load_file(write(LEAST + '[algorithm]\nname = "ppo"\n[critic]\nenabled = true\n'))
    assert file.critic.enabled


def test_each_program_needs_only_the_variables_of_its_own_paths(write, monkeypatch):
    """A stage of one host may be named by a variable that other hosts have not."""
    monkeypatch.delenv("NOT_SET", raising=False)
    explorers = write(LEAST + "[explorer.follow]\nstage = '$NOT_SET/stage'\n")
    assert load_config(explorers).explorer.follow.stage == "$NOT_SET/stage"
    with pytest.raises(ConfigError, match="names \\$NOT_SET, which is not set"):
        load_file(explorers)
    trainers = write(LEAST + "[data]\nvalidation_path = '$NOT_SET/held-out.jsonl'\n")
    assert load_file(trainers).data.validation_path == "$NOT_SET/held-out.jsonl"
    with pytest.raises(ConfigError, match="names \\$NOT_SET, which is not set"):
        load_config(trainers)


def test_evaluation_sets_that_nothing_installed_measures_are_refused(write, monkeypatch):
    path = write(f'{LEAST}[explorer.evaluation]\ntasks = "held.jsonl"\n')
    monkeypatch.setattr(extensions, "registered", lambda _: {})
    with pytest.raises(ConfigError, match=r"nothing that reads \[explorer.evaluation\] is installed"):
        load_file(path)
