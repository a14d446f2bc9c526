"""Which display there is, and what it may not do: stop training because nobody can read it."""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from rich.console import Console

from trainer.config.model import JobConfig
from trainer.reporting.figures import Figures
from trainer.reporting.live import Terminal
from trainer.reporting.plain import Plain


class Display(Protocol):
    """One way of showing the figures."""

    def changed(self, now: float) -> None:
        """Show what has changed, if it is time."""

    def note(self, text: str) -> None:
        """Show a line of text."""

    def close(self) -> None:
        """End."""


class Progress:
    """What the loop talks to on rank 0.

    Lines go to stdout, which the log leaves alone; the live display to stderr, where the log scrolls above it.
    Open it after the log is set up. A display that nobody can read any more (a closed pipe) is given up silently.

    Args:
        figures: What is shown.
        display: How; None for nothing.
        clock: Monotonic seconds.
    """

    def __init__(
        self, figures: Figures, display: Display | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._figures, self._display, self._clock = figures, display, clock

    @classmethod
    def open(cls, config: JobConfig, total_steps: int | None, step: int) -> "Progress":
        """Start the display that the configuration asks for.

        Args:
            config: The configuration.
            total_steps: Steps after which the run is done; None for no end.
            step: The step that it goes on from.
        """
        figures = Figures(total_steps, step, time.monotonic())
        return cls(figures, _display(config.monitor.progress, figures))

    def update(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the metrics of a step; those that are missing keep their last value."""
        now = self._clock()
        self._figures.take(metrics, step, now)
        self._attempt(lambda display: display.changed(now))

    def note(self, text: str) -> None:
        """Show a line of text."""
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


def _display(kind: str, figures: Figures) -> Display | None:
    console = Console(stderr=True)
    if kind == "none":
        return None
    if kind == "live" or (kind == "auto" and console.is_terminal):
        return Terminal(figures, console)
    return Plain(figures, sys.stdout)
