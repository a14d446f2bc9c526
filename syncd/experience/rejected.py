"""Sets aside what lies among the batches and is none."""

import hashlib
import os

from syncd.experience import batch_paths
from syncd.protocol.disk import Clock
from syncd.protocol.documents import encode
from syncd.protocol.layout import Job, is_identity


def set_aside(job: Job, clock: Clock, explorer: str, name: str, reason: str) -> None:
    """Move what is not a batch to `.rejected/<explorer>/`, following no link, with the reason beside it."""
    directory = batch_paths.rejected(job, explorer)
    job.disk.make_directory(directory)
    kept = name if is_identity(name) else f"foreign-{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"
    document = {"explorer": explorer, "name": _plain(name), "reason": _plain(reason), "at": clock.time()}
    job.disk.replace(f"{directory}/{kept}.reason.json", encode(document))
    job.disk.rename(f"{batch_paths.batches(job, explorer)}/{name}", f"{directory}/{kept}")


def _plain(text: str) -> str:
    # A name may be no text at all; what is written about it must be.
    return text.encode("ascii", "backslashreplace").decode()
