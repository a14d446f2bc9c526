"""The header of a delta: a step stored as the changed elements of an earlier one, its parent.

The header is the law that retention and readers keep now; the encodings come with the data plane. A chain
goes from a delta through its parents to a keyframe, a step stored whole.
"""

from dataclasses import dataclass
from typing import Any

from syncd.errors import CorruptDataError
from syncd.protocol.documents import Fields

MAX_CHAIN = 1024
"""Links that are followed before a chain is called broken; a writer puts a keyframe long before."""


@dataclass(frozen=True, slots=True)
class DeltaHeader:
    """What a reader must know before it opens the payload.

    Args:
        parent: The step that the changes apply to; lower than the step itself.
        parent_digest: The digest of the parent's manifest, so that a rewritten parent is noticed.
        encoding: Name of the encoding of the changed elements.
        changed: Number of changed elements.
        elements: Number of elements of the whole model.
    """

    parent: int
    parent_digest: str
    encoding: str
    changed: int
    elements: int

    def as_document(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "parent": self.parent,
            "parent_digest": self.parent_digest,
            "encoding": self.encoding,
            "changed": self.changed,
            "elements": self.elements,
        }

    @staticmethod
    def from_fields(fields: Fields) -> "DeltaHeader":
        """Return the header of one JSON object, checked."""
        header = DeltaHeader(
            fields.integer("parent"),
            fields.text("parent_digest"),
            fields.text("encoding"),
            fields.integer("changed"),
            fields.integer("elements"),
        )
        if header.changed > header.elements:
            raise fields.wrong("changed", "at most `elements`")
        return header


def chain(step: int, parents: dict[int, int | None]) -> tuple[int, ...]:
    """Return the steps that loading `step` needs, itself first and its keyframe last.

    Args:
        step: The step to load.
        parents: The parent of each step there is; None for a step stored whole.

    Raises:
        CorruptDataError: A link is missing, points forward, or the chain is too long.
    """
    links = [step]
    while (parent := _parent(links[-1], parents)) is not None:
        if parent >= links[-1] or len(links) >= MAX_CHAIN:
            raise CorruptDataError(f"the chain of step {step} does not end in a keyframe")
        links.append(parent)
    return tuple(links)


def _parent(step: int, parents: dict[int, int | None]) -> int | None:
    if step not in parents:
        raise CorruptDataError(f"a chain needs step {step}, which is not there")
    return parents[step]
