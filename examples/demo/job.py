"""The demo's configuration files: a short imitation, then reinforcement with two asynchronous explorers."""

from pathlib import Path
from typing import Any

SFT_STEPS = 120
GRPO_STEPS = 60
GROUPS, GROUP_SIZE = 16, 8
EXPLORERS = ("e0", "e1")

Config = dict[str, Any]

_ENGINE: Config = {
    "name": "verl",
    "strategy": "fsdp2",
    "device": "cpu",
    "compute_dtype": "float32",
    "micro_batch_size": 64,
    "infer_micro_batch_size": 64,
}


def imitation(out: Path) -> Config:
    """Return the configuration of the stage that trains the start model."""
    optimizer = {"lr": 4e-3, "betas": [0.9, 0.99], "warmup_steps": 10, "schedule": "cosine"}
    return {
        "job": {"dir": str(out / "sft"), "seed": 1},
        "model": {"path": str(out / "base" / "model")},
        "engine": _ENGINE,
        "algorithm": {"name": "sft", "optimizer": optimizer},
        "data": {"groups": GROUPS, "group_size": GROUP_SIZE, "sft_path": str(out / "base" / "sft.jsonl")},
        "sync": {"dtype": "float32", "interval": SFT_STEPS},
        "trainer": {"nproc": 2, "total_steps": SFT_STEPS},
        "monitor": {"progress": "plain"},
    }


def reinforcement(out: Path, model: Path, engine: Config, steps: int) -> Config:
    """Return the configuration of the demo's main job.

    Args:
        out: Where everything is.
        model: What imitation has left.
        engine: What the explorers generate with, as `[explorer.engine]` takes it.
        steps: Of the trainer.
    """
    base = out / "base"
    return {
        "job": {"dir": str(out / "job"), "seed": 1},
        "model": {"path": str(model)},
        "engine": _ENGINE,
        "algorithm": {
            "name": "grpo",
            # Ratios against what explorers recorded: also right where a rollout is older than the model.
            "old_logprobs": "rollout",
            "optimizer": {"lr": 5e-4, "betas": [0.9, 0.99]},
        },
        "data": {"groups": GROUPS, "group_size": GROUP_SIZE, "max_age": 5},
        "sync": {"dtype": "float32", "style": "fully_async", "interval": 1},
        "trainer": {"nproc": 2, "total_steps": steps, "save_interval": 20, "start_daemon": False},
        "monitor": {"progress": "plain", "preview": 4},
        "explorer": {
            "tasks": str(base / "tasks.jsonl"),
            "groups": GROUPS // len(EXPLORERS),
            "engine": engine,
            "sampling": {"max_tokens": 4},
            "reward": {"function": "exact_match"},
            "evaluation": {"tasks": str(base / "held-out.jsonl"), "every": 20},
        },
        "daemon": {"keep_last": 3, "trash_grace": 5},
    }
