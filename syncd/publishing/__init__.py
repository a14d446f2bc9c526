"""Any directory of safetensors, from any trainer, becomes a step of a job."""

from syncd.errors import NonFiniteError
from syncd.publishing.export import Export, FollowingDisk, read_export
from syncd.publishing.publish import publish_directory, publish_export

__all__ = [
    "Export",
    "FollowingDisk",
    "NonFiniteError",
    "publish_directory",
    "publish_export",
    "read_export",
]
