"""The daemon alone, in half a minute: `make demo-daemon`.

Two ranks write real safetensors steps, `syncd watch` publishes and prunes them, a fast and a slow explorer
follow under leases. In the middle the daemon is killed with SIGKILL and restarted. The end is a summary
computed from what happened: versions, latency, bytes, what each explorer loaded, what was pruned and why.
"""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "out" / "demo-daemon"
JOB = OUT / "job"
STEPS = 24
SYNCD = [sys.executable, "-m", "syncd"]

Process = subprocess.Popen[bytes]


def main() -> int:
    """Run the demo; return 0 if every check of it passed."""
    shutil.rmtree(OUT, ignore_errors=True)
    JOB.mkdir(parents=True)
    running: list[Process] = []
    try:
        explorers = _play(running)
    except KeyboardInterrupt:
        print("\nstopped")
        return 130
    finally:
        _stop(running)
    return _summary(explorers)


def _play(running: list[Process]) -> dict[str, Path]:
    print(f"job directory: {JOB}\n\n$ syncd watch {JOB} --trash-grace 2")
    daemon = _start(running, "daemon", [*SYNCD, "watch", str(JOB), "--trash-grace", "2"])
    explorers = {name: OUT / f"{name}.jsonl" for name in ("fast", "slow")}
    for name, path in explorers.items():
        pause = "0" if name == "fast" else "1.6"
        follow = [sys.executable, str(HERE / "follow.py"), str(JOB), "--name", name, "--pause", pause]
        _start(running, name, [*follow, "--until", str(STEPS), "--log", str(path)])
    writer = [sys.executable, str(HERE / "write_steps.py"), str(JOB), "--world-size", "2"]
    ranks = [
        _start(
            running,
            f"rank{rank}",
            [*writer, "--rank", str(rank), "--steps", str(STEPS), "--every", "0.6", "--mib", "4"],
        )
        for rank in (1, 2)
    ]
    _wait_for_step(8)
    _status()
    print("\n$ kill -9 the daemon, and start it again a second later")
    daemon.kill()
    daemon.wait(10)
    time.sleep(1)
    _start(running, "daemon", [*SYNCD, "watch", str(JOB), "--trash-grace", "2"])
    for rank in ranks:
        rank.wait(120)
    _wait_for_step(STEPS)
    for process in running:
        if process.args[1].endswith("follow.py"):  # type: ignore[index,union-attr]
            process.wait(60)
    _status()
    return explorers


def _start(running: list[Process], name: str, command: list[str]) -> Process:
    with (OUT / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    running.append(process)
    return process


def _stop(running: list[Process]) -> None:
    for process in running:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process in running:
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_for_step(step: int) -> None:
    command = [*SYNCD, "wait", str(JOB), "--newer-than", str(step - 1), "--timeout", "90"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _status() -> None:
    print(f"\n$ syncd status {JOB}")
    sys.stdout.flush()
    subprocess.run([*SYNCD, "status", str(JOB)], check=True)


def _events() -> list[dict[str, Any]]:
    lines = (JOB / ".syncd" / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _summary(explorers: dict[str, Path]) -> int:
    events = _events()
    published = [event for event in events if event["event"] == "version_published"]
    pruned = Counter(event["rule"] for event in events if event["event"] == "step_pruned")
    freed = sum(event["bytes"] for event in events if event["event"] == "step_pruned")
    latencies = sorted(event["latency"] * 1e3 for event in published if "latency" in event)
    pairs = [(event["generation"], event["step"]) for event in published]
    print(f"\nversions published    {len(published)}, the last is step {published[-1]['step']}")
    print(f"marker to version     p50 {statistics.median(latencies):.1f} ms, slowest {latencies[-1]:.0f} ms")
    print(f"bytes published       {sum(event['bytes'] for event in published) / 1e6:.0f} MB")
    print(f"pruned                {sum(pruned.values())} steps, {freed / 1e6:.0f} MB: {dict(pruned)}")
    applied = {name: _applied(path) for name, path in explorers.items()}
    for name, steps in applied.items():
        print(f"explorer {name:<12} loaded and verified {len(steps)} versions, the last is step {steps[-1]}")
    kept = sorted(
        int(name.removeprefix("global_step_")) for name in os.listdir(JOB) if name.startswith("global_")
    )
    print(f"steps on disk         {kept}")
    good = pairs == sorted(set(pairs)) and all(steps[-1] == STEPS for steps in applied.values())
    print("\neverything held" if good else "\nSOMETHING DID NOT HOLD: see the logs in out/demo-daemon")
    return 0 if good else 1


def _applied(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main())
