"""What a mirror says of itself, in the `info` of the presence that it has in each job that it reads or leads."""

from dataclasses import asdict, dataclass
from typing import Any

from syncd.protocol.documents import record_in
from syncd.protocol.presence import Presence

KEY = "mirror"  # the key in `info`
_LONGEST = 400  # letters of a text that are kept


@dataclass(frozen=True, slots=True)
class MirrorReport:
    source: str  # what it copies, as it was given
    target: str  # where to, as it was given
    state: str = "starting"  # starting, current, copying, failing or standby
    generation: int | None = None  # of the newest version at the target
    step: int | None = None
    behind: int = 0  # steps that the target is behind the source; at least 1 while a version is missing
    left: int = 0  # bytes to copy before the source's newest version can be published
    detail: str = ""  # why it fails
    since: float = 0.0  # when this state began: seconds since the epoch on the mirror's clock

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "detail": self.detail[:_LONGEST]}


def mirror_of_presence(presence: Presence) -> MirrorReport | None:
    """Return what the mirror of a presence says of itself, None if it is no mirror's or cannot be read."""
    return record_in(MirrorReport, presence.info, KEY)
