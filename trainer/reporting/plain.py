"""Lines for logs and pipes: one every few seconds, and one for each sync and save."""

from typing import TextIO

from trainer.reporting.figures import Fact, Figures, groups, head

EVERY = 5.0
"""Seconds between two lines that nothing asked for."""

_EVENTS = ("sync/step", "save/step")


class Plain:
    """Writes lines.

    Args:
        figures: What is shown.
        stream: Where.
        every: Seconds between two lines.
    """

    def __init__(self, figures: Figures, stream: TextIO, every: float = EVERY) -> None:
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
        """Write a line of text."""
        self._put(text)

    def close(self) -> None:
        """Write the last step, if it was not."""
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
