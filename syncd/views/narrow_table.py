"""A table that leaves columns out instead of breaking what stands in the others.

Texts are laid out here: rich takes 7 s for 5,000 rows of them. What is no text or does not fit is left to rich.
"""

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

_ENDLESS = 1 << 16
_WRAPPED = 24  # columns of the terminal that a text which may be broken gets at least

_GAP = 2


class FittingTable(Table):
    """A table without lines that fits the width of its console.

    Args:
        drop: Headings of columns that may be left out, the first one first.
        wraps: Headings of columns whose texts may be broken over several lines.
    """

    def __init__(self, *columns: str, drop: Sequence[str], wraps: Sequence[str] = ()) -> None:
        super().__init__(*columns)
        self._drop, self._wraps = drop, wraps

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table without the columns for which there is no room, and a line that names them."""
        widths = {str(column.header): self._width(console, options, column) for column in self.columns}
        kept, left_out = list(widths), list[str]()
        for name in (name for name in self._drop if name in widths):
            if self._needed(widths, kept) <= options.max_width:
                break
            kept.remove(name)
            left_out.append(name)
        columns = [column for column in self.columns if column.header in kept]
        is_text = all(isinstance(cell, str | Text) for column in columns for cell in column.cells)
        room = options.max_width - self._needed(widths, kept)
        if is_text and room >= 0:
            yield from _lines(console, columns, self._shared(widths, kept, room))
        else:
            yield self._table(columns, no_wrap=room >= 0)
        if left_out:
            yield Text(f"not shown: {', '.join(left_out)} (--json, or a wider terminal)", "dim")

    def _needed(self, widths: dict[str, int], kept: Sequence[str]) -> int:
        """Return the width of some columns if texts that may be broken are."""
        return sum(width + _GAP for width in self._shared(widths, kept, 0)) - _GAP

    def _shared(self, widths: dict[str, int], kept: Sequence[str], room: int) -> list[int]:
        """Return the widths of some columns; texts that may be broken share what room there is."""
        shared = list[int]()
        for name in kept:
            width = min(widths[name], _WRAPPED + room) if name in self._wraps else widths[name]
            room -= max(width - _WRAPPED, 0) if name in self._wraps else 0
            shared.append(width)
        return shared

    def _width(self, console: Console, options: ConsoleOptions, column: Column) -> int:
        """Return the width of a column if nothing in it is broken."""
        wide = options.update(max_width=_ENDLESS)
        cells = (column.header, *column.cells)
        return max(
            cell_len(str(cell))
            if isinstance(cell, str | Text)
            else Measurement.get(console, wide, cell).maximum
            for cell in cells
        )

    def _table(self, columns: Sequence[Column], *, no_wrap: bool) -> Table:
        """Return a table of some columns, texts broken where they must be; with `no_wrap` only those of `wraps`."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            stays = no_wrap and column.header not in self._wraps
            table.add_column(column.header, justify=column.justify, overflow="fold", no_wrap=stays)
        for cells in zip(*(column.cells for column in columns), strict=True):
            table.add_row(*cells)
        return table


def _lines(console: Console, columns: Sequence[Column], widths: Sequence[int]) -> Iterator[Segment]:
    """Yield the heading and the rows of texts; one that is wider than its column is broken over several lines."""
    rows = zip(*(column.cells for column in columns), strict=True)
    last = len(columns) - 1
    for row in ([Text(str(column.header), "bold") for column in columns], *rows):
        cells = [_broken(console, cell, width) for cell, width in zip(row, widths, strict=True)]
        for number in range(max(map(len, cells))):
            for index, (lines, column, width) in enumerate(zip(cells, columns, widths, strict=True)):
                text = lines[number] if number < len(lines) else ""
                pad = " " * (width - cell_len(str(text)))
                is_right = column.justify == "right"
                yield Segment(" " * _GAP * bool(index) + pad * is_right)
                yield from _styled(console, text)
                yield Segment("" if is_right or index == last else pad)
            yield Segment.line()


def _broken(console: Console, cell: RenderableType, width: int) -> Sequence[str | Text]:
    assert isinstance(cell, str | Text)
    if cell_len(str(cell)) <= width:
        return [cell]
    text = Text(cell) if isinstance(cell, str) else cell
    return list(text.wrap(console, width, overflow="fold"))


def _styled(console: Console, text: str | Text) -> Iterator[Segment]:
    if isinstance(text, str):
        yield Segment(text)
    elif text.spans:
        yield from text.render(console)
    else:
        yield Segment(text.plain, console.get_style(text.style) if text.style else None)
