"""Verbs that end although the mount does not answer: the verb works in a thread, and the main thread watches it."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, NoReturn

import click

from syncd.console import print_error
from syncd.errors import StuckError, SyncdError
from syncd.protocol.local_disk import SystemClock
from syncd.stall.calls import MOUNT_HINT, STUCK_AFTER, PendingCalls
from syncd.stall.worker import CallWait, WorkerThread, watch_calls

_CALLS = "syncd.calls"
_EVERY = 0.25
_GRACE = 2.0
"""Seconds that a call may still take after a signal has asked the verb to end."""

OnStall = Callable[[Mapping[str, Any], CallWait], SyncdError | None]
"""Given the verb's arguments and the wait: the error to end with, None to wait longer."""


class MountVerb(click.Command):
    """A verb that ends when one call to the mount has taken `--patience` seconds.

    Args:
        changes: What is unknown after such an end, with the verb's arguments in braces; None if it changes nothing.
        on_stall: Returns the error to end with; by default `StuckError`.
        cleans_up: Whether SIGTERM and SIGHUP end the verb as an error does, so that it removes what is unfinished.
        only: The flag without which the verb is not watched here; the verb has no `--patience` then.
    """

    def __init__(
        self,
        *args: Any,
        changes: str | None = None,
        on_stall: OnStall | None = None,
        cleans_up: bool = False,
        only: str | None = None,
        **more: Any,
    ) -> None:
        super().__init__(*args, **more)
        if only is None:
            self.params.append(_patience())
        self._changes, self._on_stall, self._only = changes, on_stall, only
        self._signals = (signal.SIGINT, *((signal.SIGTERM, signal.SIGHUP) if cleans_up else ()))

    def invoke(self, ctx: click.Context) -> Any:
        patience: float = ctx.params.pop("patience", STUCK_AFTER)
        if self._only is not None and not ctx.params[self._only]:
            return super().invoke(ctx)
        calls = pending_calls()
        work = WorkerThread(lambda: self._work(ctx), "verb")
        with _cancelled_by(self._signals, calls) as signals:
            work.start()
            self._watch(work, calls, signals, patience, ctx.params)
        return work.result()

    def _work(self, ctx: click.Context) -> Any:
        with ctx.scope(cleanup=False):  # click keeps the current context for each thread
            return super().invoke(ctx)

    def _watch(
        self,
        work: WorkerThread[Any],
        calls: PendingCalls,
        signals: list[tuple[int, float]],
        patience: float,
        values: Mapping[str, Any],
    ) -> None:
        clock = SystemClock()
        for wait in watch_calls(work, calls, clock, min(patience / 2, _EVERY)):
            stuck = self._stuck(values, wait, changed=calls.may_have_changed)
            if signals and min(wait.waited, clock.monotonic() - signals[0][1]) >= _GRACE:
                leave(stuck, 128 + signals[0][0])
            if wait.waited - wait.call.allowance >= patience:
                error = self._on_stall(values, wait) if self._on_stall else stuck
                if error is not None:
                    leave(error, error.exit_code)

    def _stuck(self, values: Mapping[str, Any], wait: CallWait, *, changed: bool) -> StuckError:
        message, hint = stalled(wait), MOUNT_HINT
        if self._changes is not None and changed:
            message += f"; it is not known whether {self._changes.format_map(values)}"
            hint += f" Then: syncd status {values['job']}"
        elif self._changes is not None:
            message += "; nothing was changed"
        return StuckError(message, path=wait.call.path, hint=hint)


def stalled(wait: CallWait) -> str:
    """Return which call does not return, and since when, for people to read."""
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - wait.seconds))
    return f"{wait}, since {since} ({wait.call.what})"


def pending_calls() -> PendingCalls:
    """Return where the verb that runs notes its calls."""
    context = click.get_current_context(silent=True)
    if context is None:
        return PendingCalls(SystemClock())
    calls: PendingCalls = context.meta.setdefault(_CALLS, PendingCalls(SystemClock()))
    return calls


@contextlib.contextmanager
def _cancelled_by(numbers: Iterable[int], calls: PendingCalls) -> Iterator[list[tuple[int, float]]]:
    """Cancel the calls at the first of these signals, and list those that came, with the time of each.

    A signal that is ignored, as SIGINT is in a background job, stays ignored.
    """
    clock, received = SystemClock(), list[tuple[int, float]]()

    def handle(number: int, _: FrameType | None) -> None:
        received.append((number, clock.monotonic()))
        is_interrupt = number == signal.SIGINT
        calls.cancel(KeyboardInterrupt() if is_interrupt else click.exceptions.Exit(128 + number))

    before = {number: signal.getsignal(number) for number in numbers}
    handled = {number: previous for number, previous in before.items() if previous is not signal.SIG_IGN}
    for number in handled:
        signal.signal(number, handle)
    try:
        yield received
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)


def leave(error: SyncdError, code: int) -> NoReturn:
    """Print an error and end the process, whatever its threads wait for."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    print_error(error)
    sys.stderr.flush()
    os._exit(code)


def _patience() -> click.Option:
    return click.Option(
        ["--patience"],
        type=click.FloatRange(0.1, 3600),
        default=STUCK_AFTER,
        metavar="S",
        help="Give up when one operation on the mount takes longer than this many seconds.",
    )
