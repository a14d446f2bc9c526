"""The whole loop on one machine: `make demo`, and with an agent `make demo-agents`.

A small model imitates a careless teacher for half a minute. Then the job begins: `syncd watch`, a trainer (verl,
FSDP2, CPU), and explorers that follow each version and write experiences, none of them waiting for the other.
`syncd status` shows it live. The end is a summary computed from what happened.

`make demo` teaches sums to a model that answers at once: a trainer of two ranks and two explorers.
`make demo-agents` teaches a model to use a calculator: the explorer starts agents, whose `openai` client talks to the
explorer's gateway.
"""

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import job
import tomli_w
from job import AGENTS, SUMS, Demo
from processes import ROOT, FailedError, Processes
from servers import serving
from summary import report, summarize

OUT = ROOT / "out"
DEMOS = {"demo": SUMS, "demo-agents": AGENTS}
SYNCD = [sys.executable, "-P", "-m", "syncd"]
TRAINER = [sys.executable, "-P", "-m", "trainer"]
EXPLORER = [sys.executable, "-P", "-m", "explorer_hooks"]
_STUCK = 600.0
"""Seconds without a finished step after which a run counts as stuck, also on a busy machine."""

_EVERY = 30.0


def main() -> int:
    """Run the demo; return 0 if every check of it passed."""
    options = _options()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    began = time.monotonic()
    try:
        with Processes(options.out) as processes:
            model = imitate(processes, options)
            explore(processes, options, model)
    except KeyboardInterrupt:
        print("\nstopped; all processes have ended")
        return 130
    except FailedError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    return _end(options.demo, options.out, time.monotonic() - began)


def imitate(processes: Processes, options: argparse.Namespace) -> Path:
    """Train on demonstrations; return the directory of the model."""
    demo, out, seed = options.demo, options.out, options.seed
    print(f"\n# a model to start from: {demo.teacher}")
    make = [sys.executable, str(ROOT / demo.make), str(out / "base"), "--seed", str(seed)]
    processes.start("make", make)
    processes.wait("make", _STUCK)
    config = _written(out / "sft.toml", job.imitation(demo, out, seed))
    processes.start("sft", [*TRAINER, "train", str(config)])
    processes.wait("sft", _STUCK, out / "sft" / "metrics.jsonl")
    return out / "sft" / f"global_step_{demo.sft_steps}" / "actor"


def explore(processes: Processes, options: argparse.Namespace, model: Path) -> None:
    """Run the job until the trainer has done its steps and the explorers run its last version."""
    demo, steps = options.demo, options.steps or options.demo.steps
    is_served = options.engine == "vllm"
    servers = dict(serving(processes, model, demo.explorers, demo.server)) if is_served else {}
    print(f"\n# the job: a daemon, a trainer ({demo.ranks} ranks), {len(demo.explorers)} explorers")
    told = job.reinforcement(demo, options.out, model, {"kind": options.engine}, steps, options.seed)
    config = _written(options.out / "grpo.toml", told)
    place = options.out / "job"
    place.mkdir()
    daemon = processes.start("daemon", [*SYNCD, "watch", str(place), "--config", str(config)])
    processes.start("trainer", [*TRAINER, "train", str(config)])
    beside = {"PYTHONPATH": f"{ROOT}:{(ROOT / demo.make).parent}"}
    for name in demo.explorers:
        address = ["--explorer.engine.address", servers[name]] if servers else []
        processes.start(name, [*EXPLORER, "run", str(config), "--name", name, *address], beside)
    show = options.show or _show()
    show(processes, place, lambda: processes.running["trainer"].poll() is not None)
    for name in ("trainer", *demo.explorers):
        processes.wait(name, _STUCK)
    subprocess.run([*SYNCD, "status", str(place)], check=True)
    daemon.terminate()
    processes.wait("daemon", 60)


Show = Callable[[Processes, Path, Callable[[], bool]], None]


def _show() -> Show:
    return _live if sys.stdout.isatty() else _now_and_then


def _live(processes: Processes, place: Path, over: Callable[[], bool]) -> None:
    """Show the status on the terminal while it changes."""
    shown = subprocess.Popen([*SYNCD, "status", str(place), "--watch"])
    try:
        processes.until(over, _STUCK, "the trainer to end", place / "metrics.jsonl")
    finally:
        shown.terminate()
        shown.wait(10)


def _now_and_then(processes: Processes, place: Path, over: Callable[[], bool]) -> None:
    """Print the status every half minute."""
    due = time.monotonic() + _EVERY

    def is_over() -> bool:
        nonlocal due
        if time.monotonic() > due:
            print(f"\n$ syncd status {place}", flush=True)
            subprocess.run([*SYNCD, "status", str(place)], check=False)
            due = time.monotonic() + _EVERY
        return over()

    processes.until(is_over, _STUCK, "the trainer to end", place / "metrics.jsonl")


def _end(demo: Demo, out: Path, seconds: float) -> int:
    place = out / "job"
    plot = subprocess.run([*TRAINER, "plot", str(place)], check=True, capture_output=True, text=True)
    logs = {name: out / f"{name}.log" for name in demo.explorers}
    found = summarize(place, logs, demo.least_rise)
    print(
        f"\n{report(found)}\nplot                 {plot.stdout.strip()}\ntook                 {seconds:.0f} s"
    )
    for problem in found.problems:
        print(f"DID NOT HOLD: {problem}; logs: {out}")
    print("everything held" if not found.problems else "")
    return 1 if found.problems else 0


def _written(path: Path, config: job.Config) -> Path:
    path.write_text(tomli_w.dumps(config))
    return path


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("demo", nargs="?", choices=DEMOS, default="demo", help="what is learnt")
    parser.add_argument(
        "--out", type=Path, help="where everything goes, out/DEMO unless given; removed first"
    )
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--steps", type=int, help="of reinforcement")
    parser.add_argument("--seed", type=int, default=1, help="of weights, demonstrations and tasks")
    parser.add_argument(
        "--plain", dest="show", action="store_const", const=_now_and_then, help="no live display"
    )
    options = parser.parse_args()
    options.out = (options.out or OUT / options.demo).absolute()
    options.demo = DEMOS[options.demo]
    return options


if __name__ == "__main__":
    sys.exit(main())
