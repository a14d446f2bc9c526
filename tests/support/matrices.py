"""Rows of matrices: `make test` runs those that differ most, `make test-matrices` all of them."""

from collections.abc import Iterable

import pytest

LONG = pytest.mark.only_with(SYNCD_MATRICES="full")
"""Of what `make test-matrices` alone runs."""


def rows(all_rows: Iterable[object], *kept: object) -> list[object]:
    """Return parameters of a test: the rows that `make test` keeps, and the others with the mark `LONG`.

    Args:
        all_rows: Each a value, or a tuple of the values of several parameters.
        *kept: Which of them `make test` runs too.
    """
    return [row if row in kept else _marked(row) for row in all_rows]


def _marked(row: object) -> object:
    return pytest.param(*row, marks=LONG) if isinstance(row, tuple) else pytest.param(row, marks=LONG)
