"""`trainer import`: twenty configurations that were composed for it, as our own loader and the explorer's read the
result. Public examples of the four projects, with their sources, are in test_importing_examples.py.
"""

import errno
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from explorer_hooks.run.load import load_file
from syncd.jobfile.model import KEYS
from trainer.cli.main import run
from trainer.config.load import load_config
from trainer.parts.importing import start
from trainer.parts.importing.configuration import TYPES
from trainer.parts.importing.rules import CALLED, READING
from trainer.parts.importing.run import flat
from trainer.parts.importing.table import PROJECTS, read_table

DATA = Path(__file__).parents[2] / "data/importing"

CHOSEN = ("--algorithm.name", "grpo", "--algorithm.clip_ratio", "0.2")
"""What a user of prime-rl has to choose."""

Case = tuple[tuple[str, ...], dict[str, Any]]

MAPPED: dict[str, Case] = {
    "trinity-math.yaml": ((), {
        "job.dir": "./runs/sums/small-math", "model.path": "/models/base", "algorithm.name": "grpo",
        "algorithm.kl_coef": 0.002, "algorithm.kl_type": "low_var_kl", "algorithm.old_logprobs": "rollout",
        "algorithm.reward_kl_coef": 0.05, "algorithm.reward_kl_type": "k2",
        "algorithm.temperature": 0.9, "algorithm.optimizer.lr": 3e-6, "algorithm.optimizer.weight_decay": 0.01,
        "algorithm.optimizer.clip_grad": 0.5, "algorithm.optimizer.warmup_steps": 5, "data.groups": 24,
        "data.group_size": 6, "sync.method": "nccl", "sync.style": "trainer_driven", "sync.interval": 2,
        "trainer.save_interval": 40, "engine.options.max_token_len_per_gpu": 6000, "explorer.epochs": 2,
        "explorer.task_sets": [{"source": "datasets:some/sums", "split": "train", "prompt_key": "question",
                                "answer_key": "result"}], "explorer.evaluation.every": 10,
        "explorer.sampling.max_tokens": 700}),
    "trinity-dapo.yaml": (("--without", "data_processor"), {
        "algorithm.name": "grpo", "algorithm.clip_ratio_low": 0.15, "algorithm.clip_ratio_high": 0.3,
        "algorithm.options.clip_ratio_c": 50.0, "algorithm.loss_agg_mode": "token-mean", "data.groups": 16,
        "data.group_size": 12, "sync.style": "fully_async", "sync.interval": 4, "trainer.total_steps": 80,
        "explorer.evaluation.every": 2, "engine.options.max_token_len_per_gpu": 18000}),
    "trinity-ppo.yaml": ((), {
        "algorithm.name": "ppo", "critic.enabled": True, "critic.path": "/models/base", "critic.warmup_steps": 3,
        "algorithm.lam": 1.0, "algorithm.kl_coef": 0.001, "algorithm.kl_type": "k2", "data.groups": 16,
        "data.group_size": 4, "explorer.groups": 32, "explorer.engine.kind": "sglang", "engine.strategy": "fsdp",
        "sync.method": "memory", "trainer.save_hf_checkpoint": "always", "trainer.max_checkpoints_to_keep": 2}),
    "trinity-sft.yaml": ((), {
        "algorithm.name": "sft", "data.sft_path": "/data/examples.jsonl", "data.groups": 48, "data.group_size": 1,
        "data.epochs": 3, "trainer.save_interval": 25, "sync.method": "checkpoint"}),
    "trinity-lora.yaml": ((), {
        "model.lora.rank": 16, "model.lora.alpha": 24, "algorithm.name": "gspo", "algorithm.clip_ratio_low": 3e-4,
        "algorithm.clip_ratio_high": 4e-4, "algorithm.old_logprobs": "recompute", "monitor.group": "sweep",
        "monitor.kinds": ["wandb"], "job.dir": "/runs/adapters/sweep/r16"}),
    "verl-grpo.sh": ((), {
        "algorithm.name": "grpo", "algorithm.kl_coef": 0.004, "algorithm.mini_batches": 3, "data.groups": 192,
        "data.group_size": 6, "algorithm.optimizer.warmup_steps": 12, "engine.micro_batch_size": 3,
        "engine.infer_micro_batch_size": 9, "engine.offload_params": False, "engine.offload_optimizer": True,
        "engine.packing": True, "engine.strategy": "fsdp", "explorer.sampling.max_tokens": 3072,
        "explorer.sampling.max_prompt_tokens": 400, "explorer.epochs": 4, "explorer.engine.kind": "vllm",
        "explorer.evaluation.every": 5, "trainer.save_interval": 25, "monitor.kinds": ["wandb"],
        "job.dir": "checkpoints/sums/grpo", "algorithm.optimizer.weight_decay": 0.01}),
    "verl-arrays.sh": (("--set", "actor_rollout_ref.actor.optim.lr=5e-6", "--data.group_size", "8"), {
        "algorithm.name": "rloo", "algorithm.optimizer.lr": 5e-6, "engine.options.max_token_len_per_gpu": 7000,
        "engine.options.use_dynamic_bsz": True, "explorer.engine.kind": "sglang", "trainer.total_steps": 90,
        "model.attn_implementation": "flash_attention_2"}),
    "verl-ppo.yaml": ((), {
        "algorithm.name": "ppo", "critic.enabled": True, "critic.optimizer.lr": 2e-5, "critic.clip_range": 0.4,
        "critic.path": "/models/base", "critic.warmup_steps": 6, "algorithm.gamma": 0.99, "algorithm.lam": 0.97,
        "algorithm.optimizer.schedule": "cosine", "algorithm.optimizer.warmup_steps": 20, "job.seed": 5,
        "algorithm.optimizer.min_lr_ratio": 0.1,
        "algorithm.mini_batches": 1, "trainer.total_steps": 200, "monitor.kinds": ["tensorboard"],
        "engine.options.ulysses_sequence_parallel_size": 2,
        "model.gradient_checkpointing": False, "job.dir": "/runs/ppo", "explorer.shuffle": False}),
    "verl-lora.yaml": (("--engine.strategy", "fsdp2"), {
        "model.lora.rank": 32, "model.lora.alpha": 48, "model.lora.targets": ["q_proj", "v_proj"],
        "model.lora.exclude": ["lm_head"], "algorithm.norm_advantage": False, "algorithm.clip_ratio_high": 0.28,
        "algorithm.loss_agg_mode": "seq-mean-token-sum-norm", "algorithm.options.loss_scale_factor": 1024,
        "model.dtype": "bfloat16", "engine.options.fsdp_size": 4, "engine.strategy": "fsdp2"}),
    "verl-megatron.yaml": ((), {
        "engine.strategy": "megatron", "engine.options.tensor_model_parallel_size": 2, "model.dtype": "bfloat16",
        "engine.options.pipeline_model_parallel_size": 2, "engine.options.sequence_parallel": True,
        "engine.offload_params": True, "algorithm.name": "gspo", "trainer.continue_from_checkpoint": False}),
    "prime-words.toml": (CHOSEN, {
        "job.dir": "/runs/words", "job.name": "backwards", "data.groups": 8, "data.group_size": 12,
        "sync.style": "fully_async", "explorer.ahead": 1, "algorithm.temperature": 0.7, "trainer.total_steps": 60,
        "algorithm.norm_advantage": False, "algorithm.optimizer.lr": 4e-6, "algorithm.optimizer.weight_decay": 0.0,
        "explorer.sampling.max_tokens": 200, "engine.options.max_token_len_per_gpu": 3000,
        "trainer.save_interval": 15, "trainer.max_checkpoints_to_keep": 2, "monitor.project": "words"}),
    "prime-older.toml": (CHOSEN, {
        "sync.style": "fixed", "sync.method": "nccl", "data.groups": 8, "data.group_size": 8,
        "model.attn_implementation": "sdpa", "model.gradient_checkpointing": True, "engine.offload_params": True,
        "algorithm.optimizer.schedule": "cosine", "algorithm.optimizer.warmup_steps": 3,
        "explorer.sampling.max_tokens": 900, "explorer.evaluation.every": 10}),
    "prime-lora.toml": (CHOSEN, {
        "model.lora.rank": 8, "model.lora.alpha": 16, "model.lora.targets": ["q_proj", "o_proj"],
        "trainer.continue_from_checkpoint": True, "job.dir": "outputs"}),
    "trl-grpo.yaml": ((), {
        "data.groups": 8, "data.group_size": 8, "algorithm.mini_batches": 2, "algorithm.epochs": 2,
        "trainer.total_steps": 30, "trainer.save_interval": 10, "algorithm.loss_agg_mode": "seq-mean-token-mean",
        "algorithm.norm_advantage": False, "algorithm.kl_coef": 0.01, "algorithm.kl_type": "k3",
        "algorithm.clip_ratio_low": 0.2, "algorithm.clip_ratio_high": 0.25, "algorithm.options.clip_ratio_c": 1e9,
        "algorithm.options.policy_loss.rollout_correction.rollout_is": "token",
        "algorithm.options.policy_loss.rollout_correction.rollout_is_threshold": 3.0,
        "algorithm.optimizer.warmup_steps": 6, "engine.micro_batch_size": 4, "explorer.engine.kind": "vllm",
        "explorer.engine.address": "http://engines:8000", "model.dtype": "bfloat16", "job.dir": "runs/trl"}),
    "trl-command.sh": ((), {
        "algorithm.name": "cispo", "algorithm.clip_ratio_high": 4.0, "algorithm.clip_ratio_low": 10.0,
        "data.groups": 4, "data.group_size": 4, "model.lora.rank": 8, "model.lora.targets": "q_proj",
        "trainer.total_steps": 50, "algorithm.optimizer.warmup_steps": 3, "explorer.engine.kind": "vllm",
        "algorithm.options.policy_loss.rollout_correction.rollout_is": "sequence",
        "algorithm.options.policy_loss.rollout_correction.rollout_is_threshold": "0_2"}),
    "trl-plain.json": ((), {
        "algorithm.loss_agg_mode": "seq-mean-token-sum-norm", "algorithm.options.loss_scale_factor": 512,
        "algorithm.options.clip_ratio_c": 4.0, "engine.compute_dtype": "float32", "trainer.save_interval": 0,
        "data.groups": 2, "job.seed": 3, "trainer.total_steps": 64}),
}  # fmt: skip
"""Files with the arguments that they need, and what the job's file then says: computed by hand."""

REFUSED: dict[str, dict[str, str]] = {
    "trinity-mix.yaml": {
        "algorithm.algorithm_type": "mix is not supported", "algorithm.sample_strategy": "data.sft_ratio",
        "synchronizer.sync_interval, explorer.eval_interval": "10 cannot be divided by 3",
        "trainer.grad_clp": "did you mean trainer.grad_clip"},
    "trinity-dapo.yaml": {
        "data_processor.experience_pipeline.operators.0.name": "--explorer.reward.equal_groups drop"},
    "verl-refused.yaml": {
        "algorithm.adv_estimator": "greedy rollout",
        "algorithm.filter_groups.enable, algorithm.filter_groups.metric": "compares acc",
        "data.truncation": "never cut",
        "data.train_batch_size, actor_rollout_ref.actor.ppo_mini_batch_size": "100 cannot be divided by 64",
        "actor_rollout_ref.rollout.name": "known are vllm", "actor_rollout_ref.rollout.top_p": "whole distribution",
        "actor_rollout_ref.rollout.multi_turn.enable": "--explorer.agent.function",
        "actor_rollout_ref.actor.shufle": "did you mean actor_rollout_ref.actor.shuffle"},
    "verl-arrays.sh": {"actor_rollout_ref.actor.optim.lr": "only the script's run"},
    "prime-refused.toml": {
        "trainer.loss.type": "--algorithm.name", "orchestrator.token_batch_size": "groups, not tokens",
        "trainer.optim.type": "AdamW", "trainer.optim.mu": "no such setting", "trainer.scheduler.type": "linear",
        "trainer.model.attn": "sdpa", "trainer.model.tp": "Megatron",
        "orchestrator.buffer.easy_threshold": "rewards"},
    "trl-defaults.yaml": {
        "num_generations": "num_processes=N", "learning_rate": "not a number", "top_p": "whole distribution",
        "mask_truncated_completions": "trained on like others"},
}  # fmt: skip
"""Files with what their refusals name: their key, and words of the reason or of what to do."""


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IMPORT_TEST_ROOT", "IMPORT_TEST_MODEL", "MODEL_OF_TEST", "HOME_OF_DATA", "FAST"):
        monkeypatch.delenv(name, raising=False)


def test_there_are_twenty_files_and_each_is_tested() -> None:
    names = {path.name for path in DATA.iterdir() if path.is_file()}
    assert len(names) >= 20
    assert names == set(MAPPED) | set(REFUSED)


@pytest.mark.parametrize("name", MAPPED)
def test_a_file_becomes_one_that_trainer_and_explorer_read(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, expected = MAPPED[name]
    job = tmp_path / "job.toml"
    assert run(["import", str(DATA / name), "--to", str(job), *arguments]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "not-for-any-report" not in said.err
    written = flat(tomllib.loads(job.read_text()))
    assert {key: written.get(key) for key in expected} == expected
    loaded = load_config(str(job))
    assert loaded.job.source == str(job)
    if written["algorithm.name"] != "sft":
        is_served = written["explorer.engine.kind"] != "transformers"
        server = ("--explorer.engine.address", "http://x:1", "--explorer.engine.processed_logprobs", "true")
        chosen = ("explorer.tasks", "explorer.task_sets", "explorer.agent.environment")
        tasks = () if any(key in written for key in chosen) else ("--explorer.tasks", "tasks.jsonl")
        file = load_file(str(job), (*tasks, *(server if is_served else ())))
        assert file.explorer.engine.kind == written["explorer.engine.kind"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_mapped_is_named_and_nothing_is_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.toml"
    assert run(["import", str(DATA / name), "--to", str(job)]) == 78
    said = capsys.readouterr()
    assert not job.exists()
    lines = said.err.partition("left to you")[0].splitlines()
    for key, words in REFUSED[name].items():
        (place,) = [place for place, line in enumerate(lines) if line.startswith(f"  {key}: ")]
        assert words in lines[place] + lines[place + 1]


def test_refused_keys_are_left_out_or_replaced(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    arguments = [
        "--without", "trainer.grad_clp", "--without", "algorithm.sample_strategy", "--algorithm.name", "grpo",
        "--set", "synchronizer.sync_interval=5", "--data.sft_ratio", "0.5", "--data.sft_path", "/data/x.jsonl",
    ]  # fmt: skip
    assert run(["import", str(DATA / "trinity-mix.yaml"), "--to", str(job), *arguments]) == 0
    written = flat(tomllib.loads(job.read_text()))
    assert (written["algorithm.name"], written["explorer.evaluation.every"], written["data.sft_ratio"]) == (
        "grpo",
        2,
        0.5,
    )


def test_every_target_is_a_key_and_every_key_has_one_first_row() -> None:
    known = set(KEYS.all)
    for table in map(read_table, PROJECTS):
        for row in table.rows:
            for key in row.ours:
                assert key in known or key.startswith(
                    ("engine.options", "algorithm.options", "explorer.task_sets")
                ), (
                    table.name,
                    key,
                )
        for key in table.defaults:
            assert any(row.matches(key) for row in table.rows), (table.name, key)


FIELDS = {
    "key", "fact", "value", "call", "read", "with", "chosen", "type", "omit", "default", "values", "otherwise",
    "refused", "refusal", "missing", "instead", "when", "unless", "equals", "above", "set", "check",
}  # fmt: skip
"""What a specification of a table may say."""


@pytest.mark.parametrize("name", PROJECTS)
def test_a_table_says_only_what_the_engine_reads(name: str) -> None:
    table = read_table(name)
    specs = [*table.facts.values(), *(row.spec for row in table.rows)]
    for spec in specs:
        _check(spec, table.facts)


def _check(spec: Any, facts: Mapping[str, Any]) -> None:
    if isinstance(spec, list):
        for part in spec:
            _check(part, facts)
    if not isinstance(spec, dict):
        return
    assert set(spec) <= FIELDS, spec
    assert spec.get("type", "text") in TYPES
    assert "fact" not in spec or spec["fact"] in facts
    assert "call" not in spec or spec["call"] in CALLED
    assert "read" not in spec or spec["read"] in READING
    for field in ("with", "set", "values"):
        for part in spec.get(field, {}).values():
            _check(part, facts)
    for field in ("check", "when", "unless", "default", "otherwise"):
        _check(spec.get(field), facts)


def test_verls_own_defaults_are_known_key_by_key(tmp_path: Path) -> None:
    import verl

    folder = Path(verl.__file__).parent / "trainer/config"
    for name in ("_generated_ppo_trainer.yaml", "_generated_ppo_megatron_trainer.yaml"):
        whole = yaml.safe_load((folder / name).read_text())
        given = flat(whole)
        defaults = read_table("verl").defaults
        same = {
            key: value
            for key, value in defaults.items()
            if key in given and key != "actor_rollout_ref.actor.strategy"
        }
        assert len(same) > 30
        assert {
            key: float(given[key]) if isinstance(value, float) else given[key] for key, value in same.items()
        } == same
        path = tmp_path / name
        path.write_text((folder / name).read_text())
        job = tmp_path / f"{name}.toml"
        assert run(
            ["import", str(path), "--to", str(job), "--set", "actor_rollout_ref.rollout.name=vllm"]
        ) in (0, 78)
        if "megatron" not in name:
            assert load_config(str(job)).critic.enabled


_LAUGHS = b"b0: &b0 [x]\n" + b"".join(
    b"b%d: &b%d {p: *b%d, q: *b%d}\n" % (n, n, n - 1, n - 1) for n in range(1, 25)
)

BAD: dict[str, tuple[bytes, int, str]] = {
    "torn.yaml": (b"a: [1, 2\nb: 3", 78, "line 2"),
    "twice.yaml": (b"actor_rollout_ref:\n  n: 1\n  n: 2\n", 78, "line 3: the key 'n' is given twice"),
    "list.yaml": (b"- 1\n- 2\n", 78, "not a table of keys"),
    "empty.yaml": (b"", 78, "not a table of keys"),
    "cyclic.yaml": (b"actor_rollout_ref: &a\n  b: *a\n", 78, "anchor hold itself"),
    "laughs.yaml": (_LAUGHS, 78, "values"),
    "deep.yaml": (b"[" * 4000, 78, "not YAML"),
    "python.yaml": (b"actor_rollout_ref: !!python/object/apply:os.system ['touch /tmp/never']\n", 78, "constructor"),
    "key.yaml": (b"? [a, b]\n: 1\n", 78, "a key is not text"),
    "binary.yaml": (b"\xff\xfe\x00", 78, "decode"),
    "twice.json": (b'{"num_generations": 8, "num_generations": 4}', 78, "given twice"),
    "torn.toml": (b"[orchestrator\n", 78, "not TOML"),
    "quote.sh": (b"a.b='x", 78, "quotation"),
    "huge.yaml": (b"#" * (5 << 20), 78, "larger than 4 MiB"),
    "nobody.yaml": (b"colour: red\n", 2, "no known project"),
    "both.yaml": (b"actor_rollout_ref: {model: {path: x}}\nbuffer: {batch_size: 1}\n", 2, "Trinity-RFT and verl"),
    "config.ini": (b"[a]\n", 2, "is no known format"),
    "grpo.py": (b"GRPOTrainer()\n", 2, "is not run"),
    "loop.yaml": (b'actor_rollout_ref: {model: {path: "${actor_rollout_ref.model.path}"}}\n', 78, "refers to itself"),
    "unset.yaml": (b'actor_rollout_ref: {model: {path: "${oc.env:NO_SUCH_NAME}"}}\n', 78, "NO_SUCH_NAME, which is"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_message(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, code, words = BAD[name]
    (tmp_path / name).write_bytes(text)
    assert run(["import", str(tmp_path / name)]) == code
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
    assert not Path("/tmp/never").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--set trainer.logger=3", "trainer.logger: is not text"),
        ("--set algorithm.adv_estimator=[gae]", "algorithm.adv_estimator: is not text"),
        ("--set actor_rollout_ref.actor.grad_clip=[1]", "actor_rollout_ref.actor.grad_clip: is not a number"),
        ("--set defaults=3", "defaults: is not text"),
        (
            "--set actor_rollout_ref.actor.optim.lr=0 --without actor_rollout_ref.actor.optim.min_lr_ratio",
            "lr = 0",
        ),
    ],
)
def test_a_value_of_another_type_is_refused_or_read_never_a_crash(
    arguments: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(["import", str(DATA / "verl-ppo.yaml"), "--to", str(tmp_path / "job.toml"), *arguments.split()])
        == 78
    )
    assert words in capsys.readouterr().err


def test_nothing_is_overwritten_and_a_taken_directory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, name = tmp_path / "job.toml", str(DATA / "verl-ppo.yaml")
    job.write_text("mine")
    assert run(["import", name, "--to", str(job)]) == 2
    assert job.read_text() == "mine"
    (tmp_path / "old/global_step_5").mkdir(parents=True)
    there = ["--set", f"trainer.default_local_dir={tmp_path}/old"]
    assert run(["import", name, *there]) == 78
    assert "is not empty" in capsys.readouterr().err
    assert run(["import", name, *there, "--job.dir", str(tmp_path / "new")]) == 0
    assert flat(tomllib.loads(capsys.readouterr().out))["job.dir"] == str(tmp_path / "new")
    assert run(["import", str(tmp_path / "none.yaml")]) == 74
    assert run(["import", name, "--without", "no.such"]) == 2


def test_a_job_that_resumes_a_step_starts_from_it_whatever_the_file_says_of_resuming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "export_training", lambda *_: None)
    step = tmp_path / "verl/global_step_5"
    step.mkdir(parents=True)
    line = ["import", str(DATA / "verl-ppo.yaml"), "--set", "trainer.resume_mode=disable"]
    assert run([*line, "--to", str(tmp_path / "new.toml")]) == 0
    assert not load_config(str(tmp_path / "new.toml")).trainer.continue_from_checkpoint
    resumed = ["--to", str(tmp_path / "resumed.toml"), "--from-checkpoint", str(step), "--resume"]
    assert run([*line, *resumed]) == 0
    assert load_config(str(tmp_path / "resumed.toml")).trainer.continue_from_checkpoint


def test_a_relative_model_is_looked_for_where_the_job_file_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = ["import", str(DATA / "verl-ppo.yaml"), "--set", "actor_rollout_ref.model.path=base"]
    for model, is_said in (("base", True), ("jobs/base", False)):
        (tmp_path / model).mkdir(parents=True)
        assert run([*line, "--to", "jobs/job.toml"]) == 0
        assert ("base is no directory here" in capsys.readouterr().err) == is_said
        (tmp_path / "jobs/job.toml").unlink()


def test_the_directory_of_the_job_file_is_made_before_anything_is_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --resume an export takes long, and a second import refuses the job directory that it has filled."""
    job, step, exported = tmp_path / "new/job.toml", tmp_path / "verl/global_step_5", list[bool]()
    step.mkdir(parents=True)
    monkeypatch.setattr(start, "export_training", lambda *_: exported.append(job.parent.is_dir()))
    resumed = ["--from-checkpoint", str(step), "--resume"]
    assert run(["import", str(DATA / "verl-ppo.yaml"), "--to", str(job), *resumed]) == 0, capsys.readouterr()
    assert exported == [True]
    assert job.is_file()
    (tmp_path / "file").touch()
    job = tmp_path / "file/job.toml"
    assert run(["import", str(DATA / "verl-ppo.yaml"), "--to", str(job), *resumed]) == 74
    assert len(exported) == 1


def test_a_job_file_that_cannot_be_written_whole_is_not_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["import", str(DATA / "verl-ppo.yaml"), "--to", str(tmp_path / "job.toml")]

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        assert run(line) == 74
    assert "No space left on device" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []
    assert run(line) == 0


def test_a_second_import_of_a_job_file_is_refused_while_the_first_exports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, step, codes = tmp_path / "job.toml", tmp_path / "verl/global_step_5", list[int]()
    step.mkdir(parents=True)
    line = [
        "import",
        str(DATA / "verl-ppo.yaml"),
        "--to",
        str(job),
        "--from-checkpoint",
        str(step),
        "--resume",
    ]

    def second(*_: object) -> None:
        monkeypatch.setattr(start, "export_training", lambda *_: None)
        codes.append(run(line))

    monkeypatch.setattr(start, "export_training", second)
    codes.append(run(line))
    assert codes == [2, 0], capsys.readouterr().err
    assert load_config(str(job)).algorithm.name == "ppo"


def test_a_fifo_is_no_configuration_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "import", str(tmp_path / "pipe.yaml")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.splitlines()[0]) == (78, f"error: not a file: {tmp_path}/pipe.yaml")


@pytest.mark.parametrize("name", PROJECTS)
def test_the_page_of_keys_has_each_row_of_a_project(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", "--keys", name]) == 0
    rows = [line for line in _without_titles(capsys.readouterr().out) if line.startswith("| `")]
    page = _without_titles((DATA.parents[2] / "docs/import-keys.md").read_text())
    assert len(rows) > 60
    assert set(rows) <= set(page)


def _without_titles(text: str) -> list[str]:
    """Return the lines of a text with links as their targets: the site shows titles, a terminal addresses."""
    return re.sub(r"\[[^\]]*\]\(([^)]*)\)", r"\1", text).splitlines()
