"""What the loop itself remembers: kept in each full checkpoint, beside what the engine keeps."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from syncd.protocol.documents import Fields


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The loop's state at a step.

    Args:
        step: Steps trained so far.
        generation: The generation of the versions that it published.
        world_size: Ranks that saved it.
        sampler: The state of the sample strategy.
    """

    step: int
    generation: int
    world_size: int
    sampler: Mapping[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return {
            "protocol": 1,
            "step": self.step,
            "generation": self.generation,
            "world_size": self.world_size,
            "sampler": dict(self.sampler),
        }


def state_from(fields: Fields) -> TrainerState:
    """Return the state of its document.

    Raises:
        CorruptDataError: It is not one.
    """
    return TrainerState(
        fields.integer("step"),
        fields.integer("generation"),
        fields.integer("world_size", least=1),
        fields.record("sampler").document,
    )
