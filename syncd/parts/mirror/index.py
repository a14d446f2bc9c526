"""`version.json` of an object store: the published version, those before it, and the steps that they need.

Only this object is ever replaced, and only by a process that has read what it replaces. So it is the truth about what
the store has: a step that it does not name may be half written, or about to be deleted.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace

from syncd.parts.mirror.decisions import PastVersion, StoredStep, kept_versions, needed_keys
from syncd.parts.mirror.links import Link, key_of
from syncd.protocol.documents import decode, encode, record_from
from syncd.protocol.job_end import JobEnd
from syncd.protocol.version import Pair, Version, encode_version, version_from

NAME = "version.json"


@dataclass(frozen=True, slots=True)
class Index:
    job: str = ""  # identity of the job that was mirrored here, empty if it is not known
    version: Version | None = None  # the published version
    history: tuple[PastVersion, ...] = ()  # published versions that are kept, oldest first
    steps: Mapping[str, StoredStep] = field(default_factory=dict)  # by key
    removing: tuple[str, ...] = ()  # keys of steps that are being deleted
    end: JobEnd | None = None  # of the job, once it has finished with this version

    @property
    def pair(self) -> Pair | None:
        return self.version.pair if self.version else None

    def has(self, step: int, digest: str) -> bool:
        """Return whether a step is there with all that it needs; without a digest, any of that number."""
        return (key_of(step, digest) if digest else self.key_of_step(step)) in self.steps

    def key_of_step(self, step: int) -> str:
        """Return the key of the newest step of a number, empty without one."""
        return _key_of_step(step, self.steps)

    def with_version(
        self, version: Version, links: Collection[Link], job: str, published_at: float | None
    ) -> "Index":
        """Return it with a newer version, which no end is of yet, and `links`: steps that it lacks, parents first.

        `published_at` is when the present version was published, by the store's clock.
        """
        steps = dict(self.steps)
        for link in links:
            steps[link.key] = StoredStep(link.key, _parent_key(link, steps), link.manifest.size)
        past = PastVersion(version.generation, version.step, key_of(version.step, version.digest))
        history = (*dated(self.history, published_at), past)
        return replace(self, job=job or self.job, version=version, history=history, steps=steps, end=None)

    def pruned(self, keep: int, grace: float, now: float | None) -> "Index":
        """Return it without what retention does not keep: that is in `removing` then."""
        kept = kept_versions(self.history, keep, grace, now)
        needed = needed_keys(kept, self.steps)
        gone = tuple(key for key in self.steps if key not in needed)
        steps = {key: step for key, step in self.steps.items() if key in needed}
        return replace(self, history=kept, steps=steps, removing=(*self.removing, *gone))

    def without(self, keys: Collection[str]) -> "Index":
        """Return it with some removals done."""
        return replace(self, removing=tuple(key for key in self.removing if key not in keys))


def dated(history: tuple[PastVersion, ...], at: float | None) -> tuple[PastVersion, ...]:
    """Return versions of which the newest has its date, if it has none."""
    if not history or history[-1].at is not None:
        return history
    return *history[:-1], replace(history[-1], at=at)


def _parent_key(link: Link, steps: Mapping[str, StoredStep]) -> str:
    if link.parent is None:
        return ""
    step, digest = link.parent
    if digest:
        return key_of(step, digest)
    return _key_of_step(step, steps)


def _key_of_step(step: int, steps: Mapping[str, StoredStep]) -> str:
    return next((key for key in reversed([*steps]) if key.partition("-")[0] == str(step)), "")


def encode_index(index: Index) -> bytes:
    version = decode(encode_version(index.version), NAME).document if index.version else None
    return encode(
        {
            "job": index.job,
            "version": version,
            "history": [asdict(past) for past in index.history],
            "steps": [asdict(step) for step in index.steps.values()],
            "removing": list(index.removing),
            "end": asdict(index.end) if index.end else None,
        }
    )


def decode_index(data: bytes, path: str) -> Index:
    """Return what the object says; raise CorruptDataError if its bytes are damaged, or no such object."""
    fields = decode(data, path)
    version, end = fields.optional_record("version"), fields.optional_record("end")
    steps = [record_from(StoredStep, item) for item in fields.records("steps")]
    return Index(
        fields.text("job"),
        version_from(version) if version else None,
        tuple(record_from(PastVersion, item) for item in fields.records("history")),
        {step.key: step for step in steps},
        fields.texts("removing"),
        record_from(JobEnd, end) if end else None,
    )
