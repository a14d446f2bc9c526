"""Chooses the way of each sync for `sync.method = "auto"`: feeds the choice with what the last syncs took.

Rank 0 knows what its own part took; what an explorer's load took, and where from, is in its presence.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from syncd.client.peers import process_of
from syncd.client.sync_policy import SyncMethod
from syncd.errors import SyncdError
from syncd.protocol.presence import Presence
from syncd.protocol.process import Process
from syncd.synchronizer import Synchronizer
from syncd.transports.broadcast.broadcaster import BACKEND
from trainer.engines.base import Sent
from trainer.method_choice import Measured, Measurements, choose

_WAITED_FOR = 4
"""Syncs whose loads are still waited for: explorers may take their time."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What an explorer says of its last load.

    Args:
        step: The step.
        source: memory, stage or files.
        seconds: What it took.
    """

    step: int
    source: str
    seconds: float


class Chooser:
    """Rank 0's side of `auto`.

    Args:
        sync: The trainer's synchronizer.
    """

    def __init__(self, sync: Synchronizer) -> None:
        self._sync, self._log = sync, structlog.get_logger()
        self._number = self._size = 0
        self._ways: dict[SyncMethod, Measured] = {}
        self._pending: dict[int, tuple[int, Sent]] = {}
        self._last: Sent | None = None
        self._present = SyncMethod.CHECKPOINT

    def choose(self, methods: Collection[SyncMethod], sent: Sent | None) -> SyncMethod:
        """Return how the next weights go out; an event says why. Where explorers cannot be looked at: by files.

        Args:
            methods: What the engine can do.
            sent: What became of the sync before.
        """
        try:
            return self._choose(methods, sent)
        except (SyncdError, OSError) as error:
            self._log.warning("method_choice_failed", way=SyncMethod.CHECKPOINT.value, reason=str(error))
            return SyncMethod.CHECKPOINT

    def _choose(self, methods: Collection[SyncMethod], sent: Sent | None) -> SyncMethod:
        if sent is not None and sent != self._last:
            self._last = sent
            self._pending[sent.step] = self._number, sent
            self._size = sent.size or self._size
        self._number += 1
        living = self._sync.explorers.living()
        self._take_in(living)
        lacking = dict(self._lacking(methods, living))
        found = choose(Measurements(self._number, self._size, dict(self._ways), lacking, self._present))
        if not found.is_trial:
            self._present = found.method
        self._log.info("method_chosen", way=found.method.value, reason=found.reason, trial=found.is_trial)
        return found.method

    def _take_in(self, living: Mapping[str, Presence]) -> None:
        """Take in what has become known of the last syncs."""
        loads = [loaded for one in living.values() if (loaded := loaded_of(one.info)) is not None]
        for step, (number, sent) in list(self._pending.items()):
            known = measured(number, sent, [one for one in loads if one.step == step])
            if known is not None:
                self._note(sent.method, known)
            if known is not None or self._number - number > _WAITED_FOR:
                del self._pending[step]

    def _note(self, method: SyncMethod, known: Measured) -> None:
        before = self._ways.get(method)
        if before is not None and before.number > known.number:
            return
        failures = before.failures + 1 if before is not None and known.seconds is None else known.failures
        self._ways[method] = Measured(known.number, known.size, known.seconds, failures)

    def _lacking(
        self, methods: Collection[SyncMethod], living: Mapping[str, Presence]
    ) -> Iterator[tuple[SyncMethod, str]]:
        if SyncMethod.MEMORY not in methods:
            yield SyncMethod.MEMORY, "no copies can be made"
        elif not any(_is_of_this_host(one) for one in living.values()):
            yield SyncMethod.MEMORY, "no explorer is on this host"
        if SyncMethod.NCCL not in methods:
            yield SyncMethod.NCCL, "the engine does not broadcast"
        elif not self._sync.broadcast_members(BACKEND):
            yield SyncMethod.NCCL, "no explorer takes part"


def measured(number: int, sent: Sent, loads: Collection[Loaded]) -> Measured | None:
    """Return what a sync has shown of its way, None while that is not known.

    Args:
        number: The sync.
        sent: What became of it on the trainer's side.
        loads: The loads of its step by explorers.
    """
    failed = Measured(number, sent.size, None, failures=1)
    if not sent.is_done:
        return failed
    if sent.method is SyncMethod.NCCL:
        return Measured(number, sent.size, sent.seconds)
    if not loads:
        return None
    if sent.method is SyncMethod.MEMORY and all(one.source != "memory" for one in loads):
        return failed
    return Measured(number, sent.size, sent.seconds + max(one.seconds for one in loads))


def loaded_of(info: Mapping[str, Any]) -> Loaded | None:
    """Return what an explorer's presence says of its last load, None where it says nothing usable."""
    found = info.get("loaded")
    if not isinstance(found, Mapping):
        return None
    step, source, seconds = found.get("step"), found.get("source"), found.get("seconds")
    if type(step) is not int or not isinstance(source, str) or not isinstance(seconds, int | float):
        return None
    return Loaded(step, source, float(seconds)) if seconds >= 0 else None


def _is_of_this_host(explorer: Presence) -> bool:
    process = process_of(explorer)
    return process is not None and process.boot == Process.current().boot != ""
