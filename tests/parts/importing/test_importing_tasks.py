"""`trainer import`: tasks, agents, filters and evaluations, which explorers read."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from explorer_hooks.run.load import load_file
from syncd.jobfile.model import JobFile
from trainer.cli.main import run
from trainer.parts.importing.run import flat

VERL = {
    "actor_rollout_ref.model.path": "/models/base", "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.n": 8, "algorithm.adv_estimator": "grpo", "trainer.default_local_dir": "/runs/x",
}  # fmt: skip
TRINITY = """
project: p
name: n
algorithm: {algorithm_type: grpo, repeat_times: 4}
model: {model_path: /models/base, max_model_len: 2000}
buffer:
  batch_size: 8
  total_steps: 4
  explorer_input:
    default_workflow_type: WORKFLOW
    taskset: TASKSET
"""
PRIME = """
[model]
name = "/models/base"
[orchestrator]
batch_size = 32
group_size = 4
"""
CHOSEN = ("--algorithm.name", "grpo")
TRL = {
    "model_name_or_path": "/models/base", "output_dir": "/runs/x", "num_processes": 1, "num_generations": 4,
    "per_device_train_batch_size": 8, "lr_scheduler_type": "constant", "max_steps": 8, "save_strategy": "'no'",
    "use_vllm": True,
}  # fmt: skip


class Importer:
    """Imports text, and reads what was written as explorers do."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.directory, self.capsys, self.job = directory, capsys, directory / "job.toml"

    def run(self, name: str, text: str, *arguments: str) -> int:
        """Return the exit code; the job's file is removed before."""
        (self.directory / name).write_text(text)
        self.job.unlink(missing_ok=True)
        return run(["import", str(self.directory / name), "--to", str(self.job), *arguments])

    def refusal(self, name: str, text: str, *arguments: str) -> str:
        """Return what is said of a file that cannot be imported."""
        assert self.run(name, text, *arguments) == 78
        assert not self.job.exists()
        return self.capsys.readouterr().err

    def explorer(self, name: str, text: str, *arguments: str) -> JobFile:
        """Return what explorers read."""
        assert self.run(name, text, *arguments) == 0, self.capsys.readouterr().err
        server = ("--explorer.engine.address", "http://x:1", "--explorer.engine.processed_logprobs", "true")
        return load_file(str(self.job), server)

    @property
    def said(self) -> str:
        """Return what was said since the last time."""
        return self.capsys.readouterr().err


@pytest.fixture
def importer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Importer:
    return Importer(tmp_path, capsys)


def _verl(**more: Any) -> str:
    given = VERL | {key.replace("__", "."): value for key, value in more.items()}
    return " ".join(f"{key}='{value}'" for key, value in given.items())


def _trl(**more: Any) -> str:
    return "\n".join(f"{key}: {value}" for key, value in (TRL | more).items())


def test_verls_files_are_tasks_and_held_out_tasks(importer: Importer) -> None:
    text = _verl(data__train_files="/d/train.parquet", data__val_files="['/d/test.parquet']",
                 data__prompt_key="question")  # fmt: skip
    file = importer.explorer("run.sh", text)
    assert (file.explorer.tasks, file.explorer.prompt_key) == ("/d/train.parquet", "question")
    assert file.explorer.evaluation.tasks == "/d/test.parquet"
    assert "migrate.md#rewards" in importer.said


def test_several_of_verls_files_are_sets_with_names_of_their_own(importer: Importer) -> None:
    files = ["/d/gsm8k/train.parquet", "/d/math/train.parquet"]
    file = importer.explorer(
        "run.sh", _verl(data__train_files=str(files).replace("'", '"'), data__prompt_key="q")
    )
    assert [
        (one.source, one.shown_name, one.prompt_key, one.weight) for one in file.explorer.training_sets
    ] == [
        (files[0], "gsm8k-train", "q", None),
        (files[1], "math-train", "q", None),
    ]


@pytest.mark.parametrize("files", ["hdfs://d/train.parquet", "/d/train", "$UNSET/train.parquet"])
def test_what_is_no_file_of_tasks_is_left_to_the_user(files: str, importer: Importer) -> None:
    assert importer.run("run.sh", f"{_verl()} data.train_files={files}") == 0
    assert "the tasks: --explorer.tasks FILE" in importer.said
    assert "tasks" not in tomllib.loads(importer.job.read_text())["explorer"]


def test_the_users_own_tasks_win(importer: Importer) -> None:
    text = _verl(data__train_files='["/d/a.parquet", "/d/b.parquet"]')
    file = importer.explorer("run.sh", text, "--explorer.tasks", "/mine.jsonl")
    assert (file.explorer.tasks, file.explorer.task_sets) == ("/mine.jsonl", ())


def test_verls_validation_is_measured_as_often_and_as_warm(importer: Importer) -> None:
    values = {f"actor_rollout_ref.rollout.val_kwargs.{name}": value for name, value in
              (("n", 4), ("temperature", 0.6), ("do_sample", True), ("top_p", 0.7))}  # fmt: skip
    set_ = importer.explorer("run.sh", _verl(**values, data__train_files="/d/a.jsonl")).explorer.evaluation
    assert (set_.samples, set_.temperature) == (4, 0.6)
    assert "val_kwargs.top_p: evaluations draw from the whole distribution" in importer.said


@pytest.mark.parametrize("metric", ["reward", "seq_reward", "seq_final_reward"])
def test_dynamic_sampling_by_rewards_is_equal_groups(metric: str, importer: Importer) -> None:
    values = {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": metric}
    file = importer.explorer("run.sh", _verl(**values, data__train_files="/d/a.jsonl"))
    assert file.explorer.reward.equal_groups == "drop"
    off = importer.explorer("run.sh", _verl(**values | {"algorithm.filter_groups.enable": False},
                                            data__train_files="/d/a.jsonl"))  # fmt: skip
    assert off.explorer.reward.equal_groups == "keep"


def test_dynamic_sampling_by_something_else_is_the_users_choice(importer: Importer) -> None:
    values = {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "acc"}
    assert "compares acc" in importer.refusal("run.sh", _verl(**values))
    chosen = ("--explorer.reward.equal_groups", "drop")
    file = importer.explorer("run.sh", _verl(**values, data__train_files="/d/a.jsonl"), *chosen)
    assert file.explorer.reward.equal_groups == "drop"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("actor_rollout_ref.rollout.multi_turn.enable", "True"),
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path", "tools.yaml"),
        ("actor_rollout_ref.rollout.multi_turn.interaction_config_path", "talk.yaml"),
        ("actor_rollout_ref.rollout.agent.default_agent_loop", "tool_agent"),
        ("data.tool_config_path", "tools.yaml"),
    ],
)
def test_tools_and_turns_need_an_agent_and_take_one(key: str, value: str, importer: Importer) -> None:
    refusal = importer.refusal("run.sh", _verl(**{key: value}))
    assert f"  {key}: " in refusal
    assert "docs/agents.md" in refusal
    assert "-> --explorer.agent.function package.module:function" in refusal
    agent = ("--explorer.agent.command", "python agent.py")
    file = importer.explorer("run.sh", _verl(**{key: value}, data__train_files="/d/a.jsonl"), *agent)
    assert file.explorer.agent.command == "python agent.py"


def _trinity(taskset: str, workflow: str) -> str:
    return TRINITY.replace("TASKSET", taskset).replace("WORKFLOW", workflow)


@pytest.mark.parametrize(
    ("workflow", "system", "expected"),
    [
        ("simple_workflow", None, ("", True)),
        ("simple_workflow", "Be short.", ("Be short.", False)),
        ("async_math_workflow", "Be short.", ("Be short.", False)),
        ("math_workflow", None, ("", False)),
        ("math_boxed_workflow", "Be short.", ("", False)),
    ],
)
def test_a_task_set_of_trinity_is_a_data_set(
    workflow: str, system: str | None, expected: tuple[str, bool], importer: Importer
) -> None:
    prompt = f", system_prompt: {system}" if system else ""
    text = _trinity("{path: openai/gsm8k, subset_name: main, split: train,"
                    f" format: {{prompt_key: question, response_key: answer{prompt}}}}}", workflow)  # fmt: skip
    (one,) = importer.explorer("rft.yaml", text).explorer.training_sets
    assert (one.source, one.subset, one.split) == ("datasets:openai/gsm8k", "main", "train")
    assert (one.prompt_key, one.answer_key) == ("question", "answer")
    assert (one.system, one.chat) == expected
    assert "[explorer.agent]" in importer.said


@pytest.mark.parametrize(
    "taskset", ["{path: '${oc.env:NO_SUCH_NAME}'}", "{path: x, storage_type: sql}", "{}"]
)
def test_a_task_set_that_is_no_data_set_is_left_to_the_user(taskset: str, importer: Importer) -> None:
    assert importer.run("rft.yaml", _trinity(taskset, "simple_workflow")) == 0
    assert "the tasks: --explorer.tasks FILE" in importer.said


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("buffer.explorer_input.default_workflow_type=[math_workflow]", "is not text"),
        ("monitor.monitor_type=[null]", "monitor.monitor_type: has null among its values"),
    ],
)
def test_a_value_that_has_no_counterpart_in_toml_or_among_workflows_is_refused(
    setting: str, words: str, importer: Importer
) -> None:
    text = _trinity("{path: openai/gsm8k}", "simple_workflow")
    assert words in importer.refusal("rft.yaml", text, "--set", setting)


def test_orders_of_trinity_are_ours_or_the_users_choice(importer: Importer) -> None:
    for kind, expected in (("sequential", False), ("shuffle", True)):
        taskset = f"{{path: x/y, task_selector: {{selector_type: {kind}, seed: 5}}}}"
        assert importer.explorer("rft.yaml", _trinity(taskset, "w")).explorer.shuffle is expected
    text = _trinity("{path: x/y, task_selector: {selector_type: difficulty_based, m: 16}}", "w")
    assert "--explorer.curriculum.enabled true" in importer.refusal("rft.yaml", text)
    file = importer.explorer(
        "rft.yaml", text, "--explorer.curriculum.enabled", "true", "--explorer.shuffle", "true"
    )
    assert file.explorer.curriculum.enabled


SOURCE = """
[[orchestrator.train.source]]
name = "sums"
[orchestrator.train.source.env]
KIND
[orchestrator.train.source.env.taskset]
id = "sums"
max_turns = 5
[orchestrator.train.source.env.taskset.task]
strict = false
[orchestrator.train.source.env.agent.harness]
id = "null"
[orchestrator.train.source.env.agent.runtime]
type = "subprocess"
"""


def test_an_environment_of_prime_rl_is_the_agent(importer: Importer) -> None:
    agent = importer.explorer("rl.toml", PRIME + SOURCE.replace("KIND", ""), *CHOSEN).explorer.agent
    assert agent.environment == "verifiers:sums"
    assert agent.options == {
        "taskset": {"max_turns": 5, "task": {"strict": False}},
        "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
    }
    text = PRIME + SOURCE.replace("KIND", 'id = "best-of-n"\nn = 4')
    agent = importer.explorer("rl.toml", text, *CHOSEN).explorer.agent
    assert (agent.environment, agent.options["n"]) == ("verifiers:best-of-n+sums", 4)


def test_an_environment_elsewhere_is_refused_and_several_are_left_to_the_user(importer: Importer) -> None:
    one = SOURCE.replace("KIND", "")
    text = PRIME + one.replace('"subprocess"', '"docker"')
    assert "environments run on the explorer's host" in importer.refusal("rl.toml", text, *CHOSEN)
    assert importer.run("rl.toml", PRIME + one + one.replace("sums", "words"), *CHOSEN) == 0
    assert "several have an explorer with a file each" in importer.said
    assert "agent" not in tomllib.loads(importer.job.read_text())["explorer"]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ('[[orchestrator.pre_batch_filters]]\ntype = "zero_advantage"\nenforce = true', "drop"),
        ('[[orchestrator.pre_batch_filters]]\ntype = "zero_advantage"', "drop"),
        ('[[orchestrator.pre_batch_filters]]\ntype = "zero_advantage"\nenforce = false', "keep"),
        ('[[orchestrator.pre_batch_filters]]\ntype = "gibberish"', "keep"),
        ('[[orchestrator.post_batch_filters]]\ntype = "zero_advantage"', "keep"),
    ],
)
def test_a_filter_of_groups_before_a_batch_is_equal_groups(
    filters: str, expected: str, importer: Importer
) -> None:
    file = importer.explorer("rl.toml", PRIME + SOURCE.replace("KIND", "") + filters, *CHOSEN)
    assert file.explorer.reward.equal_groups == expected


def test_other_filters_and_algorithms_of_prime_rl_are_refused(importer: Importer) -> None:
    filters = '[[orchestrator.post_batch_filters]]\ntype = "repetition"\nenforce = true\n'
    text = PRIME + filters + '[orchestrator.algo]\ntype = "max_rl"\n'
    refusal = importer.refusal("rl.toml", text, *CHOSEN)
    assert "--set orchestrator.post_batch_filters.0.enforce=false" in refusal
    assert "orchestrator.algo.type" in refusal


def test_a_data_set_of_trl_is_tasks_and_held_out_tasks(importer: Importer) -> None:
    text = _trl(dataset_name="org/sums", dataset_config="easy", eval_strategy="steps", eval_steps=4,
                num_generations_eval=2, temperature=0.8)  # fmt: skip
    file = importer.explorer("grpo.yaml", text)
    (one,) = file.explorer.training_sets
    assert (one.source, one.subset, one.split) == ("datasets:org/sums", "easy", "train")
    evaluation = file.explorer.evaluation
    assert (evaluation.tasks, evaluation.every) == ("set:sums-test", 4)
    assert (evaluation.samples, evaluation.temperature) == (2, 0.8)
    held_out = file.explorer.held_out_set(evaluation.tasks, 0)
    assert (held_out.source, held_out.subset, held_out.split) == ("datasets:org/sums", "easy", "test")


def test_without_evaluations_trl_has_no_held_out_tasks(importer: Importer) -> None:
    text = _trl(dataset_name="org/sums", dataset_prompt_column="problem", system_prompt="Think.")
    file = importer.explorer("grpo.yaml", text)
    assert (file.explorer.evaluation.tasks, len(file.explorer.task_sets)) == ("", 1)
    (one,) = file.explorer.training_sets
    assert (one.prompt_key, one.chat, one.system) == ("problem", True, "Think.")


def test_weights_of_trls_rewards_are_those_of_functions(importer: Importer) -> None:
    text = _trl(dataset_name="org/sums", reward_weights="[1.0, 0.2]")
    assert "--explorer.reward.functions" in importer.refusal("grpo.yaml", text)
    functions = '{ math = 1.0, "rewards:short" = 0.2 }'
    file = importer.explorer("grpo.yaml", text, "--explorer.reward.functions", functions)
    assert file.explorer.reward.functions == {"math": 1.0, "rewards:short": 0.2}


def test_a_server_that_nobody_names_is_left_to_the_user(importer: Importer) -> None:
    assert importer.run("run.sh", _verl()) == 0
    assert "--explorer.engine.command 'env VLLM" in importer.said
    assert importer.run("run.sh", _verl(), "--explorer.engine.address", "http://x:1") == 0
    assert "the server:" not in importer.said
    assert importer.run("grpo.yaml", _trl(use_vllm=False)) == 0
    assert "the server:" not in importer.said


def test_what_is_written_is_one_document(importer: Importer) -> None:
    text = _trl(dataset_name="org/sums", eval_strategy="steps", eval_steps=4)
    assert importer.run("grpo.yaml", text) == 0
    written = flat(tomllib.loads(importer.job.read_text()))
    assert [one["split"] for one in written["explorer.task_sets"]] == ["train", "test"]
    assert "[[explorer.task_sets]]" in importer.job.read_text()


def test_a_step_that_is_larger_than_a_batch_is_shared_out(importer: Importer) -> None:
    sizes = {"data.train_batch_size": 1024, "actor_rollout_ref.rollout.n": 5}
    file = importer.explorer("run.sh", _verl(**sizes, data__train_files="/d/a.jsonl"))
    assert (file.data.groups, file.explorer.groups) == (1024, 512)
    assert "a step is 2 batches of 512 groups: start 2 explorers, or a multiple of them" in importer.said
    small = importer.explorer("run.sh", _verl(data__train_batch_size=256, data__train_files="/d/a.jsonl"))
    assert small.explorer.groups is None


def test_an_option_that_a_message_names_is_enough(importer: Importer) -> None:
    text = _trl(lr_scheduler_type="linear", warmup_steps=3, use_peft=True)
    refusal = importer.refusal("grpo.yaml", text)
    assert "--model.lora.targets all-linear" in refusal
    given = ("--model.lora.targets", "all-linear")
    assert importer.run("grpo.yaml", text, *given) == 0
    written = flat(tomllib.loads(importer.job.read_text()))
    assert (written["algorithm.optimizer.schedule"], written["algorithm.optimizer.warmup_steps"]) == (
        "linear",
        3,
    )
    assert (written["model.lora.targets"], written["model.lora.rank"]) == ("all-linear", 16)
    assert "--algorithm.name NAME" in importer.refusal("run.sh", _verl(algorithm__adv_estimator="remax"))
    assert importer.run("run.sh", _verl(algorithm__adv_estimator="remax"), "--algorithm.name", "rloo") == 0


def test_a_command_names_the_file_that_it_builds_upon(importer: Importer) -> None:
    command = "python3 -m verl.trainer.main_ppo --config-path=config --config-name="
    assert importer.run("run.sh", f"{command}ppo_megatron_trainer.yaml {_verl()}") == 0
    assert tomllib.loads(importer.job.read_text())["engine"]["strategy"] == "megatron"
    assert importer.run("run.sh", f"{command}'ppo_trainer' {_verl()}") == 0
    assert tomllib.loads(importer.job.read_text())["engine"]["strategy"] == "fsdp"
    assert "--cfg job --resolve" in importer.refusal("run.sh", f"{command}mine {_verl()}")


def test_a_flag_with_several_values_keeps_them_all(importer: Importer) -> None:
    flags = " ".join(f"--{key} {value}" for key, value in TRL.items() if key != "use_vllm")
    command = f"accelerate launch train.py {flags} --use_peft --lora_target_modules q_proj v_proj --seed 3"
    assert importer.run("run.sh", command, "--from", "trl") == 0
    written = flat(tomllib.loads(importer.job.read_text()))
    assert (written["model.lora.targets"], written["job.seed"]) == (["q_proj", "v_proj"], 3)


@pytest.mark.parametrize(
    "script",
    [
        'MORE="actor_rollout_ref.actor.grad_clip=0.5 algorithm.gamma=1.0"\npython3 -m verl.main_ppo {} $MORE "$@"',
        "python3 -m verl.trainer.main_ppo {} ${{MORE:-actor_rollout_ref.actor.grad_clip=0.5}}",
        'A="actor_rollout_ref.actor.grad_clip=0.5"\nMORE="$A"\npython3 -m verl.trainer.main_ppo {} $MORE',
        "MORE=(actor_rollout_ref.actor.grad_clip=0.5)\npython3 -m verl.trainer.main_ppo {} ${{MORE[@]}}",
        "MORE=()\nMORE+=(actor_rollout_ref.actor.grad_clip=0.5)\npython3 -m verl.trainer.main_ppo {} ${{MORE[@]}}",
    ],
)
def test_options_that_a_variable_of_the_script_holds_count(importer: Importer, script: str) -> None:
    assert importer.run("run.sh", script.format(_verl())) == 0
    assert tomllib.loads(importer.job.read_text())["algorithm"]["optimizer"]["clip_grad"] == 0.5


@pytest.mark.parametrize(
    "assignments",
    [
        'MORE="actor_rollout_ref.actor.grad_clip=0.5"\nMORE+=" algorithm.kl_ctrl.kl_coef=0.1"',
        'A="actor_rollout_ref.actor.grad_clip=0.5"\nA+=" x"\nMORE="$A algorithm.gamma=1.0"',
        'if [ "$1" = long ]; then MORE="actor_rollout_ref.actor.grad_clip=0.5"; else MORE=""; fi',
        'if [ "$1" = long ]; then MORE="actor_rollout_ref.actor.grad_clip=0.5"; fi',
    ],
)
def test_options_that_only_a_run_of_the_script_would_tell_are_refused(
    importer: Importer, assignments: str
) -> None:
    command = f"python3 -m verl.trainer.main_ppo {_verl()} $MORE $LR $WORDS"
    script = f"{assignments}\nLR=1 LR=2 WORDS=a\nWORDS+=b\n{command}"
    assert "MORE: depends on what only the script's run would tell" in importer.refusal("run.sh", script)
    assert importer.run("run.sh", script, "--without", "MORE") == 0


@pytest.mark.parametrize(
    "assignments",
    [
        "RUNS=/runs/x\nRUNS+=-seed2",
        'if [ "$1" = short ]; then\n  RUNS=/runs/x\nfi',
        'RUNS=/runs/x\nfor RUNS in "$@"; do echo $RUNS; done',
    ],
)
def test_a_value_that_only_a_run_of_the_script_would_tell_is_refused(
    importer: Importer, assignments: str
) -> None:
    command = f"python3 -m verl.trainer.main_ppo {_verl()}".replace("'/runs/x'", "$RUNS")
    said = importer.refusal("run.sh", f"{assignments}\n{command}")
    assert "trainer.default_local_dir: depends on what only the script's run would tell" in said
