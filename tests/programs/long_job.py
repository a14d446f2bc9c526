"""Runs a real job for an hour or more, with faults, and takes the pictures of its page for docs/observe.md.

    PYTHONPATH=.:tests:examples/demo python tests/programs/long_job.py /ckpt/team out/pictures --minutes 80

The job is that of `make demo-agents`, with a slow tool, so that two cores are enough for hours: a trainer, three
explorers with their gateways, a daemon and a stand-by. An explorer is killed and comes back, the daemon is killed,
and another explorer is killed for good. Beside it are the job of the imitation, which is finished, and an empty one.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import job
import tomli_w
from job import AGENTS
from processes import ROOT, Processes

JOB, SFT, EMPTY = "calculator-grpo", "calculator-sft", "next-run"
EXPLORERS = ("e0", "e1", "e2")
SEED = 1
MODULES = {
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "examples/calculator", ROOT / "tests/programs")))
}
SYNCD, TRAINER, EXPLORER = (
    [sys.executable, "-P", "-m", module] for module in ("syncd", "trainer", "explorer_hooks")
)
Deed = tuple[float, Callable[[], None]]
"""When, as a share of the time, and what is done then."""


class LongJob:
    """The processes of the job.

    Args:
        processes: Starts them.
        place: The directory of all jobs.
    """

    def __init__(self, processes: Processes, place: Path) -> None:
        self._processes, self.place = processes, place
        self._config = str(place / "grpo.toml")

    def imitate(self) -> None:
        """Train the model to start from."""
        make = [sys.executable, str(ROOT / AGENTS.make), str(self.place / "base"), "--seed", str(SEED)]
        self._processes.start("make", [*make, "--held-out", "40"])
        self._processes.wait("make", 600)
        config = job.imitation(AGENTS, self.place, SEED)
        config["job"]["dir"] = str(self.place / SFT)
        written(self.place / "sft.toml", config)
        self._processes.start("sft", [*TRAINER, "train", str(self.place / "sft.toml")])
        self._processes.wait("sft", 600, self.place / SFT / "metrics.jsonl")

    def begin(self) -> None:
        """Start everything."""
        model = self.place / SFT / f"global_step_{AGENTS.sft_steps}" / "actor"
        written(Path(self._config), configured(self.place, model))
        for name in (JOB, EMPTY):
            (self.place / name).mkdir()
        for daemon in ("daemon", "stand-by"):
            self._processes.start(daemon, [*SYNCD, "watch", str(self.place / JOB), "--config", self._config])
            time.sleep(2)
        self._processes.start("trainer", [*TRAINER, "train", self._config])
        for name in EXPLORERS:
            self.explore(name)

    def explore(self, name: str) -> None:
        """Start an explorer."""
        journal = ["--explorer.gateway.directory", str(self.place / f"gateway-{name}")]
        self._processes.start(name, [*EXPLORER, "run", self._config, "--name", name, *journal], MODULES)

    def kill(self, name: str) -> None:
        """Kill a process, and what it has started."""
        print(f"{time.strftime('%X')} SIGKILL for {name}", flush=True)
        os.killpg(self._processes.running.pop(name).pid, signal.SIGKILL)


def configured(place: Path, model: Path) -> dict[str, Any]:
    """Return the demo's configuration with three explorers, a slow tool, and no end."""
    config = job.reinforcement(AGENTS, place, model, {"kind": "transformers"}, 100_000, SEED)
    config["job"]["dir"] = str(place / JOB)
    config["algorithm"]["optimizer"]["lr"] = 2e-4
    config["data"] |= {"groups": 6, "consumed": "archive"}
    config["explorer"]["agent"] |= {"function": "paced_agent:run", "concurrency": 12}
    config["explorer"]["groups"] = 2
    config["explorer"]["evaluation"]["sets"] = {job.GREEDY: {"tasks": "base/held-out.jsonl", "every": 10}}
    return config


def written(path: Path, config: dict[str, Any]) -> None:
    """Write a job file."""
    path.write_text(tomli_w.dumps(config))


def pictures(place: Path, out: Path, names: Iterable[str]) -> None:
    """Take pictures of the page as it is now."""
    program = Path(__file__).with_name("page_of_job.py")
    taken = subprocess.run([sys.executable, program, place / JOB, out, *names], check=False)
    if taken.returncode:
        print(
            f"no pictures of {', '.join(names)}: take them by page_of_job.py while the job runs", flush=True
        )


def schedule(run: LongJob, out: Path) -> Iterable[Deed]:
    """Return what happens to the job."""
    shoot = lambda *names: pictures(run.place, out, names)  # noqa: E731
    return [
        (0.35, lambda: run.kill("e1")),
        (0.42, lambda: run.explore("e1")),
        (0.60, lambda: run.kill("daemon")),
        (0.90, lambda: run.kill("e2")),
        (0.94, lambda: shoot("top", "lanes", "rollouts", "phones")),
        (0.98, lambda: run.kill("stand-by")),
        (1.00, lambda: shoot("dead-daemon", "jobs")),
    ]


def main() -> None:
    """Run the job and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("place", type=Path, help="the directory of all jobs; removed first")
    parser.add_argument("out", type=Path, help="where the pictures go")
    parser.add_argument("--minutes", type=float, default=80)
    options = parser.parse_args()
    shutil.rmtree(options.place, ignore_errors=True)
    options.place.mkdir(parents=True)
    with Processes(options.place) as processes:
        run = LongJob(processes, options.place)
        run.imitate()
        run.begin()
        follow_schedule(schedule(run, options.out), options.minutes * 60)


def follow_schedule(deeds: Iterable[Deed], seconds: float) -> None:
    """Do each deed at its time."""
    began = time.monotonic()
    for share, deed in deeds:
        time.sleep(max(0.0, began + share * seconds - time.monotonic()))
        deed()


if __name__ == "__main__":
    main()
