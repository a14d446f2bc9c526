"""What a step must hold before an engine may load it; pure, one answer for all who seal, publish, verify and load.

A delta in which nothing changed may be empty. The payload of a remote step is elsewhere. That no tensor is in two
shards is told by their headers: `safetensors.signature`.
"""

from collections.abc import Sequence

from syncd.protocol.delta import DeltaHeader
from syncd.protocol.layout import ACTOR
from syncd.protocol.receipt import FileRecord


def incompleteness(kind: str, shards: Sequence[FileRecord], delta: DeltaHeader | None = None) -> str:
    """Return why an engine could not load the shards of a step, empty when it could.

    Args:
        kind: The kind of the step: weights, delta, lora or remote.
        shards: The records of its shards.
        delta: The header of a delta.
    """
    if kind == "remote":
        return ""
    outside = next((shard.name for shard in shards if not shard.name.startswith(f"{ACTOR}/")), None)
    if outside is not None:
        return f"shard {outside} is outside of {ACTOR}/, the directory that engines load"
    if delta is not None and delta.changed == 0:
        return ""
    if not shards:
        return "the step has no shard"
    return "" if any(shard.tensors for shard in shards) else "the shards of the step hold no tensor"
