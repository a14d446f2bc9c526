"""Does it learn tasks of reasoning_gym? Three generators at once, SFT and then GRPO, by the real commands.

    python benchmarks/learning_tasks.py [--seeds 1 2 3] [--steps 50] [--out out/learning-tasks]

For each seed `trainer stages` makes a little model imitate a careless teacher, whose answers are wrong in 40 of 100
cases, and then trains it on the rollouts of `explorer run`, which waits for every version. The explorer takes three
sets of tasks of equal weights, and scores them as reasoning_gym does. All of it on CPU. Exits with 1 if in no set the
reward rises beyond the noise of the seeds. Runs that are finished are not run again: remove OUT to begin anew.
"""

import argparse
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from explorer_hooks.tasks.sources import open_tasks
from syncd.jobfile.task_sets import TaskSetSection
from syncd.observe import log

ROOT = Path(__file__).resolve().parents[1]

SETS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "basic_arithmetic": {
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 1,
        "operators": ["+", "-"],
        "allow_parentheses": False,
        "allow_negation": False,
    },
    "gcd": {"min_value": 1, "max_value": 20},
}
"""Generators with their settings: problems of one or two digits."""

PHRASES = (
    "State the final answer to the following arithmetic problem: ",
    "Calculate ",
    "Find the Greatest Common Divisor (GCD) of these numbers: ",
    ". Give only the GCD as your final answer.",
)
"""What prompts have in common is one token each; anything else is a token a character."""

CHARACTERS = "0123456789+-=,. "
PAD, END, UNKNOWN = "<pad>", "<end>", "<unknown>"

SIZE, DEMONSTRATIONS, SLOPPINESS = 300, 20000, 0.4
GROUPS, GROUP_SIZE = 24, 8
SFT_STEPS = 160
FIRST, LAST = 5, 10
"""Steps whose mean is the reward at the start, and at the end."""

LIMIT = 3600.0
_ENDING = 60.0

Curves = Mapping[str, Sequence[float]]
"""The mean reward of each step by set."""


def main() -> int:
    """Run what is not finished, print the table, and return 0 if a set rose beyond the noise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=50, help="of GRPO")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "learning-tasks")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what runs is ended on the way out
    log.configure("warning", sys.stderr)
    found = {
        seed: finished(options.out.absolute() / f"seed-{seed}", seed, options.steps) for seed in options.seeds
    }
    print(report(found))
    return 0 if any(is_beyond_noise(rises_of(found, name)) for name in SETS) else 1


def finished(place: Path, seed: int, steps: int) -> Curves:
    """Return the curves of a run, after running it unless that has been done."""
    kept = place / "curves.json"
    if not kept.exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        begin = time.monotonic()
        make_model(place / "model", seed)
        make_demonstrations(place / "sft.jsonl", seed)
        (place / "job.toml").write_text(tomli_w.dumps(configuration(place, seed, steps)))
        run(place)
        kept.write_text(json.dumps(curves_of(place / "job" / "grpo", steps)) + "\n")
        print(f"seed {seed}: {time.monotonic() - begin:.0f} s", flush=True)
    curves: dict[str, list[float]] = json.loads(kept.read_text())
    return curves


def task_set(name: str, seed: int) -> dict[str, Any]:
    """Return the table of a set."""
    return {"source": f"reasoning_gym:{name}", "size": SIZE, "seed": seed, "options": SETS[name]}


def make_model(directory: Path, seed: int) -> None:
    """Write an untrained model and its tokenizer."""
    vocabulary = {token: number for number, token in enumerate((PAD, END, UNKNOWN, *PHRASES, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    escaped = [phrase.replace(".", "\\.").replace("(", "\\(").replace(")", "\\)") for phrase in PHRASES]
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*escaped, "."])), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call] # transformers types little
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, padding_side="left"
    )
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32,
        initializer_range=0.08,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(directory)  # type: ignore[no-untyped-call]
    fast.save_pretrained(directory)


def make_demonstrations(path: Path, seed: int) -> None:
    """Write the demonstrations of a careless teacher: wrong answers are off by one or two."""
    chance = random.Random(seed)
    tasks = open_tasks(
        [TaskSetSection.model_validate({**task_set(name, seed), "weight": 1.0}) for name in SETS]
    )
    with path.open("w") as file:
        for task in chance.choices(list(tasks), k=DEMONSTRATIONS):
            slip = chance.choice((-2, -1, 1, 2)) if chance.random() < SLOPPINESS else 0
            row = {"prompt": task.prompt, "response": str(int(task.answer) + slip)}
            file.write(json.dumps(row) + "\n")


def configuration(place: Path, seed: int, steps: int) -> dict[str, Any]:
    """Return the job's file."""
    adam = {"betas": [0.9, 0.99]}
    imitation = {"lr": 4e-3, **adam, "warmup_steps": 10, "schedule": "cosine"}
    return {
        "job": {"dir": str(place / "job"), "seed": seed},
        "model": {"path": str(place / "model")},
        "engine": {
            "name": "verl",
            "strategy": "fsdp2",
            "device": "cpu",
            "compute_dtype": "float32",
            "micro_batch_size": 96,
            "infer_micro_batch_size": 192,
        },
        "algorithm": {"name": "grpo", "old_logprobs": "rollout", "optimizer": {"lr": 5e-4, **adam}},
        "data": {"groups": GROUPS, "group_size": GROUP_SIZE, "sft_path": str(place / "sft.jsonl")},
        "sync": {"dtype": "float32", "style": "fixed", "interval": 1},
        "trainer": {"nproc": 1},
        "monitor": {"progress": "plain"},
        "stages": [
            {
                "name": "sft",
                "algorithm": {"name": "sft", "optimizer": imitation},
                "sync": {"interval": SFT_STEPS},
                "trainer": {"total_steps": SFT_STEPS},
            },
            {"name": "grpo", "trainer": {"total_steps": steps}},
        ],
        "explorer": {
            "name": "e0",
            "task_sets": [{**task_set(name, seed), "weight": 1.0} for name in SETS],
            "sampling": {"max_tokens": 4},
            "engine": {"rows": GROUPS * GROUP_SIZE},
        },
    }


def run(place: Path) -> None:
    """Run trainer and explorer until the training has ended; none of them is left behind."""
    job = str(place / "job.toml")
    commands = {
        "trainer": ["trainer", "stages", job],
        "e0": ["explorer_hooks", "run", job, "--stage", "grpo"],
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in commands.items():
            with (place / f"{name}.log").open("ab") as log:
                words = [sys.executable, "-P", "-m", *command]
                running[name] = subprocess.Popen(words, stdout=log, stderr=log, env=environment)
        end = time.monotonic() + LIMIT
        while running["trainer"].poll() is None and not running["e0"].poll() and time.monotonic() < end:
            time.sleep(0.5)
        if running["trainer"].poll() != 0 or running["e0"].wait(_ENDING):
            sys.exit(f"the run did not end well: see the logs in {place}")
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait(_ENDING)


def curves_of(job: Path, steps: int) -> Curves:
    """Return the mean reward of each step by set, from what the explorer recorded of each batch.

    Raises:
        ValueError: Batches are missing.
    """
    lines = [
        json.loads(line) for line in (job / "explorers" / "e0" / "metrics.jsonl").read_text().splitlines()
    ]
    if len(lines) < steps:
        raise ValueError(f"{job} has {len(lines)} of {steps} batches")
    return {name: [line["task_sets"][name]["reward"] for line in lines[:steps]] for name in SETS}


def rises_of(found: Mapping[int, Curves], name: str) -> list[float]:
    """Return by how much the reward of a set has risen in each seed."""
    return [
        statistics.fmean(curves[name][-LAST:]) - statistics.fmean(curves[name][:FIRST])
        for curves in found.values()
    ]


def is_beyond_noise(rises: Sequence[float]) -> bool:
    """Return whether the mean rise is more than two standard errors of the seeds above zero."""
    return len(rises) > 1 and statistics.fmean(rises) > error_of(rises)


def error_of(rises: Sequence[float]) -> float:
    """Return two standard errors of the seeds."""
    return 2 * statistics.stdev(rises) / math.sqrt(len(rises)) if len(rises) > 1 else math.inf


def report(found: Mapping[int, Curves]) -> str:
    """Return the figures as Markdown."""
    lines = [
        "| set | " + " | ".join(f"seed {seed}" for seed in found) + " | mean rise | two standard errors | |"
    ]
    lines.append("|---" * (len(found) + 4) + "|")
    for name in SETS:
        rises = rises_of(found, name)
        cells = [
            f"{statistics.fmean(one[name][:FIRST]):.3f} to {statistics.fmean(one[name][-LAST:]):.3f}"
            for one in found.values()
        ]
        verdict = "beyond the noise" if is_beyond_noise(rises) else "not beyond it"
        lines.append(
            f"| `{name}` | {' | '.join(cells)} | {statistics.fmean(rises):+.3f} | {error_of(rises):.3f} | {verdict} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
