"""A simulated explorer that reads deltas: from what it runs by changes alone, else from a keyframe and its chain."""

from typing import NamedTuple

from support.presences import BeatingPublisher

from simulator.explorer import Explorer, Loaded
from simulator.world import Process
from syncd.errors import CorruptDataError
from syncd.protocol.digest import digest_bytes
from syncd.protocol.layout import Job
from syncd.protocol.lineage import check_tables, containers
from syncd.protocol.manifest import Manifest, read_manifest
from syncd.protocol.presence import READS_DELTA
from syncd.protocol.version import Pair, Version
from syncd.transports.delta.ulp1 import apply, with_streams


class _Way(NamedTuple):
    """The manifests that lead to a step, the step first, and whether the last one changes what the explorer runs."""

    links: list[Manifest]
    from_base: bool


class ChainExplorer(Explorer):
    """One explorer; arguments as for `Explorer`."""

    reads = (READS_DELTA,)
    _base: tuple[str, Loaded] | None = None

    def _apply(self, process: Process, job: Job, me: BeatingPublisher, version: Version) -> Pair | None:
        me.update(loading=version.pair, leases=(version.step,))
        try:
            job.disk.refresh(job.root)
            manifest = read_manifest(job.disk, job.step(version.step))
            if manifest.digest != version.digest:
                return None
            way = self._way(job, manifest)
            me.update(leases=tuple(link.step for link in way.links))
            # Only what is still there once the leases are out is safe from retention.
            job.disk.refresh(job.root)
            for link in way.links:
                if read_manifest(job.disk, job.step(link.step)).digest != link.digest:
                    return None
            loaded = self._made(process, job, me, way)
            self._base = manifest.digest, loaded
            self._witness.confirmed(process, version, manifest, loaded)
            me.update(applied=version.pair, applied_digest=version.digest)
            process.world.counts["loads by changes"] += way.from_base
            process.world.counts["loads of chains"] += len(way.links) > 1
            return version.pair
        finally:
            me.update(loading=None, leases=())

    def _way(self, job: Job, manifest: Manifest) -> _Way:
        base, links, whole = self._base[0] if self._base else "", [manifest], None
        while (changes := links[-1].changes) is not None:
            if changes.parent_digest == base:
                return _Way(links, from_base=True)
            if links[-1].shortcut is not None and whole is None:
                whole = _Way(list(links), from_base=False)
            try:
                parent = read_manifest(job.disk, job.step(changes.parent))
            except (OSError, CorruptDataError):
                if whole is None:
                    raise
                return whole
            if parent.digest != changes.parent_digest:
                if whole is None:
                    raise CorruptDataError("the parent was written again", path=job.step(changes.parent))
                return whole
            links.append(parent)
        return whole or _Way(links, from_base=False)

    def _made(self, process: Process, job: Job, me: BeatingPublisher, way: _Way) -> Loaded:
        if way.from_base and self._base:
            made, left = dict(self._base[1]), way.links
        else:
            keyframe = way.links[-1]
            made, left = self._read_shards(process, job, me, keyframe), way.links[:-1]
        for link in reversed(left):
            self._pause(process, me)
            made = _changed(job, link, made)
        return made

    def _read_shards(self, process: Process, job: Job, me: BeatingPublisher, keyframe: Manifest) -> Loaded:
        found = self._load(process, job, me, keyframe)
        if found is None:
            raise CorruptDataError("not what its manifest says", path=job.step(keyframe.step))
        return found


def _changed(job: Job, link: Manifest, old: Loaded) -> Loaded:
    """Return the shard files that a link makes of those of its parent."""
    tables, made = containers(job, link), {name: bytearray(data) for name, data in old.items()}
    check_tables(link, tables)
    for record, table in zip(link.containers, tables, strict=True):
        path = f"{job.step(link.step)}/{record.name}"
        for target, frames in zip(table.targets, table.by_target(), strict=True):
            for frame, at in frames:
                if frame.stored:
                    place = slice(frame.offset, frame.offset + frame.length)
                    tile = bytearray(made[target.name][place])
                    apply(tile, with_streams(frame, job.disk.read_at(path, at, frame.stored), path))
                    made[target.name][place] = tile
    for record in link.whole_shards:
        if digest_bytes(bytes(made[record.name])) != record.digest:
            raise CorruptDataError(f"{record.name} is not what step {link.step} says")
    return {name: bytes(data) for name, data in made.items()}
