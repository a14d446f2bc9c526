"""A table that leaves columns out instead of breaking what stands in the others."""

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_ENDLESS = 1 << 16
_WRAPPED = 24
"""Columns of the terminal that a text which may be broken gets at least."""


class FittingTable(Table):
    """A table without lines that fits the width of its console.

    Args:
        *columns: The headings.
        drop: Headings of columns that may be left out, the first one first.
        wraps: Headings of columns whose texts may be broken over several lines.
    """

    def __init__(self, *columns: str, drop: Sequence[str], wraps: Sequence[str] = ()) -> None:
        super().__init__(*columns)
        self._drop, self._wraps = drop, wraps

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table without the columns for which there is no room, and a line that names them."""
        kept = [str(column.header) for column in self.columns]
        left_out = list[str]()
        for name in (name for name in self._drop if name in kept):
            if self._fits(console, options, kept):
                break
            kept.remove(name)
            left_out.append(name)
        yield self._table(kept, no_wrap=self._fits(console, options, kept))
        if left_out:
            yield Text(f"not shown: {', '.join(left_out)} (--json, or a wider terminal)", "dim")

    def _fits(self, console: Console, options: ConsoleOptions, kept: Sequence[str]) -> bool:
        table = self._table(kept, no_wrap=True, at_most=_WRAPPED)
        needed = Measurement.get(console, options.update(max_width=_ENDLESS), table)
        return needed.maximum <= options.max_width

    def _table(self, kept: Sequence[str], *, no_wrap: bool, at_most: int | None = None) -> Table:
        """Return a table of some columns.

        Args:
            kept: Their headings.
            no_wrap: Whether the others than `wraps` stand on one line.
            at_most: The width of `wraps`; None for what is left.
        """
        table = Table(box=None, pad_edge=False, header_style="bold")
        columns = [column for column in self.columns if column.header in kept]
        for column in columns:
            wraps = column.header in self._wraps
            table.add_column(
                column.header,
                justify=column.justify,
                overflow="fold",
                no_wrap=no_wrap and not wraps,
                max_width=at_most if wraps else None,
            )
        for cells in zip(*(column.cells for column in columns), strict=True):
            table.add_row(*cells)
        return table
