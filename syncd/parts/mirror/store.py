"""An object store as an end of a mirror.

    version.json                                  `index`: replaced by compare-and-swap, its pair only grows
    steps/<step>-<digest16>/<file>                immutable; a file above `PART` bytes is <file>.parts/<offset>
    steps/<step>-<digest16>/manifest.json         created once, after all files: the seal
    base_probe.json                               created once: the baseline of proofs, if the job has one

Names carry the content, so a step that was written again has another name, and two mirrors write the same bytes under
the same names. What is deleted is first taken out of `version.json`; of a step the manifest is deleted first.
"""

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from syncd.errors import FencedError, TryAgainError
from syncd.observe import event_names
from syncd.parts.mirror.ends import OvertakenError, SourceEnd
from syncd.parts.mirror.index import NAME, Index, decode_index, encode_index
from syncd.parts.mirror.links import Link, decoded_link, key_of
from syncd.parts.mirror.meter import Meter
from syncd.parts.mirror.objects import Objects
from syncd.parts.mirror.transfer import CheckedFile
from syncd.protocol.disk import Clock
from syncd.protocol.job_end import JobEnd
from syncd.protocol.layout import MANIFEST
from syncd.protocol.mirror_report import MirrorReport
from syncd.protocol.receipt import FileRecord
from syncd.protocol.version import Pair, Version
from syncd.transports.files.copy_files import several_at_once

PART = 32 << 20
"""Bytes of a part of a large file: a part of the format, since names follow from it. Four are in memory at once."""

STEPS, BASELINE = "steps/", "base_probe.json"
SWEEP_EVERY = 86400.0
"""Seconds between two searches for what killed mirrors have left."""

_REMEMBERED = 4096
_FRESH = 1.0


def object_names(record: FileRecord, part: int) -> list[tuple[str, int, int]]:
    """Return the objects that hold a file: name, offset and length of each."""
    if record.size <= part:
        return [(record.name, 0, record.size)]
    offsets = range(0, record.size, part)
    return [(f"{record.name}.parts/{at:014d}", at, min(part, record.size - at)) for at in offsets]


class StoreSource:
    """An object store that another mirror fills; `job` is the identity of what it must hold, empty for any job."""

    piece = 8 << 20

    def __init__(self, objects: Objects, job: str = "", part: int = PART) -> None:
        self._objects, self._job, self._part = objects, job, part
        self._index, self._tag = Index(), None
        self._links: dict[str, Link] = {}

    @property
    def job(self) -> str:
        """Return the identity of the job that is mirrored here, empty before the first version."""
        return self._index.job

    def newest(self) -> Version | None:
        """Return the published version: one conditional request."""
        try:
            changed = self._objects.get_changed(NAME, self._tag)
        except FileNotFoundError:
            return None
        if changed is not None:
            index = decode_index(changed.data, self._objects.address)
            require_job(index, self._job, self._objects.address)
            self._index, self._tag = index, changed.tag
        return self._index.version

    def link(self, step: int, digest: str) -> Link | None:
        key = key_of(step, digest) if digest else self._index.key_of_step(step)
        if not key:
            return None
        if key not in self._links:
            name = f"{STEPS}{key}/{MANIFEST}"
            try:
                data = self._objects.get(name).data
            except FileNotFoundError:
                return None
            if len(self._links) >= _REMEMBERED:
                self._links.clear()
            self._links[key] = decoded_link(data, f"{self._objects.address}/{name}", step)
        return self._links[key]

    def hold(self, steps: Collection[int]) -> None:
        """Do nothing: retention keeps what a reader may have begun with for a while."""

    def read(self, link: Link, record: FileRecord, offset: int, length: int) -> bytes:
        directory, data = f"{STEPS}{link.key}", b""
        for name, begin, size in object_names(record, self._part):
            at = max(offset - begin, 0)
            end = min(offset + length - begin, size)
            if at < end:
                data += self._range(f"{directory}/{name}", at, end - at)
        return data

    def baseline(self) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return self._objects.get(BASELINE).data
        return None

    def end(self) -> JobEnd | None:
        """Return the end that stood beside the version when that was read."""
        return self._index.end

    def report(self, report: MirrorReport) -> None:
        """Do nothing: an object store shows nothing to anybody."""

    def close(self) -> None:
        """Do nothing."""

    def _range(self, name: str, offset: int, length: int) -> bytes:
        try:
            return self._objects.get_range(name, offset, length)
        except FileNotFoundError:
            raise TryAgainError(
                "it was removed while it was copied", path=f"{self._objects.address}/{name}"
            ) from None


@dataclass(frozen=True, slots=True)
class StoreRetention:
    keep: int = 3  # the newest versions, with their chains
    grace: float = 86400.0  # seconds for which a version stays readable after the next one came
    prune: bool = True


class StoreTarget:
    """An object store that this process fills, with others or alone; `job` is the identity of the source."""

    def __init__(
        self,
        objects: Objects,
        job: str,
        retention: StoreRetention,
        clock: Clock,
        meter: Meter,
        tell: Callable[..., None],
        part: int = PART,
    ) -> None:
        self._objects, self._job, self._retention = objects, job, retention
        self._clock, self._meter, self._tell, self._part = clock, meter, tell, part
        self._index, self._tag = Index(), None
        self._published_at: float | None = None
        self._read_at = self._swept_at = float("-inf")
        self._sealed: set[str] = set()
        self._is_clean = (
            False  # whether no process has left a part of a step there, as far as this one can know
        )

    def is_ready(self) -> bool:
        """Return true: whoever is faster publishes."""
        return True

    def published(self) -> Pair | None:
        """Return the published pair; it is read once, and again when another mirror turns out to have written it."""
        if self._read_at == float("-inf"):
            self._refresh()
        return self._index.pair

    def has(self, step: int, digest: str) -> bool:
        return self._index.has(step, digest)

    def is_sealed(self, link: Link) -> bool:
        """Return whether this process has seen the step's seal."""
        return link.key in self._sealed and link.key not in self._index.removing

    def make_way(self, version: Version, links: Collection[Link], source: SourceEnd) -> bool:  # noqa: ARG002
        """Look whether another mirror was faster, before much is copied; no step is ever in the way of another."""
        left = sum(link.manifest.size for link in links if not self.is_sealed(link))
        if left <= self._part or self._clock.monotonic() - self._read_at < _FRESH:
            return False
        return self._refresh()

    def hold(self, steps: Collection[int]) -> None:
        """Do nothing: what no version names is kept for as long as what a reader may have begun with."""

    def copy(self, link: Link, source: SourceEnd) -> int:
        """Copy the files of a step, then create its manifest."""
        if link.key in self._index.removing:
            self._remove([link.key])
            self._write(self._index.without([link.key]))
        directory = f"{STEPS}{link.key}/"
        there, was_clean = self._there(directory, link), self._is_clean
        self._is_clean, sent = False, list[int]()
        if MANIFEST not in there:

            def copy_record(record: FileRecord, stop: Callable[[], bool]) -> None:
                sent.append(self._copy_file(directory, link, record, source, there, stop))

            several_at_once(link.records, copy_record, self._meter.is_stopped)
            self._meter.check()
            self._objects.create(f"{directory}{MANIFEST}", link.data)
        self._is_clean = was_clean
        self._sealed.add(link.key)
        return sum(sent)

    def publish(self, version: Version, links: Collection[Link]) -> None:
        """Replace `version.json` if nobody else has; retention takes out what it does not keep."""
        retention = self._retention
        wanted = self._index.with_version(version, links, self._job, self._published_at)
        if retention.prune:
            wanted = wanted.pruned(retention.keep, retention.grace, self._published_at)
        self._write(wanted)
        self._is_clean = True
        self._sealed.difference_update(link.key for link in links)

    def keep_baseline(self, data: bytes) -> None:
        self._objects.create(BASELINE, data)

    def end(self) -> JobEnd | None:
        return self._index.end

    def finish(self, end: JobEnd | None) -> None:
        """Replace `version.json` if nobody else has."""
        self._write(replace(self._index, end=end))

    def tidy(self) -> None:
        """Date the version; delete what is no longer named, and once a day what killed mirrors have left."""
        self._published_at = self._objects.modified(NAME)
        if not self._retention.prune:
            return
        done = self._remove(list(self._index.removing))
        if done:
            self._write(self._index.without(done))
        if self._clock.monotonic() - self._swept_at >= SWEEP_EVERY:
            self._swept_at = self._clock.monotonic()
            self._sweep()

    def report(self, report: MirrorReport) -> None:
        """Do nothing: an object store shows nothing to anybody."""

    def close(self) -> None:
        """Do nothing."""

    # --- version.json ---------------------------------------------------------------------------------------------

    def _refresh(self) -> bool:
        """Read what the store has; return whether that is news."""
        is_first, self._read_at = self._read_at == float("-inf"), self._clock.monotonic()
        try:
            changed = self._objects.get_changed(NAME, self._tag)
        except FileNotFoundError:
            is_news, self._index, self._tag = self._tag is not None, Index(), None
            return is_news and not is_first
        if changed is None:
            return False
        index = decode_index(changed.data, self._objects.address)
        require_job(index, self._job, self._objects.address)
        self._index, self._tag, self._published_at = index, changed.tag, changed.modified
        self._sealed.clear()
        self._is_clean = False
        return not is_first

    def _write(self, index: Index) -> None:
        """Replace the index; where another mirror has, read it and begin anew."""
        try:
            self._tag = self._objects.replace(NAME, encode_index(index), self._tag)
        except FencedError:
            self._refresh()
            raise OvertakenError("another mirror has published there", path=self._objects.address) from None
        self._index, self._read_at = index, self._clock.monotonic()

    # --- files ----------------------------------------------------------------------------------------------------

    def _there(self, directory: str, link: Link) -> dict[str, int]:
        """Return the objects of a step that need not be sent; a small step is not worth the wait for a listing."""
        if self._is_clean and link.manifest.size <= self._part:
            return {}
        return {item.name.removeprefix(directory): item.size for item in self._objects.list(directory)}

    def _copy_file(
        self,
        directory: str,
        link: Link,
        record: FileRecord,
        source: SourceEnd,
        there: dict[str, int],
        stop: Callable[[], bool],
    ) -> int:
        """Copy one file, part by part; a part that is there is read all the same, to prove the whole file."""
        file = CheckedFile(source, link, record, self._part)
        pieces, sent = {at: name for name, at, _ in object_names(record, self._part)}, 0
        for offset, data in file.pieces() if record.size else [(0, b"")]:
            self._meter.check()
            if stop():
                raise TryAgainError("the copy was given up: another file of the step failed")
            name = pieces[offset]
            if there.get(name) != len(data):
                self._meter.spend(len(data))
                self._objects.put(f"{directory}{name}", data)
                sent += len(data)
        try:
            file.check()
        except Exception:
            self._objects.delete([f"{directory}{name}" for name in pieces.values()])
            raise
        return sent

    # --- retention ------------------------------------------------------------------------------------------------

    def _remove(self, keys: Collection[str]) -> list[str]:
        """Delete steps that the store no longer names, manifest first; return those that are gone."""
        done = []
        for key in keys:
            directory = f"{STEPS}{key}/"
            names = [item.name for item in self._objects.list(directory)]
            # This process may have been paused for long: somebody may need the step again since.
            self._refresh()
            if key not in self._index.removing:
                continue
            self._objects.delete([name for name in names if name == f"{directory}{MANIFEST}"])
            self._objects.delete([name for name in names if name != f"{directory}{MANIFEST}"])
            self._tell(
                event_names.MIRROR_STEP_PRUNED, "info", step=int(key.partition("-")[0]), objects=len(names)
            )
            done.append(key)
        return done

    def _sweep(self) -> None:
        """Delete the objects of steps that no version names and that are as old as what retention lets go."""
        by_key: dict[str, list[Any]] = {}
        for item in self._objects.list(STEPS):
            by_key.setdefault(item.name.removeprefix(STEPS).partition("/")[0], []).append(item)
        now = self._published_at
        for key, objects in by_key.items():
            is_named = key in self._index.steps or key in self._index.removing or key in self._sealed
            age = 0.0 if now is None else now - max(item.modified for item in objects)
            if not is_named and age >= max(self._retention.grace, SWEEP_EVERY):
                names = sorted(
                    (item.name for item in objects), key=lambda name: not name.endswith(f"/{MANIFEST}")
                )
                self._objects.delete(names[:1])
                self._objects.delete(names[1:])


def require_job(index: Index, job: str, address: str) -> None:
    if index.job and job and index.job != job:
        raise TryAgainError(
            "another job is mirrored there", path=address, hint="use another prefix, or empty this one"
        )
