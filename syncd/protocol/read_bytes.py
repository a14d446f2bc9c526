"""What an explorer's presence says of where its bytes came from, if it reads from other hosts too."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from syncd.protocol.documents import record_in

INFO = "read"  # the fact of a presence that has them


@dataclass(frozen=True, slots=True)
class ReadBytes:
    """The bytes that an explorer's host has read since its start."""

    origin: int  # from the file system of the job
    peers: int  # from other hosts
    # Whether it read more of the last version from the file system than a quarter beyond its share.
    over_budget: bool = False

    def document(self) -> dict[str, Any]:
        return asdict(self)


def read_bytes_of(info: Mapping[str, Any]) -> ReadBytes | None:
    """Return what a presence's `info` says, None if it says nothing that can be read."""
    return record_in(ReadBytes, info, INFO)
