"""The two ends of a mirror as they are given: a job's directory, or the address of an object store."""

import os
import re
import shlex
from typing import TYPE_CHECKING

from syncd.errors import ConfigError, UsageError
from syncd.protocol.disk import list_if_there
from syncd.protocol.documents import spelt
from syncd.protocol.layout import MARKER, Job, parse_step_name
from syncd.protocol.owner import MirrorSource, mirrored_from

if TYPE_CHECKING:
    from syncd.parts.mirror.objects import Objects

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://.+", re.ASCII)
_SCHEMES = ("s3", "s3a", "gs")


def is_store(end: str) -> bool:
    """Return whether an end is an object store; other schemes than those that are written are refused."""
    match = _ADDRESS.fullmatch(end)
    if match is None:
        return False
    if match[1] not in _SCHEMES:
        raise UsageError(
            f"no mirror reads or writes {match[1]}://",
            hint="a directory, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX",
        )
    return True


def shown(end: str) -> str:
    """Return an end as people on any host read it."""
    return end.rstrip("/") if is_store(end) else spelt(os.path.abspath(end))


def open_objects(address: str) -> "Objects":
    """Return the objects of an address; obstore is loaded."""
    from syncd.parts.mirror.obstore_objects import ObstoreObjects  # noqa: PLC0415 - a directory needs no obstore

    return ObstoreObjects(address)


def check_target(job: Job, source: MirrorSource) -> MirrorSource:
    """Return what `job.json` of the target shall say; refuse a job of its own, and a mirror of another job."""
    before = mirrored_from(job)
    if before is None:
        _refuse_own_job(job)
        return source
    if not before.is_same(source):
        raise ConfigError(
            f"it is a mirror of another job: {before.source}",
            path=job.root,
            hint=f"mirror into another directory; to make this one a job of its own: syncd mirror "
            f"{shlex.quote(job.root)} --detach",
        )
    return MirrorSource(source.source, source.identity or before.identity)


def _refuse_own_job(job: Job) -> None:
    names = [entry.name for entry in list_if_there(job.disk, job.root)]
    is_job = any(entry.name == "job.json" for entry in list_if_there(job.disk, job.state))
    if is_job or MARKER in names or any(parse_step_name(name) is not None for name in names):
        raise ConfigError(
            "it is a job of its own, and a mirror would contradict its trainer and daemon",
            path=job.root,
            hint=f"mirror into an empty directory: mkdir {shlex.quote(job.root)}-mirror",
        )
