"""Publishing a directory in one call, as `syncd publish` does in two."""

from syncd.protocol.disk import Disk
from syncd.protocol.layout import Job
from syncd.protocol.manifest import Manifest
from syncd.publishing import FollowingDisk, publish_export, read_export


def publish_directory(
    job: Job,
    step: int,
    source: str,
    *,
    rewind: bool = False,
    allow_nonfinite: bool = False,
    outside: Disk | None = None,
) -> Manifest:
    """Copy a directory of safetensors into a job as a sealed step, and announce it: `publish_export` of it."""
    disk = outside or FollowingDisk()
    export = read_export(disk, source)
    return publish_export(job, step, disk, export, rewind=rewind, allow_nonfinite=allow_nonfinite)
