"""What a transport delivers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from syncd.protocol.label import engine_label
from syncd.protocol.receipt import FileRecord
from syncd.protocol.version import Version
from syncd.transports.tensors import TensorMeta


@dataclass(frozen=True, slots=True)
class WeightDirectory:
    """A version that can be loaded from this host.

    Args:
        version: The version.
        path: The directory to load: the staged copy or the job's own; the URI for kind remote.
        shards: Its safetensors files, names relative to `path`; none where others wrote the step.
        tensors: What each tensor is, by name; none where that cannot be known without the engine.
        verified: Whether every byte at `path` was compared with the manifest's digests already.
    """

    version: Version
    path: str
    shards: tuple[FileRecord, ...] = ()
    tensors: Mapping[str, TensorMeta] = field(default_factory=dict)
    verified: bool = False

    @property
    def label(self) -> str:
        """Return the version as engines are told it."""
        return engine_label(self.version.pair, self.version.digest)
