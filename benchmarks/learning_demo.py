"""Collects what runs of `make demo` have learned: the reward of each step, and the held-out tasks before and after.

python examples/demo/run.py --seed 2 --out out/demo-2
python benchmarks/learning_demo.py 1=out/demo 2=out/demo-2 [--json out/learning_demo.json]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import report

from trainer.monitors.jsonl import read_history


def main() -> None:
    """Write the figures of each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="SEED=DIR", help="directories that the demo has written")
    parser.add_argument("--json", default="out/learning_demo.json")
    options = parser.parse_args()
    runs = [_run(*run.split("=", 1)) for run in options.runs]
    report.keep(options.json, {"command": "python examples/demo/run.py --seed SEED", "runs": runs})


def _run(seed: str, out: str) -> dict[str, Any]:
    job = Path(out) / "job"
    steps, rewards = read_history(f"{job}/metrics.jsonl").series("critic/score/mean")
    if steps != list(range(1, len(steps) + 1)):
        raise SystemExit(f"{job} has no reward of some steps")
    lines = (job / "explorers" / "e0" / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    return {
        "seed": int(seed),
        "rewards": rewards,
        "held_out": _held_out([json.loads(line) for line in lines]),
    }


def _held_out(measured: list[dict[str, Any]]) -> dict[str, list[dict[str, float]]]:
    """Return the reward of each version by the name of the set."""
    return {
        name: [
            {"step": line["step"], "reward": line["reward"], "stderr": line["reward_stderr"]}
            for line in measured
            if line["set"] == name
        ]
        for name in sorted({line["set"] for line in measured})
    }


if __name__ == "__main__":
    main()
