"""`make demo` with its explorers behind a slow link: whether the model learns, and from how stale rollouts.

    python benchmarks/mirror_learning.py [--steps 60] [--rate 1000000] [--round-trip 0.08] [--demo DIR] [--json FILE]

The trainer's end pushes to moto's S3 (`make test-mirror` installs moto); the explorers' end pulls from it, and passes
experiences back, over a link of so many bytes a second each way and such a round trip.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "demo"))

import job as demo_job  # type: ignore[import-not-found]
import report
import run as demo  # type: ignore[import-not-found]
import tomli_w
from processes import ROOT, Processes  # type: ignore[import-not-found]
from support.s3 import environment_of, running_s3
from support.slow_link import SlowLink

from syncd.protocol.layout import Job
from syncd.protocol.version import read_version
from trainer.monitors.jsonl import read_history

STORE = "s3://weights/job"
_STUCK = 900.0


def main() -> None:
    """Run it, and print or write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=1e6, help="bytes a second, each way")
    parser.add_argument("--round-trip", type=float, default=0.08, help="seconds")
    parser.add_argument(
        "--demo", dest="before", type=Path, help="an earlier run of the demo, to begin with its model"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "mirror-learning")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.demo, options.out = demo_job.SUMS, options.out.absolute()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    load = os.getloadavg()[0]
    _run(options)
    figures = _figures(options, load)
    print(json.dumps(figures, indent=2))
    if options.json:
        report.keep(options.json, figures)


def _run(options: argparse.Namespace) -> None:
    with running_s3() as url, Processes(options.out) as processes:
        link = SlowLink(int(url.rpartition(":")[2]), options.rate, options.round_trip)
        model = _imitated(processes, options)
        with link.running():
            _explore(processes, options, model, url, f"http://127.0.0.1:{link.port}")


def _figures(options: argparse.Namespace, load: float) -> dict[str, Any]:
    """Return what a run has left.

    Args:
        load: Of the machine at its start.
    """
    logs = {end: _events(options.out / f"{end}.log") for end in ("push", "pull")}
    return {
        "link": {"bytes_a_second": options.rate, "round_trip": options.round_trip},
        "machine": report.machine(options.out),
        "load": load,
        **_learned(options.out),
        "versions_pulled": sum(one["event"] == "mirror_version_published" for one in logs["pull"]),
        "bytes_pulled": sum(one.get("sent", 0) for one in logs["pull"]),
        "mirror_seconds_p50": {end: _published_in(events) for end, events in logs.items()},
    }


def _imitated(processes: Processes, options: argparse.Namespace) -> Path:
    """Return the directory of the model to start from."""
    if options.before is None:
        return Path(demo.imitate(processes, options))
    for name in ("base", "sft"):
        shutil.copytree(options.before.absolute() / name, options.out / name)
    return Path(options.out / "sft" / f"global_step_{options.demo.sft_steps}" / "actor")


def _explore(processes: Processes, options: argparse.Namespace, model: Path, url: str, slow_url: str) -> None:
    """Run the job to its end: what explorers do at the far end, and all else here."""
    told = demo_job.reinforcement(
        options.demo, options.out, model, {"kind": "transformers"}, options.steps, options.seed
    )
    near, far = options.out / "job", options.out / "far"
    configs = {}
    for place in (near, far):
        place.mkdir()
        configs[place] = options.out / f"{place.name}.toml"
        configs[place].write_text(tomli_w.dumps({**told, "job": {**told["job"], "dir": str(place)}}))
    processes.start("daemon", [*demo.SYNCD, "watch", str(near), "--config", str(configs[near])])
    processes.start("trainer", [*demo.TRAINER, "train", str(configs[near])])
    mirror = [*demo.SYNCD, "mirror", "--experiences", "--log-format", "json"]
    processes.start("push", [*mirror, str(near), STORE], environment_of(url))
    processes.start("pull", [*mirror, STORE, str(far)], environment_of(slow_url))
    beside = {"PYTHONPATH": f"{ROOT}:{(ROOT / options.demo.make).parent}"}
    for name in options.demo.explorers:
        processes.start(name, [*demo.EXPLORER, "run", str(configs[far]), "--name", name], beside)
    processes.wait("trainer", _STUCK, near / "metrics.jsonl")
    processes.until(lambda: _pair(far) == _pair(near), _STUCK, "the last version to arrive")
    for place in (near, far):
        subprocess.run([*demo.SYNCD, "status", str(place)], check=True)


def _pair(place: Path) -> Any:
    version = read_version(Job.at(str(place)))
    return version.pair if version else None


def _learned(out: Path) -> dict[str, Any]:
    """Return rewards and staleness of the trainer's steps."""
    history = read_history(str(out / "job" / "metrics.jsonl"))
    rewards = history.series("critic/score/mean")[1]
    ages, oldest = (history.series(f"experience/{name}")[1] for name in ("age_mean", "age_max"))
    name = demo_job.SUMS.explorers[0]
    lines = (out / "far" / "explorers" / name / "evaluations.jsonl").read_text().splitlines()
    greedy = [line for line in map(json.loads, lines) if line["set"] == demo_job.GREEDY]
    return {
        "steps": len(rewards),
        "reward_first_10": round(statistics.fmean(rewards[:10]), 3),
        "reward_last_10": round(statistics.fmean(rewards[-10:]), 3),
        "held_out": [{key: line[key] for key in ("step", "reward", "reward_stderr")} for line in greedy],
        "staleness_mean": round(statistics.fmean(ages), 2),
        "staleness_max": max(oldest),
        "dropped": history.series("experience/dropped")[1][-1],
    }


def _events(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


def _published_in(events: list[dict[str, Any]]) -> float:
    """Return the median of the seconds from when a mirror saw a version to when it had published it."""
    seconds: list[float | None] = [
        one["seconds"] for one in events if one["event"] == "mirror_version_published"
    ]
    return round(statistics.median(second for second in seconds if second is not None), 3)


if __name__ == "__main__":
    main()
