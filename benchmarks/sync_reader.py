"""One reader of benchmarks/sync.py: parameters, a thread that generates, and the ways to bring new weights in."""

import random
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from explorer_hooks.follower.follower import Follower, FollowOptions
from explorer_hooks.hook import Running
from explorer_hooks.hooks.transformers import TransformersHook
from syncd.transports.base import WeightDirectory

MARKER = "marker.txt"
PARTS = ("stage", "verify", "pause", "load", "confirm")
_PIECE = 0.01
"""Seconds of one piece of generation, which a load waits for."""

_POLL = 1.0
_LONG = 250.0

Parameters = dict[str, tuple[int, ...]]


def parameters_like(weights: dict[str, torch.Tensor]) -> Parameters:
    """Return the shapes of what is saved."""
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def read_forever(pipe: Connection, place: str, stage: str, number: int, shapes: Parameters) -> None:
    """Take a sync by each way that is named, until None is."""
    try:
        _serve(pipe, Path(place), stage, number, shapes)
    except BaseException:  # noqa: BLE001 - whoever waits must hear of it
        pipe.send(traceback.format_exc())


def _serve(pipe: Connection, place: Path, stage: str, number: int, shapes: Parameters) -> None:
    torch.set_num_threads(1)
    with ExitStack() as opened:
        reader = Reader(place, stage, number, shapes, opened)
        while (contestant := pipe.recv()) is not None:
            reader.get_ready(contestant)
            pipe.send({})
            found = reader.take(contestant)
            reader.active.clear()
            pipe.send({**found, "weights": float(reader.model["p0"][0])})


class _Hook(TransformersHook):
    """Notes how long a load waits for what is being generated, and when it has said last what it runs."""

    pause = said = _generated_at = 0.0

    @contextmanager
    def generating(self) -> Iterator[str | None]:
        with super().generating() as label:
            yield label
        self._generated_at = time.monotonic()

    def load(self, target: WeightDirectory) -> None:
        began = time.monotonic()
        super().load(target)
        self.pause = max(self._generated_at - began, 0.0)

    def current_version(self) -> Running:
        running = super().current_version()
        self.said = time.monotonic()
        return running


class Reader:
    """Parameters and what fills them.

    Args:
        place: The directory of the run, as readers see it.
        stage: The stage of this host.
        number: Of the reader.
        shapes: Of its parameters.
        opened: What is closed with it.
    """

    def __init__(self, place: Path, stage: str, number: int, shapes: Parameters, opened: ExitStack) -> None:
        self._place = place
        self.model = torch.nn.ParameterDict(
            {
                name: torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)
                for name, shape in shapes.items()
            }
        )
        self.active, self._lock = threading.Event(), threading.Lock()
        self._hooks, self._followers = {}, {}
        for name, directory in (("syncd, stage", stage), ("syncd", None)):
            # Several processes of this host read the same files: through the page cache where there is no stage.
            hook = self._hooks[name] = _Hook(self.model, direct=False)
            identity = f"r{number}-{'stage' if directory else 'mount'}"
            follower = Follower.open(place / "job", hook, identity, FollowOptions(stage=directory))
            self._followers[name] = opened.enter_context(follower)
        threading.Thread(target=self._generate, daemon=True).start()

    def get_ready(self, contestant: str) -> None:
        """Catch up with what was there before, so that the next weights are all that is new."""
        self.active.set()
        self._before = self._marker()
        if contestant in self._followers:
            while self._followers[contestant].turn(0.0).kind == "applied":
                pass

    def take(self, contestant: str) -> dict[str, Any]:
        """Wait for the next weights, bring them in, and return how long each part took."""
        if contestant in self._followers:
            return self._follow(contestant)
        return self._poll(contestant)

    def _follow(self, contestant: str) -> dict[str, Any]:
        outcome = self._followers[contestant].turn(_LONG)
        assert outcome.kind == "applied", outcome
        took, hook = outcome.timings, self._hooks[contestant]
        return {
            "stage": took.get("stage", 0.0),
            "verify": took["verify"] + took["prepare"],
            "pause": hook.pause,
            "load": took["load"] - hook.pause,
            "confirm": took["confirm"],
            # The copy that is not needed any more is removed after that, while the engine works.
            "ended": hook.said,
        }

    def _poll(self, contestant: str) -> dict[str, Any]:
        time.sleep(random.random() * _POLL)
        deadline = time.monotonic() + _LONG
        while self._marker() == self._before:
            assert time.monotonic() < deadline
            time.sleep(_POLL)
        seen = time.monotonic()
        path = self._place / contestant
        state = safetensors.torch.load_file(path) if contestant == "save_file" else torch.load(path)
        read = time.monotonic()
        with self._lock, torch.no_grad():
            paused = time.monotonic()
            for name, tensor in state.items():
                self.model[name].copy_(tensor)
        ended = time.monotonic()
        return {"pause": paused - read, "load": ended - seen - (paused - read), "ended": ended}

    def _marker(self) -> str:
        try:
            return (self._place / MARKER).read_text()
        except FileNotFoundError:
            return ""

    def _generate(self) -> None:
        while True:
            self.active.wait()
            with (
                self._hooks["syncd"].generating(),
                self._hooks["syncd, stage"].generating(),
                self._lock,
            ):
                time.sleep(_PIECE)
            time.sleep(0)
