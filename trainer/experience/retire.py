"""Where batches go: set aside with a reason, removed, or kept in the archive."""

import contextlib
import hashlib
import os
from collections.abc import Set as AbstractSet
from typing import Literal

from syncd.experience import places
from syncd.protocol.disk import MISSING, Clock
from syncd.protocol.documents import encode
from syncd.protocol.layout import Job, is_identity
from trainer.experience.cursor import File

Consumed = Literal["delete", "archive"]
"""What becomes of batches once a saved state covers them."""


def set_aside(job: Job, clock: Clock, explorer: str, name: str, reason: str) -> None:
    """Move what is not a batch to `.rejected/<explorer>/`, following no link, with the reason beside it.

    Raises:
        OSError: It could not be moved; whoever asked leaves it where it is.
    """
    directory = places.rejected(job, explorer)
    job.disk.make_directory(directory)
    kept = name if is_identity(name) else f"foreign-{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"
    document = {"explorer": explorer, "name": _plain(name), "reason": _plain(reason), "at": clock.time()}
    job.disk.replace(f"{directory}/{kept}.reason.json", encode(document))
    job.disk.rename(f"{places.batches(job, explorer)}/{name}", f"{directory}/{kept}")


def _plain(text: str) -> str:
    # A name may be no text at all; what is written about it must be.
    return text.encode("ascii", "backslashreplace").decode()


def retire(job: Job, through: dict[str, int], keep: AbstractSet[File], consumed: Consumed) -> int:
    """Remove or archive the batches up to each explorer's number, all but those to keep; return how many.

    The number is noted first, so that a writer that starts meanwhile uses none of them again.
    """
    retired = 0
    for explorer, most in sorted(through.items()):
        present = places.numbers(job, places.batches(job, explorer))
        due = sorted(seq for seq in present if seq <= most and File(explorer, seq) not in keep)
        if due:
            places.mark_consumed(job, explorer, max(most, places.consumed_through(job, explorer)))
            retired += sum(_retire(job, File(explorer, seq), consumed) for seq in due)
    return retired


def _retire(job: Job, file: File, consumed: Consumed) -> bool:
    path = places.batch(job, *file)
    with contextlib.suppress(*MISSING):
        if consumed == "delete":
            job.disk.unlink(path)
        else:
            directory = places.archive(job, file.explorer)
            job.disk.make_directory(directory)
            job.disk.rename(path, f"{directory}/{file.seq}{places.SUFFIX}")
        return True
    return False
