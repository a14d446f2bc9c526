"""`trainer import`: public examples of four projects, with the source of each, as our loaders read the result.

The files in tests/data/importing/examples have the keys and values of their sources, in another order and layout,
without comments, and with shorter prompts. Those beside them, in tests/data/importing, are composed.
"""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from explorer_hooks.run.load import load_file
from trainer.cli.main import run
from trainer.config.load import load_config
from trainer.parts.importing.run import flat

DATA = Path(__file__).parents[2] / "data/importing/examples"

VERL = "volcengine/verl@b178a3cd56f58b2d502255daba591e92833930a7"
PRIME = "PrimeIntellect-ai/prime-rl@60bc29547a8824ad1de7b9af8d265e2b27b2a72d"
TRL = "huggingface/trl@f2cd57710ae345ea6428ae95363267fcf38a3dc8"
MODELSCOPE = "modelscope/Trinity-RFT"
AGENTSCOPE = "agentscope-ai/Trinity-RFT"

GRPO = ("--algorithm.name", "grpo", "--algorithm.clip_ratio", "0.2")
CONSTANT = ("--algorithm.optimizer.schedule", "constant")


@dataclass(frozen=True)
class Example:
    """A public example.

    Args:
        source: Repository, commit and path.
        expected: Values of the job's file, computed by hand.
        arguments: What has to be given so that it is imported.
        refusal: Words that an import without these arguments says, each of them.
    """

    source: str
    expected: dict[str, Any]
    arguments: tuple[str, ...] = ()
    refusal: tuple[str, ...] = field(default=())


def _gsm8k(**more: Any) -> dict[str, Any]:
    """Return what four examples of Trinity-RFT have in common."""
    return {
        "data.groups": 96, "data.group_size": 8, "algorithm.optimizer.lr": 1e-5, "algorithm.kl_coef": 0.001,
        "algorithm.kl_type": "k2", "sync.method": "nccl", "sync.interval": 1, "explorer.evaluation.every": 50,
        "trainer.save_interval": 100, "engine.options.max_token_len_per_gpu": 16384, "explorer.epochs": 1,
        "explorer.sampling.max_tokens": 1024, "explorer.task_sets": [
            {"source": "datasets:openai/gsm8k", "subset": "main", "split": "train", "prompt_key": "question",
             "answer_key": "answer"}], **{key.replace("__", "."): value for key, value in more.items()},
    }  # fmt: skip


EXAMPLES: dict[str, Example] = {
    "verl-grpo-qwen2.sh": Example(f"{VERL}:examples/grpo_trainer/run_qwen2-7b.sh", {
        "algorithm.name": "grpo", "algorithm.kl_coef": 0.001, "algorithm.mini_batches": 4, "data.groups": 1024,
        "data.group_size": 5, "explorer.groups": 512, "explorer.tasks": "/home/me/data/gsm8k/train.parquet",
        "explorer.evaluation.tasks": "/home/me/data/gsm8k/test.parquet", "explorer.evaluation.every": 5,
        "job.dir": "checkpoints/verl_grpo_example_gsm8k/qwen2_7b_function_rm", "trainer.save_interval": 20,
        "explorer.epochs": 15, "engine.micro_batch_size": 40, "engine.infer_micro_batch_size": 40,
        "explorer.sampling.max_prompt_tokens": 512, "explorer.sampling.max_tokens": 1024}),
    "verl-grpo-lora.sh": Example(f"{VERL}:examples/grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora.sh", {
        "model.lora.rank": 64, "model.lora.alpha": 32, "model.lora.targets": "all-linear", "data.groups": 16,
        "algorithm.optimizer.lr": 3e-6, "algorithm.mini_batches": 1, "explorer.shuffle": False,
        "engine.strategy": "fsdp2"}, ("--engine.strategy", "fsdp2"), ('model.lora with engine.strategy = "fsdp"',)),
    "verl-ppo-deepseek.sh": Example(f"{VERL}:examples/ppo_trainer/run_deepseek7b_llm.sh", {
        "algorithm.name": "ppo", "critic.enabled": True, "critic.path": "deepseek-ai/deepseek-llm-7b-chat",
        "critic.optimizer.lr": 1e-5, "data.groups": 1024, "data.group_size": 1, "algorithm.mini_batches": 4,
        "algorithm.lam": 1.0, "explorer.evaluation.every": 1, "explorer.sampling.max_tokens": 512}),
    "verl-rloo-qwen2.sh": Example(f"{VERL}:examples/rloo_trainer/run_qwen2-7b.sh", {
        "algorithm.name": "rloo", "algorithm.reward_kl_coef": 0.001, "algorithm.reward_kl_type": "kl",
        "trainer.save_interval": 0, "data.group_size": 5}),
    "verl-cispo-qwen2.5.sh": Example(f"{VERL}:examples/cispo_trainer/run_cispo_qwen2_5_0_5b_gsm8k.sh", {
        "algorithm.name": "cispo", "algorithm.clip_ratio_low": 10, "algorithm.clip_ratio_high": 0.2,
        "data.groups": 256, "data.group_size": 5, "algorithm.mini_batches": 2, "model.dtype": "bfloat16",
        "explorer.tasks": "/home/me/data/gsm8k/train.parquet"},
        ("--without", "actor_rollout_ref.model.torch_dtype", "--model.dtype", "bfloat16"),
        ("actor_rollout_ref.model.torch_dtype: is no key of verl",)),
    "verl-gspo-qwen2.5.sh": Example(f"{VERL}:examples/gspo_trainer/test_gspo_3b_math.sh", {
        "algorithm.name": "gspo", "algorithm.clip_ratio_low": 3e-4, "algorithm.clip_ratio_high": 4e-4,
        "algorithm.loss_agg_mode": "seq-mean-token-mean", "algorithm.optimizer.warmup_steps": 100,
        "algorithm.optimizer.weight_decay": 0.1, "algorithm.mini_batches": 4, "data.groups": 512,
        "data.group_size": 16, "explorer.groups": 256, "explorer.sampling.max_prompt_tokens": 2048,
        "explorer.sampling.max_tokens": 8192, "engine.options.max_token_len_per_gpu": 20480,
        "engine.options.infer_max_token_len_per_gpu": 30720, "engine.offload_params": True,
        "explorer.evaluation.temperature": 1.0, "explorer.evaluation.samples": 1, "trainer.total_steps": 500},
        ("--set", "trainer.default_local_dir=/rl/gspo", "--set", "trainer.experiment_name=gspo"),
        ("trainer.experiment_name", "only the script's run would tell")),
    "verl-grpo-megatron.sh": Example(f"{VERL}:examples/grpo_trainer/run_qwen2-7b_math_megatron.sh", {
        "engine.strategy": "megatron", "engine.options.tensor_model_parallel_size": 2,
        "engine.options.pipeline_model_parallel_size": 2, "model.dtype": "bfloat16", "data.groups": 1024,
        "explorer.task_sets": [
            {"source": "/home/me/data/gsm8k/train.parquet", "name": "gsm8k-train"},
            {"source": "/home/me/data/math/train.parquet", "name": "math-train"}]}),
    "verl-multiturn.yaml": Example(f"{VERL}:examples/sglang_multiturn/config/gsm8k_multiturn_grpo.yaml", {
        "explorer.engine.kind": "sglang", "data.groups": 256, "explorer.agent.function": "agent:run",
        "explorer.sampling.max_tokens": 1024},
        ("--model.path", "/models/m", "--explorer.agent.function", "agent:run"),
        ("multi_turn.enable", "--explorer.agent.function", "docs/agents.md")),
    "trinity-grpo-gsm8k.yaml": Example(
        f"{MODELSCOPE}@c3d094d59bec0f069408f457944cafd0d1157af0:examples/grpo_gsm8k/gsm8k.yaml",
        _gsm8k(algorithm__name="grpo", job__dir="./checkpoints/Trinity-RFT-gsm8k/qwen2.5-1.5B-gsm8k",
               algorithm__clip_ratio_low=0.2)),
    "trinity-gspo-gsm8k.yaml": Example(
        f"{AGENTSCOPE}@29f34aa449edd00cd18ee633db2eb5eb18932ae2:examples/gspo_gsm8k/gsm8k.yaml",
        _gsm8k(algorithm__name="gspo", algorithm__clip_ratio_low=3e-4, algorithm__clip_ratio_high=4e-4,
               model__path="Qwen/Qwen2.5-1.5B-Instruct", algorithm__loss_agg_mode="seq-mean-token-mean")),
    "trinity-rloo-gsm8k.yaml": Example(
        f"{AGENTSCOPE}@312a3940a104b22726c7cbfb213cad582666bd70:examples/rloo_gsm8k/gsm8k.yaml",
        _gsm8k(algorithm__name="rloo")),
    "trinity-sapo-gsm8k.yaml": Example(
        f"{AGENTSCOPE}@0c34dfa778dc8ead169bfe40d0f639f6002bb79e:examples/sapo_gsm8k/gsm8k.yaml",
        _gsm8k(algorithm__name="sapo"),
        ("--set", "algorithm.policy_loss_fn_args.loss_agg_mode=seq-mean-token-mean"),
        ("the loss sapo is seq-mean-token-mean here, not token-mean",)),
    "trinity-dapo-math.yaml": Example(
        f"{AGENTSCOPE}@f3a198560ece82714a84b44e7dda2228d9c10b5c:examples/dapo_math/dapo.yaml", {
            "algorithm.name": "grpo", "algorithm.clip_ratio_low": 0.2, "algorithm.clip_ratio_high": 0.28,
            "algorithm.options.clip_ratio_c": 1e6, "algorithm.loss_agg_mode": "token-mean", "data.groups": 32,
            "data.group_size": 16, "algorithm.optimizer.warmup_steps": 20, "sync.interval": 16,
            "algorithm.kl_coef": None, "explorer.reward.equal_groups": "drop", "explorer.task_sets": [
                {"source": "datasets:open-r1/DAPO-Math-17k-Processed", "subset": "all", "prompt_key": "prompt",
                 "answer_key": "solution"}]},
        ("--model.path", "/models/m", "--without", "data_processor", "--explorer.reward.equal_groups", "drop",
         "--explorer.evaluation.every", "1"),
        ("TRINITY_MODEL_PATH, which is not set", "10 cannot be divided by 16", "explorer.reward.equal_groups drop")),
    "trinity-ppo-countdown.yaml": Example(
        f"{MODELSCOPE}@049b898540ca76bffaaa3cbb188deb94501379ed:examples/ppo_countdown/countdown.yaml", {
            "algorithm.name": "ppo", "critic.enabled": True, "data.groups": 96, "data.group_size": 5,
            "explorer.evaluation.every": 10, "sync.interval": 10, "explorer.epochs": 20, "explorer.task_sets": [
                {"source": "datasets:countdown_dataset/oneshot-split", "prompt_key": "question",
                 "answer_key": "answer", "chat": True}]},
        ("--without", "trainer.trainer_config", "--without", "trainer.ppo_max_token_len_per_gpu",
         "--set", "trainer.max_token_len_per_gpu=16384"),
        ("did you mean trainer.max_token_len_per_gpu", "--without trainer.trainer_config")),
    "trinity-lora-gsm8k.yaml": Example(
        f"{MODELSCOPE}@0cca2d9542e8c87b216c1da841a308dedd6f5207:examples/grpo_lora_gsm8k/gsm8k.yaml", {
            "model.lora.rank": 16, "model.lora.alpha": 16, "sync.method": "checkpoint", "explorer.epochs": 10,
            "explorer.evaluation.every": 10, "engine.options.max_token_len_per_gpu": 2560},
        ("--without", "trainer.trainer_config"), ("--without trainer.trainer_config",)),
    "prime-reverse-text.toml": Example(f"{PRIME}:examples/basic/reverse-text/rl.toml", {
        "data.groups": 8, "data.group_size": 16, "explorer.agent.environment": "verifiers:reverse-text-v1",
        "explorer.agent.options.agent.harness.id": "null", "trainer.total_steps": 20,
        "explorer.agent.options.agent.runtime.type": "subprocess", "algorithm.optimizer.lr": 3e-6,
        "explorer.sampling.max_tokens": 128, "engine.options.max_token_len_per_gpu": 2048,
        "explorer.reward.equal_groups": None}, GRPO, ("trainer.loss.type", "--algorithm.name grpo")),
    "prime-wiki-search.toml": Example(f"{PRIME}:examples/basic/wiki-search/rl.toml", {
        "data.groups": 32, "explorer.reward.equal_groups": "drop", "model.lora.rank": 8, "model.lora.targets": [
            "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "algorithm.optimizer.weight_decay": 0.0, "explorer.agent.environment": "verifiers:wiki-search-v1"},
        GRPO, ("--algorithm.name grpo",)),
    "prime-alphabet-sort.toml": Example(f"{PRIME}:examples/basic/alphabet-sort/rl.toml", {
        "data.groups": 16, "model.lora.rank": 32, "model.lora.alpha": 64, "model.gradient_checkpointing": True,
        "explorer.agent.options.taskset.min_turns": 3, "explorer.agent.options.taskset.max_turns": 5,
        "explorer.agent.options.taskset.task.power_per_turn": False}, GRPO, ("--algorithm.name grpo",)),
    "prime-hendrycks.toml": Example(f"{PRIME}:examples/basic/hendrycks-sanity/rl.toml", {
        "data.groups": 64, "data.group_size": 8, "engine.options.max_token_len_per_gpu": 16384,
        "explorer.agent.environment": "verifiers:math-env-v1", "explorer.evaluation.every": 50,
        "explorer.agent.options.taskset.dataset_subset": "default"}, GRPO, ("--algorithm.name grpo",)),
    "prime-math-30b.toml": Example(f"{PRIME}:examples/advanced/qwen3-30b-a3b/math.toml", {
        "sync.method": "nccl", "model.attn_implementation": "flash_attention_3", "trainer.save_interval": 100,
        "explorer.evaluation.every": 25, "data.groups": 512, "data.group_size": 8},
        (*GRPO, "--data.group_size", "8", "--without", "trainer.model.ep"),
        ("trainer.model.ep", "--engine.strategy megatron")),
    "prime-reverse-lora.toml": Example(f"{PRIME}:configs/ci/integration/reverse-text-lora/start.toml", {
        "model.lora.rank": 8, "algorithm.optimizer.lr": 5e-5, "trainer.total_steps": 15, "data.groups": 8},
        GRPO, ("--algorithm.name grpo",)),
    "trl-grpo-polaris.yaml": Example(f"{TRL}:docs/source/clis.md", {
        "data.groups": 4, "data.group_size": 8, "algorithm.mini_batches": 1, "explorer.epochs": 3,
        "trainer.save_interval": 500, "explorer.engine.kind": "transformers", "explorer.task_sets": [
            {"source": "datasets:HuggingFaceH4/Polaris-Dataset-53K", "split": "train"}]},
        (*CONSTANT, "--job.dir", "/runs/x"), ("--job.dir DIR",)),
    "trl-gspo-qwen3.sh": Example(f"{TRL}:examples/scripts/gspo.py", {
        "algorithm.name": "gspo", "algorithm.clip_ratio_low": 3e-4, "algorithm.clip_ratio_high": 4e-4,
        "data.groups": 8, "data.group_size": 8, "algorithm.mini_batches": 4, "model.lora.rank": 16,
        "model.lora.targets": ["q_proj,", "v_proj"], "trainer.save_interval": 125, "model.dtype": "bfloat16"},
        ("--set", "num_processes=1", "--trainer.total_steps", "500"), ("--set num_processes=N",)),
    "trl-continuous-batching.sh": Example(f"{TRL}:examples/scripts/grpo_continuous_batching.py", {
        "data.groups": 1, "data.group_size": 32, "model.lora.targets": "all-linear",
        "explorer.sampling.max_tokens": 1024},
        (*CONSTANT, "--set", "num_processes=4", "--model.lora.targets", "all-linear"),
        ("--model.lora.targets all-linear", "--set num_processes=N")),
}  # fmt: skip
"""By the names of their files."""

FREE = [name for name, example in EXAMPLES.items() if not example.refusal]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("CHECKPOINT_ROOT_DIR", "MODEL_PATH", "TASKSET_PATH"):
        monkeypatch.delenv(f"TRINITY_{name}", raising=False)
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)


def test_there_are_twenty_public_examples_and_each_has_its_own_source() -> None:
    assert {path.name for path in DATA.iterdir()} == set(EXAMPLES)
    assert len({example.source for example in EXAMPLES.values()}) == len(EXAMPLES) >= 20


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_public_example_becomes_a_job_that_trainer_and_explorer_read(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example, job = EXAMPLES[name], tmp_path / "job.toml"
    assert run(["import", str(DATA / name), "--to", str(job), *example.arguments]) == 0, (
        capsys.readouterr().err
    )
    written = flat(tomllib.loads(job.read_text()))
    assert {key: written.get(key) for key in example.expected} == example.expected
    assert load_config(str(job)).job.source == str(job)
    own = ("explorer.tasks", "explorer.task_sets", "explorer.agent.environment")
    tasks = () if any(key in written for key in own) else ("--explorer.tasks", "tasks.jsonl")
    kind = written["explorer.engine.kind"]
    server = () if kind == "transformers" else ("--explorer.engine.address", "http://x:1")
    assert load_file(str(job), (*tasks, *server)).explorer.engine.kind == kind


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in FREE])
def test_without_these_arguments_it_is_refused_and_says_which(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["import", str(DATA / name), "--to", str(tmp_path / "job.toml")]) == 78
    said = capsys.readouterr().err
    assert [words for words in EXAMPLES[name].refusal if words not in said] == []
    assert not (tmp_path / "job.toml").exists()
