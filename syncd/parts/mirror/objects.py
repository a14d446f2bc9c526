"""What a mirror asks of an object store. obstore gives it for S3 and others (`obstore_objects`)."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class Found(NamedTuple):
    data: bytes
    tag: Any  # what `replace` compares
    modified: float  # seconds since the epoch by the store's clock


class Listed(NamedTuple):
    name: str
    size: int
    modified: float  # seconds since the epoch by the store's clock


class Objects(Protocol):
    """The objects below a prefix, by name. A missing object raises `FileNotFoundError`, all else a `SyncdError`."""

    address: str
    """The prefix as it was given."""

    def get(self, name: str) -> Found:
        """Return an object."""

    def get_changed(self, name: str, tag: Any) -> Found | None:
        """Return an object, None if it is still the one with this tag."""

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        """Return bytes of an object."""

    def modified(self, name: str) -> float:
        """Return when an object was written, by the store's clock."""

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one; return whether this call wrote it."""

    def put(self, name: str, data: bytes) -> None:
        """Write an object."""

    def replace(self, name: str, data: bytes, tag: Any) -> Any:
        """Write an object if it is still the one with this tag, or not there if that is None; return its new tag.

        Raises:
            FencedError: Another process has written it.
        """

    def list(self, prefix: str) -> list[Listed]:
        """Return all objects whose names begin with a prefix that ends in a slash."""

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; what is gone already is fine."""
