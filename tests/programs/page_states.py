"""Takes screenshots of the page of `syncd serve` in each of its states.

    PYTHONPATH=.:tests python tests/programs/page_states.py OUT [STATE ...]

The jobs are real, with steps, presences and journals by syncd's own code, and its own server serves them; only
time is moved by hand, so that a heartbeat is old at once. Needs playwright, pillow and a Chromium.
"""

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from PIL import Image
from support.browser import started_browser
from support.jobs import ManualClock, explorer, write_step
from support.presences import BeatingPublisher

from syncd.config import DaemonConfig
from syncd.daemon.service import Daemon
from syncd.observe.journal import Journal
from syncd.parts.page.document import PageReader
from syncd.parts.page.jobs import JobsSite, ServedJob
from syncd.parts.page.routes import file_routes
from syncd.parts.page.server import PageServer, serve_in_background
from syncd.parts.page.site import Site
from syncd.protocol.engine_state import EngineReport, EngineState, Proof
from syncd.protocol.job_end import JobEnd, mark_finished
from syncd.protocol.layout import Job
from syncd.protocol.presence import Presence, RunningStatus
from syncd.protocol.writer import StepWriter

SIZES = {"desk": (1280, 800), "phone": (390, 844)}
SCALE = 2
"""Pixels of an image for each of the page: screens of today show them sharp."""

COLORS = 96
"""Of an image, so that it is small."""

EVERY = 3600.0
"""Seconds between two polls: the page is shown as it is."""


class Scene:
    """One job whose time is moved by hand, and the modules in it.

    Args:
        root: A directory for its job.
        name: The job's name.
    """

    def __init__(self, root: Path, name: str) -> None:
        (root / name).mkdir(parents=True)
        self.job = Job.at(root / name)
        self.clock = ManualClock(time.time() - 1.7e9)
        self.modules: list[BeatingPublisher] = []
        self.daemon = Daemon(
            self.job,
            DaemonConfig(keep_last=3, verify="header"),
            self.clock,
            Journal(self.job.events),
        )
        self._read = PageReader(lambda: self.job, lambda _: self.daemon.config, self.clock)

    def read(self) -> dict[str, Any]:
        """Return the page's data."""
        return self._read()

    def train(self, steps: int, explorers: int) -> "Scene":
        """Publish a step a minute, with a trainer and some explorers, then beat once."""
        self.modules = [self._trainer(steps + 1)]
        for step in range(1, steps + 1):
            write_step(self.job, step, full=step % 5 == 0)
            self._date_marker()
            self._measure(step)
            self.clock.at += 0.02 + 0.01 * (step % 3)
            self.pass_time(0)
            self.clock.at += 60
        self.modules += [self.explorer(number, steps) for number in range(explorers)]
        self.read()
        self.pass_time(6)
        return self

    def pass_time(self, seconds: float, silent: int = 0) -> None:
        """Move time; the daemon works, and all modules but the last few beat."""
        self.clock.at += seconds
        for module in self.modules[: len(self.modules) - silent]:
            module.update()
        self.daemon.tick()

    def _date_marker(self) -> None:
        """Date the marker by the clock of this scene: the page says how long after it a version came."""
        now = self.clock.time()
        os.utime(self.job.marker, (now, now))

    def _measure(self, step: int) -> None:
        """Append the figures of a step as the trainer does."""
        reward = 1 - 0.9 ** (step + 1)
        metrics = {
            "critic/score/mean": reward,
            "critic/score/min": reward / 3,
            "critic/score/max": min(1.0, reward * 1.4),
            "actor/pg_loss": 0.4 * 0.9**step + 0.02 * (step % 3),
            "actor/entropy": 1.1 * 0.97**step,
            "actor/grad_norm": 0.9 + 0.1 * (step % 4),
            "actor/pg_clipfrac": 0.002 + 0.001 * (step % 3),
            "response_length/mean": 400 + 12 * step,
            "response_length/min": 60.0,
            "response_length/max": 1024.0,
            "experience/age_mean": 0.4 + 0.1 * (step % 4),
            "experience/age_max": 1 + step % 2,
            "timing_s/sync_weight": 0.06 + 0.01 * (step % 5),
            "reward/parts/format": min(1.0, reward * 1.3),
            "reward/parts/answer": reward * 0.8,
            "response/truncated": 0.3 * 0.8**step,
            "reward/equal_groups": 0.2 + 0.02 * step,
            "rollout_corr/k3_kl": 0.002 + 0.0004 * (step % 4),
            "rollout_corr/logprob_diff_mean": 0.011 + 0.001 * (step % 3),
            "rollout_corr/ess_token": 0.97 - 0.004 * (step % 5),
            "perf/tokens_per_second": 5200 + 90 * (step % 3),
            "perf/train_tokens_per_second": 9100 - 120 * (step % 4),
            **({} if step % 3 else {"eval/math/reward": reward * 0.9, "eval/math/pass_at_8": reward**0.5}),
        }
        at = datetime.fromtimestamp(self.clock.time(), UTC).isoformat()
        with open(f"{self.job.root}/metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "time": at, "metrics": metrics}) + "\n")

    def _trainer(self, step: int) -> BeatingPublisher:
        presence = Presence("trainer", incarnation="i", host="gpu-000", pid=4210)
        made = BeatingPublisher(self.job.disk, self.clock, self.job.trainers, presence)
        made.prepare()
        made.update(step=step)
        return made

    def explorer(
        self, number: int, step: int, state: EngineState = EngineState.PROVEN, reason: str = ""
    ) -> BeatingPublisher:
        """Return an explorer with its engine; each third one loads the newest version."""
        is_loading = number % 3 == 2
        proof = Proof(f"1.{step}", 0.00012 * (number + 1), 0.01, 0.005, None, 60, 0.4)
        since = self.clock.time() - 45
        report = EngineReport(state, since, not reason, reason, step, 0, 1.31, proof)
        return explorer(
            self.job,
            self.clock,
            f"vllm-{number:02d}",
            applied=(1, step - is_loading),
            loading=(1, step) if is_loading else None,
            leases=(step,),
            host=f"gpu-{number // 4 + 1:03d}",
            pid=9000 + number,
            info=report.document(),
        )

    def write(self, step: int, receipts: int, of: int) -> None:
        """Begin a step, of which some ranks have written their part."""
        writer = StepWriter(self.job, step, of, "a")
        writer.begin()
        for rank in range(1, receipts + 1):
            name = f"actor/model-{rank:05d}-of-{of:05d}.safetensors"
            writer.receipt(rank, [writer.write(name, b"x" * 10)])
        self.daemon.tick()

    def finish(self, step: int) -> None:
        """Let everybody leave in order at the end."""
        self.modules[0].update(step=step)
        for module in self.modules:
            module.update(status=RunningStatus.STOPPED, leases=(), loading=None)
        mark_finished(self.job, JobEnd(step, f"total_steps {step} reached"))
        self.pass_time(1)
        self.daemon.close()


def healthy(root: Path) -> Scene:
    scene = Scene(root, "qwen3-grpo").train(12, 4)
    scene.write(13, 3, 4)
    return scene


def problems(root: Path) -> Scene:
    scene = Scene(root, "qwen3-grpo").train(12, 12)
    failed = scene.explorer(20, 11, EngineState.REFUSED, "the model has no tensor lm_head.weight")
    scene.modules.insert(1, failed)
    shard = Path(scene.job.step(11), "actor/model-00001-of-00001.safetensors")
    shard.write_bytes(shard.read_bytes()[:20])
    for _ in range(13):
        scene.pass_time(5, silent=9)
        scene.read()
    return scene


def dead_daemon(root: Path) -> Scene:
    scene = problems(root)
    scene.daemon.close()
    return scene


def finished(root: Path) -> Scene:
    scene = Scene(root, "qwen3-grpo").train(20, 3)
    scene.finish(20)
    scene.clock.at += 11000
    return scene


def empty(root: Path) -> Scene:
    return Scene(root, "qwen3-grpo")


def _served(scene: Scene) -> ServedJob:
    return _page(scene, scene.read, EVERY)


def _page(scene: Scene, read: Callable[[], dict[str, Any]], every: float) -> ServedJob:
    routes = file_routes(lambda: scene.job, scene.clock, every, with_rollouts=False)
    return ServedJob(scene.job.root, read, routes, scene.clock, every)


def _one(make: Callable[[Path], Scene]) -> Callable[[Path], Site]:
    return lambda root: _served(make(root)).site


def stuck(root: Path) -> Site:
    """Serve a job whose mount stopped to answer two minutes ago."""
    scene, looks = Scene(root, "qwen3-grpo").train(12, 4), iter([True])
    read = lambda: scene.read() if next(looks, False) else _never()  # noqa: E731
    served = _page(scene, read, 0.0)
    served.poll.current(60.0)
    served.poll.current(0.0)
    scene.clock.at += 135
    return served.site


def _never() -> Any:
    threading.Event().wait()


def several(root: Path) -> Site:
    """Serve jobs in each state, with the overview first."""
    made = {"llama-sft": finished, "qwen3-grpo": healthy, "mixtral-lora": dead_daemon, "new": empty}
    jobs = {name: _served(make(root / name)) for name, make in made.items()}
    other = Scene(root / "other", "qwen3-ppo").train(3, 2)
    jobs["qwen3-ppo"] = _served(other)
    return JobsSite(lambda: jobs, ManualClock(), EVERY)


STATES: dict[str, Callable[[Path], Site]] = {
    "healthy": _one(healthy),
    "problems": _one(problems),
    "dead-daemon": _one(dead_daemon),
    "finished": _one(finished),
    "empty": _one(empty),
    "stuck": stuck,
    "jobs": several,
}


@contextmanager
def _serving(site: Site) -> Iterator[str]:
    server = PageServer("127.0.0.1", 0, site)
    stop = serve_in_background(server)
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        stop()


def shoot(browser: Any, url: str, out: Path, state: str) -> None:
    """Write a screenshot for each size and scheme: of the whole page, on a phone of what is seen first."""
    for size, (width, height) in SIZES.items():
        for scheme in ("light", "dark"):
            context = browser.new_context(
                viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=SCALE
            )
            page = context.new_page()
            page.goto(url)
            page.wait_for_selector("main:not([hidden]) *")
            page.wait_for_load_state("networkidle")
            path = out / f"{state}-{size}-{scheme}.png"
            page.screenshot(path=path, full_page=size == "desk")
            context.close()
            Image.open(path).quantize(COLORS).save(path, optimize=True)


def main(out: str, *states: str) -> None:
    Path(out).mkdir(parents=True, exist_ok=True)
    with started_browser() as browser:
        for state in states or STATES:
            with tempfile.TemporaryDirectory() as root, _serving(STATES[state](Path(root))) as url:
                shoot(browser, url, Path(out), state)


if __name__ == "__main__":
    main(*sys.argv[1:])
