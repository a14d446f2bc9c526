"""A follower as a process: signals, the log, and the exit code."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from explorer_hooks.follower.follower import Follower
from explorer_hooks.follower.health import HealthServer
from explorer_hooks.follower.policy import EventListener, FollowOptions, TurnOutcome
from explorer_hooks.hook import Hook
from explorer_hooks.stopping import Stop
from syncd.errors import (
    EngineUnreachableError,
    LoadFailedError,
    NotReadyError,
    RefusedError,
    SyncdError,
    TimedOutError,
    TryAgainError,
)
from syncd.protocol.version import label_of

_ERRORS: Mapping[str, type[SyncdError]] = {
    "refused": RefusedError,
    "failed": LoadFailedError,
    "unreachable": EngineUnreachableError,
    "ended": NotReadyError,
    "nothing": TimedOutError,
}


def serve(
    job: str,
    hook: Hook,
    identity: str | None,
    options: FollowOptions,
    *,
    engine: str,
    listener: EventListener,
    hear: Callable[[TurnOutcome], None] = lambda _: None,
    once: bool = False,
    wait: float = 3600.0,
    health: str | None = None,
) -> None:
    """Follow a job until a signal or its end; with `once` until the first version is loaded or failed.

    Args:
        engine: The engine's name without secrets.
        once: Whether it ends once the engine runs what the policy names.
        wait: Seconds to wait for that.
        health: `HOST:PORT` to answer health checks at; None for nowhere.
    """
    stop = Stop(lambda _: KeyboardInterrupt())  # the second signal aborts the load that has begun
    with (
        stop.on_signals(),
        HealthServer.serving(health) if health is not None else contextlib.nullcontext() as server,
        Follower.open(job, hook, identity, options, engine=engine, listener=listener) as follower,
    ):
        name = follower.client.identity
        listener("info", "follower_started", {"job": job, "name": name, "engine": engine})
        if server is not None:
            server.health = follower.health
            listener("info", "health_served", {"url": server.url})
        if once and follower.is_current():
            return
        ends = time.monotonic() + wait if once else math.inf
        outcome = follower.run(lambda: stop() or time.monotonic() >= ends, hear, once=once)
        if once and outcome.kind == "nothing" and not stop():
            why = follower.engine_reason or "no version was due"
            outcome = TurnOutcome("nothing", reason=f"no version was loaded within {wait:g} s: {why}")
        listener("info", "follower_stopped", {"kind": outcome.kind, "reason": outcome.reason})
        if not stop() and (error := error_of(outcome, once=once)) is not None:
            raise error


def error_of(outcome: TurnOutcome, *, once: bool) -> SyncdError | None:
    if outcome.kind == "gone":
        return TryAgainError(outcome.reason)
    if outcome.kind == "applied" or not once:
        return None
    version = label_of(outcome.pair) if outcome.pair else "the version"
    reason = f"{version}: {outcome.reason}" if outcome.kind in ("refused", "failed") else outcome.reason
    return _ERRORS[outcome.kind](reason)


def log_listener(level: str, style: str, stream: TextIO) -> EventListener:
    """Return a listener that writes events to the log.

    Args:
        level: debug, info, warning or error.
        style: json, text, or auto: JSON unless the stream is a terminal.
    """
    import structlog  # noqa: PLC0415 - a tenth of a second that a library's user need not pay

    from syncd.observe import log  # noqa: PLC0415

    log.configure(level, stream, json=None if style == "auto" else style == "json")
    logger = structlog.get_logger()

    def listen(level: str, name: str, fields: Mapping[str, Any]) -> None:
        logger.log(log.LEVELS[level], name, **fields)

    return listen
