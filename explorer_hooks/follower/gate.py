"""What a follower waits for between fetching a version and loading it: gates, which parts register.

A version is fetched as soon as it is published, so that a wait costs the engine nothing. Once all gates admit the
version, the engine is paused for it.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from explorer_hooks.follower.policy import FollowOptions, policy_of
from syncd.client.client import Client
from syncd.protocol.version import Pair, Version
from syncd.registered import GATES, registered


class Gate(Protocol):
    """Decides for one follower which version it goes to, and when it may load it."""

    reads: str
    """What the follower's presence has in `reads`, so that others know that it waits."""

    def target(self, newest: Pair | None, applied: Pair | None) -> Pair | None:
        """Return the version to go to, where `newest` is published; None for none."""

    def version(self, pair: Pair) -> Version | None:
        """Return a version that is not the published one, None if this gate does not know it."""

    def admits(self, pair: Pair, applied: Pair | None) -> bool:
        """Return whether a version that is fetched may be loaded now."""

    @property
    def is_open(self) -> bool:
        """Return whether nobody waits here, as in a job in which this gate has no effect."""


class Gates:
    """All gates of one follower."""

    def __init__(self, gates: Sequence[Gate] = ()) -> None:
        self._gates = gates

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(gate.reads for gate in self._gates)

    @property
    def is_open(self) -> bool:
        return all(gate.is_open for gate in self._gates)

    def target(self, newest: Pair | None, applied: Pair | None) -> Pair | None:
        for gate in self._gates:
            newest = gate.target(newest, applied)
        return newest

    def version(self, pair: Pair) -> Version | None:
        versions = (gate.version(pair) for gate in self._gates)
        return next((version for version in versions if version is not None), None)

    def admits(self, pair: Pair, applied: Pair | None) -> bool:
        return all(gate.admits(pair, applied) for gate in self._gates)


def open_gates(client: Client, options: FollowOptions) -> Gates:
    """Return the gates of a follower; none of one that was told which steps to load."""
    if policy_of(options).which not in ("newest", "at-least"):
        return Gates()
    makers: list[Callable[[Client], Gate]] = [point.load() for point in registered(GATES).values()]
    return Gates([make(client) for make in makers])
