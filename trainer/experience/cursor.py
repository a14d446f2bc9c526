"""How far the batches of each explorer have been read: the reader's part of the trainer's state."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from syncd.protocol.documents import Fields, record_from

STATE = "trainer_meta.json: sample strategy"  # what errors about a state name as their place


class Origin(NamedTuple):
    explorer: str
    seq: int
    row: int


class BatchFile(NamedTuple):
    explorer: str
    seq: int


@dataclass
class BatchCursor:
    # The highest number read of each explorer; all below it have been read too.
    through: dict[str, int] = field(default_factory=dict)
    last: str = ""  # the explorer whose batch was read last: the round continues behind it

    def after(self, explorers: Iterable[str]) -> list[str]:
        """Return explorers in the order of this round."""
        names = sorted(explorers)
        return [name for name in names if name > self.last] + [name for name in names if name <= self.last]

    def advance(self, file: BatchFile) -> None:
        self.through[file.explorer], self.last = file.seq, file.explorer

    def document(self) -> dict[str, Any]:
        return {"through": dict(sorted(self.through.items())), "last": self.last}


def cursor_from(fields: Fields) -> BatchCursor:
    return record_from(BatchCursor, fields, "through", "last")


def fields_of(state: Mapping[str, Any], kind: str) -> Fields:
    fields = Fields(state, STATE)
    if fields.text("kind") != kind:
        raise fields.wrong("kind", f"{kind!r}: the run was started with another sample strategy")
    return fields
