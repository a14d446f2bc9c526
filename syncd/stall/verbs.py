"""Verbs that end although the mount does not answer.

A call to a dead mount stands in the kernel, and some such calls cannot even be killed: a process in which a thread
stands so is not gone before the mount is back, whoever ends it. So the verb works in a child process, and this one,
which asks the mount nothing, watches the calls that the child notes in shared memory. When one has not come
back for too long, the child is killed, however long that takes, and this process says so and ends.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click

from syncd.console import OwnProcess, tell
from syncd.errors import StuckError, SyncdError
from syncd.protocol.local_disk import SystemClock
from syncd.stall.calls import CHANGING, IS_IT_UP, STUCK_AFTER, Call, InHand
from syncd.stall.child import Board, Child, start

_NOTED = "syncd.noted"
_EVERY = 0.25
_GRACE = 2.0
"""Seconds that a call is given to come back once the verb was told to end."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What is seen of the work while it goes on.

    Args:
        call: The call in hand.
        seconds: For how long it has been in hand.
        elapsed: Seconds since the verb began.
        may_have_changed: Whether a call that changes something has been begun.
    """

    call: Call
    seconds: float
    elapsed: float
    may_have_changed: bool

    def __str__(self) -> str:
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - self.seconds))
        return f"the mount has not answered for {self.seconds:.0f} s, since {since} ({self.call.what})"


class Waited:
    """For how long one call has been waited for; a host that sleeps and a command that is stopped do not wait."""

    def __init__(self) -> None:
        self._call: Call | None = None
        self._seconds = self._at = 0.0

    def look(self, call: Call | None, now: float, most: float) -> float:
        """Return the seconds so far.

        Args:
            call: The call in hand.
            now: The time of this look.
            most: Seconds that may lie between two looks; what is beyond was no waiting.
        """
        self._seconds = self._seconds + min(now - self._at, most) if call == self._call else 0.0
        self._call, self._at = call, now
        return self._seconds


Verdict = Callable[[Mapping[str, Any], Seen], SyncdError | None]
"""Given the verb's arguments and what is seen: what the verb ends with, None as long as it is waited for."""


class Attended(click.Command):
    """A verb that is left when one call to the mount has taken `--patience` seconds.

    Args:
        *args: As click takes them.
        acts: What is not known of such an end, with the verb's arguments in braces; None where nothing is changed.
        verdict: What it ends with instead.
        option: Whether it has `--patience`.
        when: Says by its arguments whether it is such a verb.
        **more: As click takes them.
    """

    def __init__(
        self,
        *args: Any,
        acts: str | None = None,
        verdict: Verdict | None = None,
        option: bool = True,
        when: Callable[[Mapping[str, Any]], bool] = lambda _: True,
        **more: Any,
    ) -> None:
        super().__init__(*args, **more)
        if option:
            self.params.append(_patience())
        self._acts, self._verdict, self._when = acts, verdict or self._stuck, when

    def invoke(self, ctx: click.Context) -> Any:
        """Work in a child process, and watch it from this one."""
        patience: float = ctx.params.pop("patience", STUCK_AFTER)
        if isinstance(ctx.obj, OwnProcess) and self._when(ctx.params):
            board = Board()
            child = start()
            if child is not None:
                ctx.exit(self._watch(child, board, patience, ctx.params))
            ctx.obj.is_child = True
            ctx.meta[_NOTED] = Noted(board)
        return super().invoke(ctx)

    def _watch(self, child: Child, board: Board, patience: float, given: Mapping[str, Any]) -> int:
        clock, every, waited = SystemClock(), min(patience / 2, _EVERY), Waited()
        began = clock.monotonic()
        with child:
            while not child.has_ended(every):
                (call, changing), now = board.read(), clock.monotonic()
                seconds = waited.look(call, now, 2 * every)
                if call is None:
                    continue
                seen = Seen(call, now - call.since, now - began, changing)
                if child.told is not None and min(seconds, now - child.told_at) >= _GRACE:
                    tell(self._stuck(given, seen))
                    return 128 + child.told
                if seconds - call.allowance >= patience and (error := self._verdict(given, seen)) is not None:
                    raise error
            return child.code()

    def _stuck(self, given: Mapping[str, Any], seen: Seen) -> StuckError:
        said, hint = str(seen), IS_IT_UP
        if self._acts is not None and seen.may_have_changed:
            said += f"; it is not known whether {self._acts.format_map(given)}"
            hint += f" Then: syncd status {given['job']}"
        elif self._acts is not None:
            said += "; nothing was changed"
        return StuckError(said, path=seen.call.path, hint=hint)


class Noted(InHand):
    """The calls in hand, for another process to read.

    Args:
        board: Where it reads them.
    """

    def __init__(self, board: Board) -> None:
        super().__init__(SystemClock())
        self._board, self._changing = board, False

    def _put(self, call: Call | None) -> None:
        super()._put(call)
        self._changing = self._changing or (call is not None and call.what in CHANGING)
        # Mostly one thread works: what it has in hand is the oldest.
        self._board.write(call if len(self._calls) == (call is not None) else self.oldest(), self._changing)


def noted() -> InHand:
    """Return where the verb that is at work notes its calls."""
    context = click.get_current_context(silent=True)
    if context is None:
        return InHand(SystemClock())
    found: InHand = context.meta.setdefault(_NOTED, InHand(SystemClock()))
    return found


def _patience() -> click.Option:
    return click.Option(
        ["--patience"],
        type=click.FloatRange(0.1, 3600),
        default=STUCK_AFTER,
        show_default=True,
        metavar="S",
        help="Seconds that one operation on the mount may take before this ends.",
    )
