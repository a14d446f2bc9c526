"""What a follower waits for between fetching a version and loading it: gates, which parts register.

A version is fetched as soon as it is published, so that a wait costs the engine nothing. Once all gates admit the
version, the engine is paused for it. A gate whose document is not in the job is open, and is not asked.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from explorer_hooks.follower.policy import FollowOptions, policy_of
from syncd.client.client import Client
from syncd.errors import CorruptDataError
from syncd.protocol.disk import MISSING, Disk
from syncd.protocol.documents import SMALL_LIMIT
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.version import Pair, Version
from syncd.registered import GATES, registered


class Gate(Protocol):
    """Decides for one follower which version it goes to, and when it may load it."""

    reads: str
    """What the follower's presence has in `reads`, so that others know that it waits."""

    path: str
    """The document of the job that says who may go on; while there is none, nobody waits here."""

    def update(self, data: bytes | None) -> None:
        """Take what the document holds now, None once it is gone; damaged data admit nobody."""

    def target(self, newest: Pair | None, applied: Pair | None) -> Pair | None:
        """Return the version to go to, where `newest` is published; None for none."""

    def version(self, pair: Pair) -> Version | None:
        """Return a version that is not the published one, None if this gate does not know it."""

    def admits(self, pair: Pair, applied: Pair | None) -> bool:
        """Return whether a version that is fetched may be loaded now."""


class Gates:
    def __init__(self, gates: Sequence[Gate] = (), disk: Disk | None = None) -> None:
        self._gates, self._disk = gates, disk or LocalDisk()
        self._shut: list[Gate] = []  # those whose documents were there at the last reading

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(gate.reads for gate in self._gates)

    @property
    def is_open(self) -> bool:
        """Return whether nobody waits, by what was read last."""
        return not self._shut

    def target(self, newest: Pair | None, applied: Pair | None) -> Pair | None:
        self._read()
        for gate in self._shut:
            newest = gate.target(newest, applied)
        return newest

    def version(self, pair: Pair) -> Version | None:
        versions = (gate.version(pair) for gate in self._shut)
        return next((version for version in versions if version is not None), None)

    def admits(self, pair: Pair, applied: Pair | None) -> bool:
        self._read()
        return all(gate.admits(pair, applied) for gate in self._shut)

    def _read(self) -> None:
        self._shut = [gate for gate in self._gates if self._is_shut(gate)]

    def _is_shut(self, gate: Gate) -> bool:
        data = self._content(gate.path)
        if data is not None or gate in self._shut:
            gate.update(data)
        return data is not None

    def _content(self, path: str) -> bytes | None:
        try:
            return self._disk.read(path, SMALL_LIMIT)
        except MISSING:
            return None
        except CorruptDataError:  # too large, or no file
            return b""


def open_gates(client: Client, options: FollowOptions) -> Gates:
    """Return the gates of a follower; none of one that was told which steps to load."""
    if policy_of(options).which not in ("newest", "at-least"):
        return Gates()
    makers: list[Callable[[Client], Gate]] = [point.load() for point in registered(GATES).values()]
    return Gates([make(client) for make in makers], client.job.disk)
