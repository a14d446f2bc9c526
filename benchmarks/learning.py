"""Does it learn? SFT, then GRPO on arithmetic, by the real commands: on-policy, and asynchronous with two explorers.

    python benchmarks/learning.py [--seeds 1 2 3] [--steps 150] [--critic] [--lora] [--no-async]
        [--out out/learning] [--png PNG]

For each seed `trainer stages` makes a little model imitate demonstrations and then trains it on rollouts of one
explorer that waits for every version. From the same imitation `trainer train` trains once more, on rollouts of
two explorers that wait for nobody (not with `--no-async`). With `--critic` PPO trains it with a critic, and with
`--lora` GRPO trains an adapter beside it, each on rollouts of one explorer that waits for every version. All of it
on CPU, 2 ranks, verl's FSDP2. Exits with 1 where a target that `learning_report.py` fixes is missed. Runs that are
finished are not run again: remove OUT to begin anew.
"""

import argparse
import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from learning_report import ASYNC, LORA, ON_POLICY, PPO, Figures, draw, figures_of, report

ROOT = Path(__file__).resolve().parents[1]
ARITHMETIC = ROOT / "examples" / "arithmetic"
GROUPS, GROUP_SIZE = 16, 8
SFT_STEPS = 160
AHEAD = 1
"""Steps for which batches of the asynchronous explorers may wait, besides the step that comes next."""

LIMIT = 3600.0
"""Seconds that one run may take."""

_ENDING = 60.0

Config = dict[str, Any]

SETTINGS: Config = {
    "job": {},
    "model": {},
    "engine": {
        "name": "verl",
        "strategy": "fsdp2",
        "device": "cpu",
        "compute_dtype": "float32",
        "micro_batch_size": 64,
        "infer_micro_batch_size": 64,
    },
    "algorithm": {
        "name": "grpo",
        # Ratios against what the explorer recorded: also right where the rollout is older than the model.
        "old_logprobs": "rollout",
        "optimizer": {"lr": 5e-4, "betas": [0.9, 0.99]},
    },
    "data": {"groups": GROUPS, "group_size": GROUP_SIZE},
    "sync": {"dtype": "float32", "style": "fixed", "interval": 1},
    "trainer": {"nproc": 2},
    "monitor": {"progress": "plain"},
}
"""What all runs share."""

CRITIC: Config = {
    "enabled": True,
    "warmup_steps": 5,
    "optimizer": {"lr": 1e-3, "betas": [0.9, 0.99]},
}
"""The critic starts from the imitation, with a random head, and learns alone for five steps."""

ADAPTER: Config = {"rank": 8, "alpha": 16}
ADAPTER_RATE = 2e-3
"""The adapter is beside all linear layers but the head, and its learning rate four times that of whole weights."""


def main() -> int:
    """Run what is not finished, print the table, and return 0 if all targets are met."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what runs is ended on the way out
    found = {seed: _seed(options, seed) for seed in options.seeds}
    (options.out / "figures.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, options.png)
    print(text := report(found, GROUPS * GROUP_SIZE), flush=True)
    print(f"\nfigures: {options.out}/figures.json, curves: {options.png}")
    return 1 if "MISSED" in text else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=150, help="of GRPO")
    parser.add_argument("--critic", action="store_true", help="PPO with a critic, too")
    parser.add_argument("--lora", action="store_true", help="GRPO with an adapter, too")
    parser.add_argument("--no-async", action="store_true", help="without asynchronous runs and their targets")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "learning")
    parser.add_argument("--png", type=Path, help="where the curves go, if not to OUT/learning.png")
    options = parser.parse_args()
    options.out = options.out.absolute()
    options.png = options.png or options.out / "learning.png"
    return options


def _seed(options: argparse.Namespace, seed: int) -> dict[str, Figures]:
    """Return the figures of all runs of a seed."""
    run = Run(options.out / f"seed-{seed}", seed, options.steps)
    runs = {
        ON_POLICY: (run.on_policy, True),
        ASYNC: (run.asynchronous, not options.no_async),
        PPO: (run.ppo, options.critic),
        LORA: (run.lora, options.lora),
    }
    return {name: run.finished(name, its) for name, (its, wanted) in runs.items() if wanted}


@dataclass(frozen=True)
class Run:
    """The runs of one seed.

    Args:
        directory: Where they are.
        seed: Of the first weights, the demonstrations, and the tasks.
        steps: Of reinforcement.
    """

    directory: Path
    seed: int
    steps: int

    def finished(self, name: str, run: Callable[[Path], Path]) -> Figures:
        """Return the figures of a run, after running it unless that has been done."""
        place = self.directory / name.replace(" + ", "-")
        kept = place / "figures.json"
        if kept.exists():
            found: Figures = json.loads(kept.read_text())
            if found["steps"] != self.steps:
                sys.exit(f"{place} is of a run of {found['steps']} steps: remove it, or give another --out")
            return found
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        start = time.monotonic()
        found = figures_of(run(place), sorted(place.glob("accuracy-*.jsonl")), self.steps)
        found["seconds"] = time.monotonic() - start
        kept.write_text(json.dumps(found) + "\n")
        print(f"seed {self.seed}, {name}: {found['seconds']:.0f} s", flush=True)
        return found

    def on_policy(self, place: Path) -> Path:
        """Imitate, then train on-policy; return the job directory."""
        make = [sys.executable, str(ARITHMETIC / "make.py"), str(place / "base"), "--seed", str(self.seed)]
        subprocess.run(make, check=True, timeout=LIMIT)
        job = place / "job" / "grpo"
        with _processes(place) as start:
            trainer = start("trainer", _trainer("stages", place, self.staged(place)))
            _wait_until(lambda: job.is_dir() or trainer.poll() is not None)
            explorers = []
            if trainer.poll() is None:
                command = self.explorer(job, place, "e0", _imitated(place / "job"))
                explorers.append(start("e0", command))
            _end(trainer, explorers)
        return job

    def asynchronous(self, place: Path) -> Path:
        """Train on the rollouts of two explorers that run freely; return the job directory."""
        job, imitation = place / "job", _imitated(self.directory / ON_POLICY / "job")
        job.mkdir()
        with _processes(place) as start:
            trainer = start("trainer", _trainer("train", place, self.free(place, imitation)))
            explorers = [
                start(name, self.explorer(job, place, name, imitation, ahead=AHEAD, explorers=2))
                for name in ("e0", "e1")
            ]
            _end(trainer, explorers)
        return job

    def ppo(self, place: Path) -> Path:
        """Train with a critic; return the job directory."""
        return self._from_imitation(place, self.with_critic)

    def lora(self, place: Path) -> Path:
        """Train an adapter; return the job directory."""
        return self._from_imitation(place, self.with_adapter)

    def _from_imitation(self, place: Path, config: Callable[[Path, Path], Config]) -> Path:
        """Train on the rollouts of one explorer that waits for every version."""
        job, imitation = place / "job", _imitated(self.directory / ON_POLICY / "job")
        job.mkdir()
        with _processes(place) as start:
            trainer = start("trainer", _trainer("train", place, config(place, imitation)))
            _end(trainer, [start("e0", self.explorer(job, place, "e0", imitation))])
        return job

    def staged(self, place: Path) -> Config:
        """Return the configuration of imitation and on-policy training."""
        config = self._config(place / "job", place / "base" / "model")
        config["data"]["sft_path"] = str(place / "base" / "sft.jsonl")
        config["stages"] = [_imitation(), {"name": "grpo", "trainer": {"total_steps": self.steps}}]
        return config

    def free(self, place: Path, imitation: Path) -> Config:
        """Return the configuration of asynchronous training from a model that imitates."""
        config = self._config(place / "job", imitation)
        config["sync"]["style"] = "fully_async"
        config["data"]["max_age"] = AHEAD + 4
        config["trainer"]["total_steps"] = self.steps
        return config

    def with_critic(self, place: Path, imitation: Path) -> Config:
        """Return the configuration of training with a critic, on-policy, from a model that imitates."""
        config = self._config(place / "job", imitation)
        config["algorithm"] |= {"name": "ppo", "lam": 0.95}
        config["critic"] = CRITIC
        config["trainer"]["total_steps"] = self.steps
        return config

    def with_adapter(self, place: Path, imitation: Path) -> Config:
        """Return the configuration of training an adapter, on-policy, beside a model that imitates."""
        config = self._config(place / "job", imitation)
        config["model"]["lora"] = ADAPTER
        config["algorithm"]["optimizer"]["lr"] = ADAPTER_RATE
        config["trainer"]["total_steps"] = self.steps
        return config

    def _config(self, job: Path, model: Path) -> Config:
        config = copy.deepcopy(SETTINGS)
        config["job"] = {"dir": str(job), "seed": self.seed}
        config["model"] = {"path": str(model)}
        return config

    def explorer(
        self, job: Path, place: Path, name: str, model: Path, *, ahead: int = 0, explorers: int = 1
    ) -> list[str]:
        """Return the command of an explorer that makes its share of a step's groups in each batch."""
        options = {
            "model": model,
            "name": name,
            "seed": self.seed,
            "groups": GROUPS // explorers,
            "group-size": GROUP_SIZE,
            "batches-per-step": explorers,
            "ahead": ahead,
            "evaluate": place / f"accuracy-{name}.jsonl",
        }
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        return [sys.executable, str(ARITHMETIC / "explorer.py"), str(job), *words]


def _imitation() -> Config:
    """Return the stage that comes before reinforcement."""
    optimizer = {"lr": 4e-3, "betas": [0.9, 0.99], "warmup_steps": 10, "schedule": "cosine"}
    return {
        "name": "sft",
        "algorithm": {"name": "sft", "optimizer": optimizer},
        "sync": {"interval": SFT_STEPS},
        "trainer": {"total_steps": SFT_STEPS},
    }


def _imitated(job: Path) -> Path:
    """Return the model that the second of the stages in a directory started from."""
    return Path(json.loads((job / "stages.json").read_text())["models"]["grpo"])


def _trainer(verb: str, place: Path, config: Config) -> list[str]:
    path = place / "job.toml"
    path.write_text(tomli_w.dumps(config))
    return [sys.executable, "-P", "-m", "trainer", verb, str(path)]


@contextmanager
def _processes(place: Path) -> Iterator[Callable[[str, list[str]], "subprocess.Popen[bytes]"]]:
    """Yield what starts processes whose output goes to PLACE/<name>.log; none of them is left behind."""
    running: list[subprocess.Popen[bytes]] = []
    # One thread a process: there are more processes than cores.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start(name: str, command: list[str]) -> "subprocess.Popen[bytes]":
        with (place / f"{name}.log").open("ab") as log:
            running.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        return running[-1]

    try:
        yield start
    finally:
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(_ENDING)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > end:
            sys.exit(f"not there after {LIMIT:.0f} s")
        time.sleep(0.1)


def _end(trainer: "subprocess.Popen[bytes]", explorers: list["subprocess.Popen[bytes]"]) -> None:
    """Wait for the trainer, which an explorer that fails would leave waiting, then for the explorers."""
    _wait_until(lambda: trainer.poll() is not None or any(explorer.poll() for explorer in explorers))
    if trainer.poll() is None:
        sys.exit("an explorer has failed: see its log")
    if trainer.returncode:
        sys.exit(f"the trainer ended with {trainer.returncode}: see its log")
    for explorer in explorers:
        if explorer.wait(_ENDING):
            sys.exit("an explorer has failed: see its log")


if __name__ == "__main__":
    sys.exit(main())
