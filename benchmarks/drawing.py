"""Bars and lines as SVG, from numbers alone: the same text on each machine, legible in light and in dark."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH = 760
_LEFT, _RIGHT = 170, 60
_BAR, _GAP, _HEADING = 20, 7, 26
_TOP = 96
_FONT = "font-family:system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;font-size:13px"
_LIGHT = ("#ffffff", "#d0d7de", "#1f2328", "#59636e", "#0072b2", "#d55e00", "#009e73", "#aa4499", "#cf222e")
_DARK = ("#161b22", "#3d444d", "#e6edf3", "#9198a1", "#56b4e9", "#e69f00", "#2fc48d", "#d68fc0", "#ff7b72")
SERIES = ("blue", "orange", "green", "pink")
_NAMES = ("card", "rule", "text", "mute", *SERIES, "miss")


class Bar(NamedTuple):
    """One horizontal bar, of parts that follow each other; without parts the heading of a group."""

    label: str
    parts: Sequence[tuple[str, float]] = ()  # color, length
    end: str = ""  # what stands behind it
    least_most: tuple[float, float] | None = None


class Line(NamedTuple):
    """One line, with a mark at each point if there are few."""

    label: str
    color: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


class Axis(NamedTuple):
    """Which values stand on an axis, and how they are written."""

    name: str
    ticks: Sequence[float]
    write: Callable[[float], str] = "{:g}".format
    log: bool = False

    def place(self, value: float, start: float, end: float) -> float:
        """Return where a value lies between two ends."""
        low, high = (math.log10(tick) if self.log else tick for tick in (self.ticks[0], self.ticks[-1]))
        at = math.log10(value) if self.log else value
        return start + (at - low) / (high - low) * (end - start)


class Drawing:
    """Collects the elements of one picture on a card of its own, so that the page's color does not matter."""

    def __init__(self, title: str, note: str, legend: Mapping[str, str]) -> None:
        self._title, self._note = title, note
        self._elements: list[str] = []
        self.text(20, 30, title, "text title")
        self.text(20, 50, note, "mute")
        self._legend(legend)

    def _legend(self, legend: Mapping[str, str]) -> None:
        at = 20.0
        for color, name in legend.items():
            self._elements.append(f'<rect x="{at:g}" y="64" width="12" height="12" rx="2" class="{color}"/>')
            self.text(at + 18, 75, name, "text")
            at += 40 + 7.2 * len(name)

    def text(self, x: float, y: float, words: str, style: str = "text", anchor: str = "start") -> None:
        """Write words."""
        self._elements.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def rule(self, start: tuple[float, float], end: tuple[float, float], style: str = "rule") -> None:
        """Draw a straight line."""
        (x1, y1), (x2, y2) = start, end
        self._elements.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style} stroke"/>'
        )

    def bar(self, x: float, y: float, width: float, color: str) -> None:
        """Draw one part of a bar."""
        self._elements.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{_BAR}" class="{color}"/>'
        )

    def curve(self, points: Sequence[tuple[float, float]], line: Line) -> None:
        """Draw a line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = " dashed" if line.dashed else ""
        self._elements.append(f'<polyline points="{path}" class="{line.color} curve{dashed}"/>')
        for x, y in points if len(points) < 10 else ():
            self._elements.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="{line.color}"/>')

    def svg(self, height: float) -> str:
        """Return the picture."""
        body = "\n".join(self._elements)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
            f'height="{height:g}" role="img">\n<title>{escape(self._title)}</title>\n'
            f"<desc>{escape(self._note)}</desc>\n<style>\n{_style()}\n</style>\n"
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="8" class="card"/>\n'
            f"{body}\n</svg>\n"
        )


def _style() -> str:
    rules = [
        f"text{{{_FONT}}}",
        ".title{font-size:16px;font-weight:600}",
        ".curve{fill:none;stroke-width:2}",
        ".dashed{stroke-dasharray:5 4}",
        ".miss.stroke{stroke-dasharray:4 3;stroke-width:1.5}",
        *_colors(_LIGHT),
        "@media (prefers-color-scheme:dark){" + "".join(_colors(_DARK)) + "}",
    ]
    return "\n".join(rules)


def _colors(palette: Sequence[str]) -> list[str]:
    filled = [f".{name}{{fill:{color}}}" for name, color in zip(_NAMES, palette, strict=True)]
    stroked = [
        f".{name}.stroke,.{name}.curve{{stroke:{color}}}" for name, color in zip(_NAMES, palette, strict=True)
    ]
    return [*filled, *stroked, ".curve{fill:none}", f".card{{stroke:{palette[1]}}}"]


def bars(drawing: Drawing, rows: Sequence[Bar], axis: Axis, target: tuple[float, str] | None = None) -> str:
    """Return horizontal bars, one below the other.

    Args:
        drawing: Title and legend.
        rows: The bars, and headings of groups.
        axis: The lengths.
        target: Where a dashed line stands, and its words.
    """
    height = _TOP + sum(_BAR + _GAP if row.parts else _HEADING for row in rows) + 50
    bottom = height - 44
    _grid(drawing, axis, bottom)
    at = float(_TOP)
    for row in rows:
        at = _bar(drawing, row, axis, at)
    if target:
        x = axis.place(target[0], _LEFT, WIDTH - _RIGHT)
        drawing.rule((x, _TOP - 6), (x, bottom), "miss")
        drawing.text(x + 50, _TOP - 10, target[1], "miss", "end")
    return drawing.svg(height)


def _grid(drawing: Drawing, axis: Axis, bottom: float) -> None:
    for tick in axis.ticks:
        x = axis.place(tick, _LEFT, WIDTH - _RIGHT)
        drawing.rule((x, _TOP - 4), (x, bottom))
        drawing.text(x, bottom + 16, axis.write(tick), "mute", "middle")
    drawing.text((_LEFT + WIDTH - _RIGHT) / 2, bottom + 34, axis.name, "mute", "middle")


def _bar(drawing: Drawing, row: Bar, axis: Axis, at: float) -> float:
    """Draw one row; return where the next one begins."""
    middle = at + _BAR / 2 + 4.5
    if not row.parts:
        drawing.text(20, middle, row.label, "text title-row")
        return at + _HEADING
    drawing.text(_LEFT - 10, middle, row.label, "text", "end")
    reached = 0.0
    for color, length in row.parts:
        start, end = (axis.place(value, _LEFT, WIDTH - _RIGHT) for value in (reached, reached + length))
        drawing.bar(start, at, end - start, color)
        reached += length
    _end(drawing, row, axis, at, reached)
    return at + _BAR + _GAP


def _end(drawing: Drawing, row: Bar, axis: Axis, at: float, reached: float) -> None:
    if row.least_most:
        least, most = (axis.place(value, _LEFT, WIDTH - _RIGHT) for value in row.least_most)
        drawing.rule((least, at + _BAR / 2), (most, at + _BAR / 2), "text")
        reached = max(reached, row.least_most[1])
    drawing.text(axis.place(reached, _LEFT, WIDTH - _RIGHT) + 6, at + _BAR / 2 + 4.5, row.end)


def lines(drawing: Drawing, curves: Sequence[Line], x_axis: Axis, y_axis: Axis, height: float = 380) -> str:
    """Return curves over two axes, each with its name at its end."""
    left, right, bottom = 70, WIDTH - 150, height - 50
    for tick in y_axis.ticks:
        y = y_axis.place(tick, bottom, _TOP)
        drawing.rule((left, y), (right, y))
        drawing.text(left - 8, y + 4.5, y_axis.write(tick), "mute", "end")
    for tick in x_axis.ticks:
        x = x_axis.place(tick, left, right)
        drawing.text(x, bottom + 18, x_axis.write(tick), "mute", "middle")
    drawing.text((left + right) / 2, bottom + 36, x_axis.name, "mute", "middle")
    drawing.text(20, _TOP - 8, y_axis.name, "mute")
    for line in curves:
        points = [(x_axis.place(x, left, right), y_axis.place(y, bottom, _TOP)) for x, y in line.points]
        drawing.curve(points, line)
        drawing.text(points[-1][0] + 10, points[-1][1] + 4.5, line.label, line.color)
    return drawing.svg(height)
