"""The display on a terminal: a few lines that stay at the bottom while log lines scroll above them.

It draws itself a few times a second from a thread of its own, so that a terminal that does not read (Ctrl-S)
never holds up training. Whatever writes to stderr meanwhile is printed above it.
"""

import logging
import sys
from collections.abc import Iterator
from typing import Any

import structlog
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainer.reporting.figures import Fact, Figures, groups, head

REDRAWS = 4
"""Times a second."""

_BAR = 24


class Terminal:
    """Draws the figures at the bottom of a terminal.

    Args:
        figures: What is shown.
        console: The terminal.
    """

    def __init__(self, figures: Figures, console: Console) -> None:
        self._figures, self._console = figures, console
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=REDRAWS)
        self._live.start()
        self._logs = _Logs()

    def changed(self, now: float) -> None:
        """Do nothing: what changed is drawn with the next redraw."""

    def note(self, text: str) -> None:
        """Print a line above the display."""
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
    """Yield the handlers of the standard library's loggers that write to the terminal."""
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
