"""A simulated explorer: follows the version file by the rule of leases, and tells what it has loaded."""

from random import Random
from typing import Protocol

from support.presences import BeatingPublisher

from simulator.disk import SimDisk
from simulator.record import JOB, STATE
from simulator.world import Process
from syncd.errors import CorruptDataError
from syncd.protocol.digest import digest_bytes
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import TRANSIENT
from syncd.protocol.manifest import Manifest, read_manifest
from syncd.protocol.presence import Presence
from syncd.protocol.version import Pair, Version, read_version

Loaded = dict[str, bytes]


class Witness(Protocol):
    """Who hears what explorers load."""

    def confirmed(self, process: Process, version: Version, manifest: Manifest, loaded: Loaded) -> None:
        """Hear that an explorer runs a version with these bytes."""


class Explorer:
    """One explorer.

    Args:
        random: Decides its pace.
        witness: Hears what it loads.
        poll: Seconds between two looks at the version.
        slow: Seconds that loading one shard takes, at most.
    """

    reads: tuple[str, ...] = ()

    def __init__(self, random: Random, witness: Witness, poll: float, slow: float) -> None:
        self._random, self._witness, self._poll, self._slow = random, witness, poll, slow
        self._applied_at = float("-inf")

    def main(self, process: Process) -> None:
        """Follow versions until the process ends."""
        job = Job(JOB, STATE, SimDisk(process.host, process))
        name = process.program.name
        me = BeatingPublisher(
            job.disk,
            process,
            job.explorers,
            Presence(name, incarnation=str(process.number), reads=self.reads),
        )
        me.prepare()
        applied: Pair | None = None
        while True:
            process.sleep(self._poll * (0.5 + self._random.random()))
            try:
                applied = self._look(process, job, me, applied)
                me.beat()
            except CorruptDataError as error:
                process.world.note(process, f"meets {error}")
            except OSError as error:
                # A step that has gone, or a mount in trouble: the next look goes on with the newest version.
                process.world.note(
                    process, f"meets {error!r}{' (passing)' if error.errno in TRANSIENT else ''}"
                )

    def _look(self, process: Process, job: Job, me: BeatingPublisher, applied: Pair | None) -> Pair | None:
        job.disk.refresh(job.state)
        version = read_version(job)
        if version is None or version.pair == applied:
            return applied
        if applied is not None and version.pair < applied and process.world.forgotten_at < self._applied_at:
            process.world.fail(
                "I2 the pair never decreases", f"{process.name}: {version.pair} after {applied}"
            )
        return self._apply(process, job, me, version) or applied

    def _apply(self, process: Process, job: Job, me: BeatingPublisher, version: Version) -> Pair | None:
        me.update(loading=version.pair, leases=(version.step,))
        try:
            # Only what is still there once the lease is out is safe from retention.
            job.disk.refresh(job.root)
            manifest = read_manifest(job.disk, job.step(version.step))
            loaded = self._load(process, job, me, manifest) if manifest.digest == version.digest else None
            if loaded is not None:
                self._witness.confirmed(process, version, manifest, loaded)
                me.update(applied=version.pair)
                return version.pair
            return None
        finally:
            me.update(loading=None, leases=())

    def _load(self, process: Process, job: Job, me: BeatingPublisher, manifest: Manifest) -> Loaded | None:
        loaded = {}
        for shard in manifest.shards:
            self._pause(process, me)
            loaded[shard.name] = job.disk.read(f"{job.step(manifest.step)}/{shard.name}")
            if digest_bytes(loaded[shard.name]) != shard.digest:
                process.world.note(
                    process, f"{shard.name} of step {manifest.step} is not what its manifest says"
                )
                return None
        return loaded

    def _pause(self, process: Process, me: BeatingPublisher) -> None:
        process.sleep(self._slow * self._random.random())
        me.beat()
