"""How long each part of a load takes."""

import contextlib
from collections.abc import Iterator

from syncd.protocol.disk import Clock

NOTICED = "noticed"
"""The part that is the age of the version when it was seen."""


class Timings(dict[str, float]):
    """Seconds by the name of the part.

    Args:
        clock: This host's clock.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    @property
    def load(self) -> float:
        """Return the seconds of all parts of the load: not of what came before it was noticed."""
        return round(sum(seconds for name, seconds in self.items() if name != NOTICED), 6)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure one part, also where it fails."""
        begin = self._clock.monotonic()
        try:
            yield
        finally:
            self[name] = round(self.get(name, 0.0) + self._clock.monotonic() - begin, 6)
