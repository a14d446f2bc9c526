"""A base class for objects that are closed at the end of a `with` block."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from syncd.errors import SyncdError


class Closing(ABC):
    """An object that is closed at the end of a `with` block; an error of `close` never hides that of the block."""

    @abstractmethod
    def close(self) -> None:
        """Release everything that it holds."""

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
