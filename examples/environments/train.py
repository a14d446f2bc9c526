"""Trains on each of the three environments, by the real commands: does the reward rise?

    python examples/environments/train.py [NAME ...] [--seeds 1] [--steps 50] [--python PYTHON] [--out OUT]

Two little models imitate careless teachers, one of sums and one of the calculator. From there GRPO trains on each
environment: one rank on the CPU, and one explorer with the model in its own process that waits for each version. Runs
of other seeds begin with the same models. Runs that are finished are not run again: remove OUT to begin anew. PYTHON
has verifiers, unless this interpreter has it.
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import tomli_w

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples" / "demo"), str(ROOT / "examples" / "calculator")]

from calculator_model import make_model  # noqa: E402 - of the examples beside this one
from calls import demonstrations  # noqa: E402
from processes import FailedError, Processes  # noqa: E402

HERE = Path(__file__).resolve().parent
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "sums": {"environment": "verifiers:sums"},
    "calculator": {"environment": "verifiers:calculator", "options": {"agent": {"max_turns": 3}}},
    "ranked": {
        "environment": "verifiers:ranked+sums",
        "episode": "group",
        "options": {"attempts": 8, "max_concurrent_agents": 8},
    },
}
SCORE = "reward/parts/right"
"""What is compared: the share of right answers. Ranks have the same mean in each step."""

GROUPS, GROUP_SIZE, SFT_STEPS = 8, 8, 150
LIMIT, SLOPPINESS = 10, 0.4
"""Operands of sums are below this, as in `sums.py`, and this share of the demonstrations is wrong."""

_LIMIT = 3600.0

TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Returns the value of a sum or a product.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"title": "Expression", "type": "string"}},
            "required": ["expression"],
            "title": "calculateArguments",
        },
    },
}
"""The tool as verifiers describes it to the model: demonstrations have the same."""


def main() -> int:
    """Train, print the table, and return 1 if a process failed."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        found = {seed: _seed(options, seed) for seed in options.seeds}
    except FailedError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    print(_report(found))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(ENVIRONMENTS)}; all unless given"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--python", default="", help="the interpreter that has verifiers")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "environments")
    options = parser.parse_args()
    if unknown := set(options.names) - set(ENVIRONMENTS):
        parser.error(f"{min(unknown)} is none of {', '.join(ENVIRONMENTS)}")
    options.out, options.names = options.out.absolute(), options.names or list(ENVIRONMENTS)
    return options


def _seed(options: argparse.Namespace, seed: int) -> dict[str, list[float]]:
    """Return the share of right answers of each step of each environment."""
    found = {}
    for name in options.names:
        kept = options.out / f"{name}-{seed}.json"
        if not kept.exists():
            model = _imitated(options.out, "calculator" if name == "calculator" else "sums")
            kept.write_text(json.dumps(_train(options, options.out / f"{name}-{seed}", name, model, seed)))
        found[name] = json.loads(kept.read_text())
    return found


def _imitated(out: Path, kind: str) -> Path:
    """Return a model that imitates the teacher of a kind of task."""
    place, made = (
        out / f"{kind}-teacher",
        out / f"{kind}-teacher" / "job" / f"global_step_{SFT_STEPS}" / "actor",
    )
    if made.exists():
        return made
    place.mkdir(exist_ok=True)
    rows = _sums(12000) if kind == "sums" else _calls(12000)
    (place / "sft.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    make_model(place / "model", 1, [row["messages"] for row in rows[:500]], tied=True, tool=TOOL)
    optimizer = {"lr": 4e-3, "betas": [0.9, 0.99], "warmup_steps": 10, "schedule": "cosine"}
    config = _config(place / "job", place / "model", 1, SFT_STEPS) | {
        "algorithm": {"name": "sft", "optimizer": optimizer},
        "data": {"groups": 16, "group_size": 8, "sft_path": str(place / "sft.jsonl")},
        "sync": {"dtype": "float32", "interval": SFT_STEPS},
    }
    with Processes(place) as processes:
        processes.start("imitation", _trainer(place / "sft.toml", config))
        processes.wait("imitation", _LIMIT)
    return made


def _calls(count: int) -> list[dict[str, Any]]:
    return [{"messages": messages, "tools": [TOOL]} for messages in demonstrations(1, count)]


def _sums(count: int) -> list[dict[str, Any]]:
    chooser, found = random.Random(1), []
    for _ in range(count):
        left, right = chooser.randrange(LIMIT), chooser.randrange(LIMIT)
        slip = chooser.choice((-10, -1, 1, 10)) if chooser.random() < SLOPPINESS else 0
        asked, answer = f"{left}+{right}=", str(max(0, left + right + slip))
        found.append(
            {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
        )
    return found


def _train(options: argparse.Namespace, place: Path, name: str, model: Path, seed: int) -> list[float]:
    """Train on an environment, and return the share of right answers of each step."""
    place.mkdir(exist_ok=True)
    agent = {**ENVIRONMENTS[name], "python": options.python, "concurrency": 16, "timeout": 120.0}
    config = _config(place / "job", model, seed, options.steps) | {
        "algorithm": {
            "name": "grpo",
            "old_logprobs": "rollout",
            "optimizer": {"lr": 5e-4, "betas": [0.9, 0.99]},
        },
        "data": {"groups": GROUPS, "group_size": GROUP_SIZE},
        "sync": {"dtype": "float32", "style": "fixed", "interval": 1},
        "explorer": {
            "agent": agent,
            "sampling": {"max_tokens": 32},
            "gateway": {"directory": str(place / "gateway")},
        },
        "daemon": {"keep_last": 3, "trash_grace": 5},
    }
    (place / "job").mkdir(exist_ok=True)
    began = time.monotonic()
    with Processes(place) as processes:
        processes.start("trainer", _trainer(place / "job.toml", config))
        explorer = [
            sys.executable,
            "-P",
            "-m",
            "explorer_hooks",
            "run",
            str(place / "job.toml"),
            "--name",
            "e0",
        ]
        processes.start("e0", explorer, {"PYTHONPATH": f"{ROOT}:{HERE}"})
        processes.wait("trainer", _LIMIT)
        processes.wait("e0", _LIMIT)
    print(f"seed {seed}, {name}: {time.monotonic() - began:.0f} s", flush=True)
    lines = (place / "job" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["metrics"][SCORE] for line in lines]


def _config(job: Path, model: Path, seed: int, steps: int) -> dict[str, Any]:
    return {
        "job": {"dir": str(job), "seed": seed},
        "model": {"path": str(model)},
        "engine": {
            "name": "verl",
            "strategy": "fsdp2",
            "device": "cpu",
            "compute_dtype": "float32",
            "micro_batch_size": 64,
            "infer_micro_batch_size": 64,
        },
        "trainer": {"nproc": 1, "total_steps": steps},
        "monitor": {"progress": "plain"},
    }


def _trainer(path: Path, config: dict[str, Any]) -> list[str]:
    path.write_text(tomli_w.dumps(config))
    return [sys.executable, "-P", "-m", "trainer", "train", str(path)]


def _report(found: dict[int, dict[str, list[float]]]) -> str:
    """Return a table: the share of right answers in the first and in the last ten steps."""
    lines = ["| environment | seed | first 10 steps | last 10 steps | rise |", "|---|---|---|---|---|"]
    for seed, runs in found.items():
        for name, shares in runs.items():
            first, last = statistics.fmean(shares[:10]), statistics.fmean(shares[-10:])
            lines.append(f"| {name} | {seed} | {first:.3f} | {last:.3f} | {last - first:+.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
