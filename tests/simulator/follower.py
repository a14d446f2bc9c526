"""A simulated explorer that follows through the real synchronizer."""

from random import Random

from simulator.disk import SimDisk
from simulator.explorer import Loaded, Witness
from simulator.record import JOB
from simulator.world import Process
from syncd.errors import CorruptDataError, SyncdError
from syncd.protocol.digest import digest_bytes
from syncd.protocol.manifest import Manifest
from syncd.protocol.version import Pair
from syncd.synchronizer import Synchronizer

_PATIENCE = 4.0
"""Seconds of one wait: shorter than the silence after which others count an explorer as dead."""


class Follower:
    """One explorer.

    Args:
        random: Decides its pace.
        witness: Hears what it loads.
        poll: Seconds between two looks at the version.
        slow: Seconds that loading one shard takes, at most.
    """

    def __init__(self, random: Random, witness: Witness, poll: float, slow: float) -> None:
        self._random, self._witness, self._poll, self._slow = random, witness, poll, slow

    def main(self, process: Process) -> None:
        """Follow versions until the process ends."""
        sync = Synchronizer.open(
            JOB,
            "explorer",
            process.program.name,
            disk=SimDisk(process.host, process),
            clock=process,
            heartbeat=False,
            poll=self._poll,
        )
        applied: Pair | None = None
        while True:
            try:
                applied = self._follow(process, sync, applied)
            except (SyncdError, OSError) as error:
                process.world.note(process, f"meets {error!r}")
                process.sleep(self._poll)

    def _follow(self, process: Process, sync: Synchronizer, applied: Pair | None) -> Pair | None:
        sync.beat()
        sync.wait_new_model_state_dict(applied[1] if applied else -1, timeout=_PATIENCE)
        version = sync.latest_version()
        # The wait also ends when the trainer has nothing newer; and a step may be published anew, so only the
        # pair tells.
        if version is None or version.pair == applied:
            process.sleep(self._poll)
            return applied
        with sync.lease(version) as leased:
            if leased.manifest is not None:
                loaded = self._load(process, sync, leased.manifest)
                self._witness.confirmed(process, version, leased.manifest, loaded)
                sync.confirm(version)
        return version.pair

    def _load(self, process: Process, sync: Synchronizer, manifest: Manifest) -> Loaded:
        loaded = {}
        for shard in manifest.shards:
            process.sleep(self._slow * self._random.random())
            sync.beat()
            path = f"{sync.job.step(manifest.step)}/{shard.name}"
            loaded[shard.name] = sync.job.disk.read(path)
            if digest_bytes(loaded[shard.name]) != shard.digest:
                raise CorruptDataError("not what its manifest says", path=path)
        return loaded
