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
        self._identity, self._opened = f"r{number}", opened
        self._ways = {
            "syncd, early": FollowOptions(stage=stage, early=True),
            "syncd, stage": FollowOptions(stage=stage),
            "syncd": FollowOptions(),
        }
        # Several processes of this host read the same files: through the page cache where there is no stage.
        self._hooks = {name: _Hook(self.model, direct=False) for name in self._ways}
        self._follower: Follower | None = None
        threading.Thread(target=self._generate, daemon=True).start()

    def get_ready(self, contestant: str) -> None:
        """Catch up with what was there before, so that the next weights are all that is new."""
        self.active.set()
        self._before = self._marker()
        if contestant in self._ways:
            # Opened for this sync alone: one that copies early would do so in the syncs of the others too.
            follower = Follower.open(
                self._place / "job", self._hooks[contestant], self._identity, self._ways[contestant]
            )
            self._follower = self._opened.enter_context(follower)
            while self._follower.turn(0.0).kind == "applied":
                pass

    def take(self, contestant: str) -> dict[str, Any]:
        """Wait for the next weights, bring them in, and return how long each part took."""
        if self._follower is None:
            return self._poll(contestant)
        took, self._follower = self._follow(self._follower, self._hooks[contestant]), None
        self._opened.close()
        return took

    def _follow(self, follower: Follower, hook: _Hook) -> dict[str, Any]:
        outcome = follower.turn(_LONG)
        assert outcome.kind == "applied", outcome
        took = outcome.timings
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
            with ExitStack() as pieces:
                for hook in self._hooks.values():
                    pieces.enter_context(hook.generating())
                pieces.enter_context(self._lock)
                time.sleep(_PIECE)
            time.sleep(0)
