"""Shows progress: live on a terminal, else as plain lines. A display that fails never stops training."""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import structlog
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainer.reporting.figures import Fact, RunFigures, groups, head

if TYPE_CHECKING:
    from syncd.jobfile.model import JobFile


class Display(Protocol):
    def changed(self, now: float) -> None:
        """Show what has changed, if it is time."""

    def note(self, text: str) -> None:
        """Show a line of text."""

    def close(self) -> None:
        """End."""


class Progress:
    """What the loop talks to on rank 0; nothing is shown if `display` is None. `clock` gives monotonic seconds.

    Lines go to stdout, which the log leaves alone; the live display to stderr, where the log scrolls above it.
    Open it after the log is set up. A display that nobody can read any more (a closed pipe) is given up silently.
    """

    def __init__(
        self, figures: RunFigures, display: Display | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._figures, self._display, self._clock = figures, display, clock

    @classmethod
    def open(cls, config: "JobFile", total_steps: int | None, step: int) -> "Progress":
        """Start the display that the configuration asks for; `total_steps` is None for a run without an end."""
        figures = RunFigures(total_steps, step, time.monotonic())
        return cls(figures, _display(config.monitor.progress, figures))

    def update(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of a step; those that are missing keep their last value."""
        now = self._clock()
        self._figures.update(metrics, step, now)
        self._attempt(lambda display: display.changed(now))

    def note(self, text: str) -> None:
        self._attempt(lambda display: display.note(text))

    def close(self) -> None:
        """End the display; the last figures stay."""
        self._attempt(lambda display: display.close())
        self._display = None

    def _attempt(self, act: Callable[[Display], None]) -> None:
        if self._display is None:
            return
        try:
            act(self._display)
        except (OSError, ValueError):  # ValueError: a closed stream
            display, self._display = self._display, None
            with suppress(OSError, ValueError):
                display.close()


def _display(kind: str, figures: RunFigures) -> Display | None:
    console = Console(stderr=True)
    if kind == "none":
        return None
    if kind == "live" or (kind == "auto" and console.is_terminal):
        return LiveDisplay(figures, console)
    return PlainDisplay(figures, sys.stdout)


EVERY = 5.0  # seconds between two lines that nothing asked for

_EVENTS = ("sync/step", "save/step")


class PlainDisplay:
    """Writes a line `every` so many seconds."""

    def __init__(self, figures: RunFigures, stream: TextIO, every: float = EVERY) -> None:
        self._figures, self._stream, self._every = figures, stream, every
        self._written: float | None = None
        self._shown = figures.step
        self._events = self._marks()

    def changed(self, now: float) -> None:
        """Write a line if it is time for one, or if there was a sync or a save."""
        marks = self._marks()
        due = self._written is None or now - self._written >= self._every
        if marks != self._events or (due and self._figures.values):
            self._line(now)
        self._events = marks

    def note(self, text: str) -> None:
        self._put(text)

    def close(self) -> None:
        if self._shown != self._figures.step:
            self._line(0.0)

    def _marks(self) -> list[float | None]:
        return [self._figures.values.get(name) for name in _EVENTS]

    def _line(self, now: float) -> None:
        parts = [head(self._figures), *groups(self._figures)]
        self._put("  ".join(" ".join(map(_pair, part)) for part in parts))
        self._written, self._shown = now, self._figures.step

    def _put(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()


def _pair(fact: Fact) -> str:
    label, value = fact
    return f"{label.replace(' ', '_')}={value.replace(' ', '')}"


REDRAWS = 4  # times a second

_BAR = 24


class LiveDisplay:
    """Draws the figures at the bottom of a terminal."""

    def __init__(self, figures: RunFigures, console: Console) -> None:
        self._figures, self._console = figures, console
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=REDRAWS)
        self._live.start()
        self._logs = _Logs()

    def changed(self, now: float) -> None:
        """Do nothing: what changed is drawn with the next redraw."""

    def note(self, text: str) -> None:
        self._console.print(Text(text))

    def close(self) -> None:
        """Leave the last figures on the screen and give stderr back."""
        self._logs.restore()
        self._live.stop()

    def _draw(self) -> RenderableType:
        return Group(self._bar(), *map(_line, groups(self._figures)))

    def _bar(self) -> RenderableType:
        row: list[RenderableType] = [_line(head(self._figures))]
        if self._figures.total is not None:
            row.insert(1, ProgressBar(self._figures.total, self._figures.step, width=_BAR))
        grid = Table.grid(padding=(0, 2))
        grid.add_row(*row)
        return grid


class _Logs:
    """Sends loggers that hold the real stderr through the one that rich has put in its place."""

    def __init__(self) -> None:
        self._factory = structlog.get_config()["logger_factory"]
        structlog.configure(logger_factory=structlog.WriteLoggerFactory(sys.stderr))
        self._handlers = [(each, each.setStream(sys.stderr)) for each in _on_terminal()]

    def restore(self) -> None:
        structlog.configure(logger_factory=self._factory)
        for handler, stream in self._handlers:
            if stream is not None:
                handler.setStream(stream)


def _on_terminal() -> Iterator["logging.StreamHandler[Any]"]:
    loggers = [logging.getLogger(), *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and handler.stream in (
                sys.__stderr__,
                sys.__stdout__,
            ):
                yield handler


def _line(facts: list[Fact]) -> Text:
    parts = [Text.assemble((f"{label} ", "dim"), (value, "bold")) for label, value in facts]
    return Text("  ", overflow="ellipsis", no_wrap=True).join(parts)
