"""Which job a state directory belongs to, so that a second job never works with the knowledge of the first.

A job has a random identity. The first daemon that leads a job with its state directory inside writes it to
`job.json` there, through its term. A state directory elsewhere records in its own `job.json` which job it belongs to:
the identity of the job where it has one, and the place of its directory, since a job that is only read has none.
"""

import shlex
import uuid
from dataclasses import dataclass

from syncd.errors import TROUBLESHOOTING, ConfigError, CorruptDataError, ProtocolTooNewError
from syncd.protocol.disk import MISSING, Disk, is_below
from syncd.protocol.documents import SMALL_LIMIT, Fields, encode, read_document, record_from
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
class Owner:
    """Whose a state directory is."""

    identity: str | None  # of the job; None where it has none
    place: JobPlace | None = None  # of a job whose state directory is elsewhere; None in a job's own

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
    return JobPlace(host_name(), job.root, root.inode, job.disk.born(job.root))


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
    document = fields.optional_record("place")
    return record_from(Owner, fields, place=JobPlace.from_fields(document) if document else None)


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


def record_owner(job: Job, term: Term) -> None:
    """Write which job the state directory belongs to, as the leader of the job, unless the file says so already."""
    try:
        before = read_owner(job.disk, job.owner)
    except (ProtocolTooNewError, PermissionError):
        return
    except CorruptDataError:
        before = None
    owner = _owner_now(job, before)
    if owner != before:
        document = owner.place.document() if owner.place else None
        term.publish(job.owner, encode({"identity": owner.identity, "place": document}))


def _owner_now(job: Job, before: Owner | None) -> Owner:
    identity = before.identity if before else None
    if is_own(job):
        return Owner(identity or uuid.uuid4().hex)
    return Owner(identity_of(job) or identity, place_of(job))
