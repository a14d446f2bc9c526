"""Names of step directories, parsed strictly: what is not exactly one is none."""

import re
from collections.abc import Callable

from syncd.protocol.layout import MAX_STEP


def numbered_after(prefix: str) -> Callable[[str], int | None]:
    """Return a parser of names that are a prefix and a step, without leading zeros and in ASCII."""
    pattern = re.compile(rf"{re.escape(prefix)}(0|[1-9][0-9]{{0,15}})", re.ASCII)

    def step_of(name: str) -> int | None:
        match = pattern.fullmatch(name)
        step = int(match[1]) if match else None
        return step if step is not None and step <= MAX_STEP else None

    return step_of
