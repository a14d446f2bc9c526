"""The measured choice between ways of weights: for `sync.method = "auto"` and for `sync.delta = "auto"`.

A way stays until another one takes clearly less time. One that did not pay is measured again after some steps, so
that one that got faster is noticed. The trainer measures its own part; what an explorer's load took, and from where,
is in the explorer's presence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from syncd.protocol.documents import record_in

AGAIN = 16
"""Steps after which a way as fast as the fastest is measured again; n times as many if it is n times slower."""

RARELY = 16  # the largest such factor
STICKS = 0.9  # the way is changed once another one takes less than this part of the present one's time


@dataclass(frozen=True, slots=True)
class ExplorerLoad:
    step: int
    source: str  # memory, stage or files
    seconds: float  # what it took
    # What it took to read the step and to fill a model of the explorer's process; None for other engines.
    filled: float | None = None


def load_of(info: Mapping[str, Any]) -> ExplorerLoad | None:
    load = record_in(ExplorerLoad, info, "loaded")
    return load if load and load.seconds >= 0 else None


def fastest(expected: Mapping[str, float], present: str) -> str:
    """Return the way that takes the least time; the present one while the difference may be noise.

    `expected` has seconds; of two equal ones the earlier is faster. `present` is what was last chosen for its speed.
    """
    least = min(expected, key=lambda way: expected[way])
    is_about_equal = present in expected and expected[least] > STICKS * expected[present]
    return present if is_about_equal else least


def due_after(expected: float | None, least: float, failures: int = 0) -> int:
    """Return the steps after which a way is measured again.

    It would take `expected` seconds (None if it failed, `failures` times in a row), the fastest one `least`.
    """
    if expected is None:
        return AGAIN * min(1 << max(failures - 1, 0), RARELY)
    factor = expected / least if least > 0 else float(RARELY)
    return AGAIN * max(1, min(int(factor), RARELY))
