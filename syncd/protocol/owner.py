"""Which job a state directory belongs to, so that a second job never works with the knowledge of the first.

A job has a random identity. The first daemon that leads a job with its state directory inside writes it to
`job.json` there, through its term. A state directory elsewhere records in its own `job.json` which job it belongs to:
the identity of the job where it has one, and the place of its directory, since a job that is only read has none.
"""

import shlex
import uuid
from dataclasses import dataclass, replace

from syncd.errors import TROUBLESHOOTING, ConfigError, CorruptDataError, ProtocolTooNewError
from syncd.protocol.disk import MISSING, Disk, is_below
from syncd.protocol.documents import (
    SMALL_LIMIT,
    Fields,
    as_document,
    encode,
    read_document,
    record_from,
    spelt,
    without_none,
)
from syncd.protocol.layout import OWNER, STATE, Job
from syncd.protocol.leadership import Term
from syncd.protocol.process import host_name


@dataclass(frozen=True, slots=True)
class JobPlace:
    """Where a job's directory is, as one host sees it."""

    host: str
    path: str  # the directory, without links
    inode: int  # its number
    born: int  # when its file system made it, 0 where that is not known

    def is_surely_other(self, other: "JobPlace") -> bool:
        """Return whether two readings are certainly of two directories; hosts may have one under two paths."""
        if self.inode != other.inode:
            return True
        if self.born and other.born:
            return self.born != other.born
        return self.host == other.host and self.path != other.path

    def document(self) -> dict[str, str | int]:
        return {"host": self.host, "path": self.path, "inode": self.inode, "born": str(self.born)}

    @staticmethod
    def from_fields(fields: Fields) -> "JobPlace":
        born = fields.text("born")
        if not (born.isascii() and born.isdecimal()):
            raise fields.wrong("born", "nanoseconds in decimal digits")
        return JobPlace(fields.text("host"), fields.text("path"), fields.integer("inode"), int(born))


@dataclass(frozen=True, slots=True)
class MirrorSource:
    """The job that a mirror copies into this one."""

    source: (
        str  # where it is, as it was given to `syncd mirror`: a directory or the address of an object store
    )
    identity: str = ""  # of that job, empty if it is not known

    def is_same(self, other: "MirrorSource") -> bool:
        """Return whether two say the same job; one that was moved keeps its identity."""
        if self.identity and other.identity:
            return self.identity == other.identity
        return self.source == other.source


@dataclass(frozen=True, slots=True)
class Owner:
    identity: str | None  # of the job; None where it has none
    place: JobPlace | None = None  # of a job whose state directory is elsewhere; None in a job's own
    mirror_of: MirrorSource | None = None  # what a mirror copies into the job; None in a job of its own

    def is_other(self, job: Job) -> bool:
        """Return whether it is certainly not this job."""
        if is_own(job):
            return self.place is not None and self.place.is_surely_other(place_of(job))
        identity = identity_of(job)
        if self.identity is not None and identity is not None:
            return self.identity != identity
        # Without a place it is the own state directory of a job, and that job is not this one.
        return self.place is None or self.place.is_surely_other(place_of(job))


def is_own(job: Job) -> bool:
    """Return whether the state directory lies in the job directory."""
    return is_below(job.state, job.root)


def place_of(job: Job) -> JobPlace:
    """Return where the job is; `FileNotFoundError` without one."""
    root = job.disk.stat(job.root)
    return JobPlace(host_name(), spelt(job.root), root.inode, job.disk.born(job.root))


def identity_of(job: Job) -> str | None:
    """Return the identity of a job, None where it has none or it cannot be read."""
    try:
        owner = read_owner(job.disk, job.owner if is_own(job) else f"{job.root}/{STATE}/{OWNER}")
    except (CorruptDataError, PermissionError):
        return None
    return owner.identity if owner else None


def read_owner(disk: Disk, path: str) -> Owner | None:
    """Return what a `job.json` says, None where there is none."""
    try:
        fields = read_document(disk, path, SMALL_LIMIT)
    except MISSING:
        return None
    place, mirrored = fields.optional_record("place"), fields.optional_record("mirror_of")
    return record_from(
        Owner,
        fields,
        place=JobPlace.from_fields(place) if place else None,
        mirror_of=record_from(MirrorSource, mirrored) if mirrored else None,
    )


def mirrored_from(job: Job) -> MirrorSource | None:
    """Return what a mirror copies into the job, None if it is a job of its own or that cannot be read."""
    try:
        owner = read_owner(job.disk, f"{job.root}/{STATE}/{OWNER}")
    except (CorruptDataError, PermissionError):
        return None
    return owner.mirror_of if owner else None


def refuse_mirrored(job: Job, what: str) -> None:
    """Refuse, for `what`, to write into a job that a mirror leads, which its next copies would contradict."""
    mirrored = mirrored_from(job)
    if mirrored is not None:
        raise ConfigError(
            f"the job is a mirror of {mirrored.source}: {what} would contradict what is copied into it",
            path=job.root,
            hint=f"to make it a job of its own: syncd mirror {shlex.quote(job.root)} --detach",
        )


def check_owner(job: Job) -> None:
    """Refuse a state directory that belongs to another job; one that belongs to no job yet is accepted."""
    try:
        owner = read_owner(job.disk, job.owner)
        is_other = owner is not None and owner.is_other(job)
    except ProtocolTooNewError:
        if is_own(job):
            return
        raise
    except (*MISSING, CorruptDataError):
        return  # there is no job yet, or the next leader writes the file again
    except PermissionError:
        if is_own(job):
            return  # it lies in the job itself
        raise
    if owner is not None and is_other:
        where = f"{owner.place.path} on {owner.place.host}" if owner.place else "the one that it lies in"
        raise ConfigError(
            f"the state directory belongs to another job: {where}",
            path=job.state,
            hint=f"use another --state-dir; if {job.root} is that job: rm {shlex.quote(job.owner)}"
            f"  # {TROUBLESHOOTING}#the-state-directory-of-another-job",
        )


def record_owner(job: Job, term: Term, mirror_of: MirrorSource | None = None) -> None:
    """Write which job the state directory belongs to, as the leader of the job, unless the file says so already.

    `mirror_of` is what this leader copies into the job; None leaves what the file says of that.
    """
    try:
        before = read_owner(job.disk, job.owner)
    except (ProtocolTooNewError, PermissionError):
        return
    except CorruptDataError:
        before = None
    owner = _owner_now(job, before)
    owner = replace(owner, mirror_of=mirror_of or (before.mirror_of if before else None))
    if owner != before:
        _write_owner(job, term, owner)


def detach(job: Job, term: Term) -> None:
    """Make a job that a mirror led a job of its own, as its leader."""
    owner = read_owner(job.disk, job.owner)
    if owner is not None and owner.mirror_of is not None:
        _write_owner(job, term, replace(owner, mirror_of=None))


def _write_owner(job: Job, term: Term, owner: Owner) -> None:
    place = owner.place.document() if owner.place else None
    mirrored = as_document(owner.mirror_of) if owner.mirror_of else None
    document = {"identity": owner.identity, "place": place, "mirror_of": mirrored}
    term.publish(job.owner, encode(without_none(document, "mirror_of")))


def _owner_now(job: Job, before: Owner | None) -> Owner:
    identity = before.identity if before else None
    if is_own(job):
        return Owner(identity or uuid.uuid4().hex)
    return Owner(identity_of(job) or identity, place_of(job))
