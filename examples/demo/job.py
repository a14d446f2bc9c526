"""The demos' configuration files: a short imitation, then reinforcement."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Demo:
    """What is learnt in a demo, and how.

    Args:
        teacher: What is said of those who are imitated.
        make: The program that makes model, demonstrations and tasks; it is beside what explorers import.
        sft_steps: Steps of imitation.
        steps: Steps of reinforcement.
        lr: The learning rate of reinforcement.
        groups: Groups of a step, of all explorers together.
        ranks: Ranks of the trainer.
        explorers: Their names.
        explorer: The further keys of `[explorer]`.
        server: Options of a vLLM server.
        samples: Samples of each held-out task at temperature 1.
        least_rise: By how much the reward must rise.
    """

    teacher: str
    make: str
    sft_steps: int
    steps: int
    lr: float
    groups: int
    ranks: int
    explorers: Sequence[str]
    explorer: Config
    server: Sequence[str]
    samples: int
    least_rise: float = 0.0

    group_size = 8


GREEDY, SAMPLED = "greedy", "sampled"
"""The evaluation sets: the most probable answer to each held-out task, and several samples at temperature 1."""

SUMS = Demo(
    teacher="it imitates a teacher who forgets to carry in 60 of 100 cases",
    make="examples/arithmetic/make.py",
    sft_steps=240,
    steps=60,
    lr=1e-4,
    groups=16,
    ranks=2,
    explorers=("e0", "e1"),
    explorer={
        "tasks": "base/tasks.jsonl",
        "sampling": {"max_tokens": 4},
        "reward": {"function": "exact_match"},
    },
    server=("--max-model-len", "32"),
    samples=8,
)

AGENTS = Demo(
    teacher="it imitates a teacher who guesses in half of the cases instead of calling the tool",
    make="examples/calculator/make.py",
    sft_steps=150,
    steps=24,
    lr=5e-4,
    groups=8,
    ranks=1,
    explorers=("e0",),
    explorer={
        "tasks": "base/tasks.jsonl",
        "sampling": {"max_tokens": 24},
        "agent": {"function": "calculator_agent:run", "concurrency": 8, "timeout": 120.0},
        "gateway": {"directory": "gateway", "max_turns": 3},
    },
    # The gateway needs the version of each token.
    server=("--max-model-len", "128", "--enable-scale-out"),
    samples=2,
    least_rise=0.2,
)

_ENGINE: Config = {
    "name": "verl",
    "strategy": "fsdp2",
    "device": "cpu",
    "compute_dtype": "float32",
    "micro_batch_size": 64,
    "infer_micro_batch_size": 64,
}


def imitation(demo: Demo, out: Path, seed: int) -> Config:
    """Return the configuration of the stage that trains the start model."""
    optimizer = {"lr": 4e-3, "betas": [0.9, 0.99], "warmup_steps": 10, "schedule": "cosine"}
    return {
        "job": {"dir": str(out / "sft"), "seed": seed},
        "model": {"path": str(out / "base" / "model")},
        "engine": _ENGINE,
        "algorithm": {"name": "sft", "optimizer": optimizer},
        "data": {"groups": 16, "group_size": 8, "sft_path": str(out / "base" / "sft.jsonl")},
        "sync": {"dtype": "float32", "interval": demo.sft_steps},
        "trainer": {"nproc": 2, "total_steps": demo.sft_steps},
        "monitor": {"progress": "plain"},
    }


def reinforcement(demo: Demo, out: Path, model: Path, engine: Config, steps: int, seed: int) -> Config:
    """Return the configuration of the demo's main job.

    Args:
        demo: The demo.
        out: Where everything is.
        model: What imitation has left.
        engine: What the explorers generate with, as `[explorer.engine]` takes it.
        steps: Of the trainer.
        seed: Of the order of tasks.
    """
    return {
        "job": {"dir": str(out / "job"), "seed": seed},
        "model": {"path": str(model)},
        "engine": _ENGINE,
        "algorithm": {
            "name": "grpo",
            # Ratios against what explorers recorded: also right where a rollout is older than the model.
            "old_logprobs": "rollout",
            "optimizer": {"lr": demo.lr, "betas": [0.9, 0.99]},
        },
        "data": {"groups": demo.groups, "group_size": demo.group_size, "max_age": 5},
        "sync": {"dtype": "float32", "style": "fully_async", "interval": 1},
        "trainer": {"nproc": demo.ranks, "total_steps": steps, "save_interval": 20, "start_daemon": False},
        "monitor": {"progress": "plain", "preview": 4},
        "explorer": {
            **demo.explorer,
            "groups": demo.groups // len(demo.explorers),
            "engine": engine,
            "evaluation": {"sets": _held_out(demo, steps)},
        },
        "daemon": {"keep_last": 3, "trash_grace": 5},
    }


def _held_out(demo: Demo, steps: int) -> Config:
    """Return the evaluation sets, measured at the start, at the end, and about twice between."""
    tasks = {"tasks": "base/held-out.jsonl", "every": max(steps // 3, 1)}
    return {GREEDY: tasks, SAMPLED: {**tasks, "samples": demo.samples, "temperature": 1.0}}
