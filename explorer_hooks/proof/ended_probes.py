"""Which kinds of engine a probe has ended: no engine of such a kind is asked again, whoever follows it.

A kind is a product, its release, the flags that it tells of, and the kind of adapter. The job keeps one small file
for each, below its state directory, so that a restart of follower or engine forgets nothing; whoever removes the file
has the question asked again.
"""

import hashlib
from collections.abc import Callable
from typing import Any

from explorer_hooks.hook import ProbeAnswer, ProbingHook
from syncd.errors import EngineUnreachableError, LoadFailedError
from syncd.protocol.disk import Clock, exists
from syncd.protocol.documents import encode
from syncd.protocol.layout import Job
from syncd.transports.base import WeightDirectory, WeightTensors

PATIENCE = 3.0
"""Seconds that an engine which gave no answer is watched: one that ends of it refuses connections within a second."""

_TICK = 0.25

Target = WeightDirectory | WeightTensors | None
Tell = Callable[..., None]
"""Hears an event: its level, its name, its fields."""


class EndedProbes:
    def __init__(self, hook: ProbingHook, clock: Clock, job: Job, tell: Tell) -> None:
        self._hook, self._clock, self._job, self._tell = hook, clock, job, tell
        self._engine: str | None = None
        self._ended: dict[str, bool] = {}
        """By kind, whether a probe has ended an engine of it."""

    def forget_engine(self) -> None:
        """Ask the engine again which release and flags it has: it may have been started again."""
        self._engine = None
        self._ended = {}

    def may_ask(self, target: Target) -> bool:
        """Return whether a probe of `target` may be asked; None stands for the engine's start weights."""
        kind = self._kind(target)
        if kind not in self._ended:
            self._ended[kind] = self._is_recorded(kind)
            if self._ended[kind]:
                self._report("warning", "probe_left_out", kind)
        return not self._ended[kind]

    def ask(self, target: Target, tokens: Any) -> ProbeAnswer:
        kind = self._kind(target)
        try:
            return self._hook.probe(target, tokens)
        except (LoadFailedError, EngineUnreachableError) as error:
            if not self._has_ended():
                raise
            self._remember(kind, error.message)
            raise EngineUnreachableError(f"the engine has ended at a probe: {error.message}") from error

    def _kind(self, target: Target) -> str:
        if self._engine is None:
            self._engine = self._hook.engine_kind()
        return f"{self._engine}, {self._hook.adapter_kind(target)}".rstrip(", ")

    def _is_recorded(self, kind: str) -> bool:
        try:
            return exists(self._job.disk, self._path(kind))
        except OSError:
            return False  # the mount fails: what follows meets the same, and says so

    def _path(self, kind: str) -> str:
        return f"{self._job.ended_probes}/{hashlib.sha256(kind.encode()).hexdigest()[:32]}.json"

    def _has_ended(self) -> bool:
        until = self._clock.monotonic() + PATIENCE
        while (ended := self._hook.has_ended()) is False and self._clock.monotonic() < until:
            self._clock.sleep(_TICK)
        return bool(ended)

    def _remember(self, kind: str, reason: str) -> None:
        self._ended[kind] = True
        try:
            self._job.disk.make_directory(self._job.ended_probes)
            self._job.disk.replace(self._path(kind), encode({"engine": kind, "reason": reason}))
        except OSError as error:
            reason = f"{reason}; this process alone remembers it: {error}"
        self._report("error", "probe_ended_engine", kind, reason=reason)

    def _report(self, level: str, name: str, kind: str, **more: str) -> None:
        hint = f"versions are loaded, not proven; rm {self._path(kind)} to have it asked again"
        self._tell(level, name, engine=kind, hint=hint, **more)
