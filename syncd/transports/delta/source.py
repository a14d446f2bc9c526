"""Makes a version whole in the stage of this host from the changes of an earlier one. Imports no torch.

Nothing is changed in place. The files are built beside the copy that the changes begin with, which engines may have
mapped, so a killed build leaves that copy whole. Where the stage has no copy to begin with, the keyframe and all
deltas after it are read from the job. Imports numpy and pyarrow.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from syncd.errors import CorruptDataError
from syncd.protocol.delta_header import DeltaHeader
from syncd.protocol.disk import MISSING, Disk, remove_tree
from syncd.protocol.layout import ACTOR
from syncd.protocol.lineage import CHAIN_LIMIT, read_parent
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.manifest import Manifest
from syncd.protocol.receipt import FileRecord
from syncd.transports.delta.chain import BaseDamagedError, Chain, WholeFiles
from syncd.transports.files.copy_files import give_up_if, make_directories, new_file, several_at_once
from syncd.transports.files.stage import HostStage, StagedCopy, StageFullError, StageSource

if TYPE_CHECKING:
    from syncd.client.client import Client
    from syncd.transports.files.leased_directory import ReportEvent


class _Route(NamedTuple):
    # The manifests of the steps that are read from the job, the version's first. Without a copy the last one
    # is a keyframe.
    links: Sequence[Manifest]
    begin: int  # the step that the changes begin at
    digest: str  # of its manifest
    copy: StagedCopy | None = None  # a copy of it; None if it is the last link

    @property
    def takes_shortcut(self) -> bool:
        return self.copy is not None and any(link.shortcut for link in self.links)


@dataclass(frozen=True, slots=True)
class DeltaSource(StageSource):
    """A version that a stage gets by changing a copy of an earlier one, if it has one."""

    client: "Client"  # the explorer's connection to the job; the version is leased
    manifest: Manifest  # of the version: a delta, or weights with a shortcut
    stage: HostStage
    report: "ReportEvent"  # hears from what it was made, and what could not be used
    _damaged: set[str] = field(default_factory=set, init=False)
    """Digests of the manifests whose copies are damaged, and of keyframes whose shortcuts cannot be used."""

    def write(self, target: str, stop: Callable[[], bool]) -> None:
        """Write the files; what turns out to be damaged is not begun with again."""
        while not self._wrote(target, stop):
            with contextlib.suppress(FileNotFoundError):
                remove_tree(LocalDisk(), target)

    def _wrote(self, target: str, stop: Callable[[], bool]) -> bool:
        """Write the files; return False if they must be made in another way."""
        with self._route() as route, self.client.lease_links(route.links[1:]):
            if route.copy is None and len(route.links) == 1:
                StageSource.write(self, target, stop)
                return True
            if route.copy is None and self.reader.copy_made(self.manifest, self.wanted, target, stop):
                return True
            # A keyframe whose copy was damaged is read from the job: `_route` begins with no copy of it again.
            if route.copy is None and self.reader.is_shared and route.digest not in self._damaged:
                with contextlib.suppress(StageFullError), self._staged_keyframe(route.links[-1], stop):
                    return self._wrote(target, stop)
            try:
                self._build(route, target, stop)
            except BaseDamagedError as error:
                self._discard(route, error)
                return False
            except (*MISSING, CorruptDataError) as error:
                if not route.takes_shortcut:
                    raise
                self._avoid_shortcuts(route, error)
                return False
        source = "stage" if route.copy else "files"
        self.report("debug", "delta_applied", step=self.version.step, base=route.begin, source=source)
        return True

    @contextlib.contextmanager
    def _route(self) -> Iterator[_Route]:
        """Find the nearest copy that the version can be made of, and hold it in the block."""
        links: list[Manifest] = []
        for link in self._line():
            links.append(link)
            changes = self._changes(link)
            copy = self._copy_of(changes.parent_digest) if changes else None
            if changes is not None and copy is not None:
                with contextlib.closing(copy):
                    yield _Route(links, changes.parent, changes.parent_digest, copy)
                return
        count = next(count for count, link in enumerate(links, 1) if link.delta is None)
        keyframe = links[count - 1]
        yield _Route(links[:count], keyframe.step, keyframe.digest)

    def _line(self) -> Iterator[Manifest]:
        """Yield the version and what it is made of: back to the keyframe, and beyond it while that reads less."""
        link, beyond, room = self.manifest, 0, 0
        for _ in range(CHAIN_LIMIT + 1):
            yield link
            changes = self._changes(link)
            if changes is None:
                return
            room = room or (link.whole_size if link.shortcut else 0)
            beyond += sum(record.size for record in link.containers) if room else 0
            if room and (beyond > room or not self.stage.has_copies()):
                return
            parent = self._parent(link, changes, is_beyond=room > 0)
            if parent is None:
                return
            link = parent
        raise CorruptDataError(f"a chain of more than {CHAIN_LIMIT} deltas", path=self.directory)

    def _parent(self, link: Manifest, changes: DeltaHeader, *, is_beyond: bool) -> Manifest | None:
        try:
            return read_parent(self.client.job, link, changes)
        except CorruptDataError:
            if is_beyond:
                return None  # the keyframe is whole without it
            raise

    def _changes(self, link: Manifest) -> DeltaHeader | None:
        is_avoided = link.shortcut is not None and link.digest in self._damaged
        return None if is_avoided else link.changes

    def _copy_of(self, digest: str) -> StagedCopy | None:
        return None if digest in self._damaged else self.stage.find_digest(digest)

    @contextlib.contextmanager
    def _staged_keyframe(self, keyframe: Manifest, stop: Callable[[], bool]) -> Iterator[None]:
        """Hold a copy of the keyframe, which hosts divide among them, while the block lasts."""
        version = replace(self.version, step=keyframe.step, digest=keyframe.digest)
        records = tuple(
            record._replace(name=record.name.removeprefix(f"{ACTOR}/"))
            for record in (*keyframe.shards, *keyframe.files)
            if record.name.startswith(f"{ACTOR}/")
        )
        directory = f"{self.client.job.step(keyframe.step)}/{ACTOR}"
        source = StageSource(self.disk, version, directory, records, reader=self.reader)
        with contextlib.closing(self.stage.provide(source, stop)):
            yield

    def _build(self, route: _Route, target: str, stop: Callable[[], bool]) -> None:
        with self.reader.nearer([link for link in route.links if link.changes], stop) as disk:
            self._build_from(disk, route, target, stop)

    def _build_from(self, disk: Disk | None, route: _Route, target: str, stop: Callable[[], bool]) -> None:
        """Build the files from containers that are read from a file system, None for that of the job."""
        base = WholeFiles(LocalDisk(), route.copy.path, is_copy=True) if route.copy else None
        job = replace(self.client.job, disk=disk) if disk else self.client.job
        chain = Chain(job, route.links, base)
        make_directories(target, self.records)

        def build(record: FileRecord, over: Callable[[], bool]) -> None:
            stored = record._replace(name=f"{ACTOR}/{record.name}")
            pieces = _tiles(chain, stored) if stored in shards else chain.file_pieces(stored)
            with new_file(f"{target}/{record.name}") as file:
                for piece in pieces:
                    give_up_if(over, file.name)
                    file.write(piece)

        shards = frozenset(self.manifest.whole_shards)
        several_at_once(self.records, build, stop)

    def _discard(self, route: _Route, error: BaseDamagedError) -> None:
        assert route.copy is not None, "only a copy is blamed"
        self._damaged.add(route.digest)
        self.stage.discard(route.copy)
        self.report("warning", "stage_copy_damaged", path=route.copy.path, reason=error.message)

    def _avoid_shortcuts(self, route: _Route, error: Exception) -> None:
        """Read the shards of keyframes instead: what is wrong with a shortcut damages no step."""
        self._damaged.update(link.digest for link in route.links if link.shortcut)
        self.report("warning", "shortcut_failed", step=self.version.step, reason=str(error))


def _tiles(chain: Chain, record: FileRecord) -> Iterator[memoryview]:
    for _, data in chain.tiles(record):
        yield data
