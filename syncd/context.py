"""What is closed at the end of a `with` block."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from syncd.errors import SyncdError


class Closing(ABC):
    """Something that is closed on the way out; an error of closing never hides the one that ended the body."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except SyncdError:
            if error is None:  # what ended the body matters more
                raise
