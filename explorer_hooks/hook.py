"""The seam between the follower and an engine: what is to be loaded, and who loads it.

One version is loaded by these calls, in this order, by one thread:

    prepare(target)      the engine is not touched; whatever can be refused is refused here
    load(target)         the engine stops taking work if it must, and takes the weights in
    commit(target)       caches are reset, the engine is told its version, it works again
    current_version()    what the engine itself says that it runs

If `load` or `commit` raises, `abort(last_good)` follows: the engine is back on the last good version and works,
or `EngineDeadError` says that it cannot be.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

from syncd.protocol.version import Pair, pair_of
from syncd.transports.base import WeightDirectory
from syncd.transports.tensors import TensorMeta


@dataclass(frozen=True, slots=True)
class Running:
    """What an engine says of itself.

    Args:
        label: What it calls its weights; None: it was never told, so it runs what it was started with. Any label
            but that of a version of the job means that nobody knows what it runs.
        paused: Whether it was left paused, so that it takes no work.
    """

    label: str | None
    paused: bool = False

    @property
    def pair(self) -> Pair | None:
        """Return the pair that the label names, None where it names none; of which job is not checked here."""
        return pair_of(self.label)


@dataclass(frozen=True, slots=True)
class HookOptions:
    """What every hook is given.

    Args:
        address: What stood behind `=` in `--hook NAME=ADDRESS`: a URL, a command, an import path.
        argv: A command, where one was given behind `--`.
        settings: `--hook-option KEY=VALUE`, as each hook documents them.
        timeout: Seconds that one request, load or command may take.
        token: A bearer token or signing key; never logged.
    """

    address: str | None = None
    argv: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 300.0
    token: str | None = field(default=None, repr=False)


class Hook(ABC):
    """Makes one engine load versions, and says truthfully which one it runs."""

    name: ClassVar[str]
    kinds: ClassVar[frozenset[str]] = frozenset({"weights"})
    """The kinds of version that it can load."""

    checks_content: ClassVar[bool] = False
    """Whether `load` itself compares every byte with its digest where the target is not verified."""

    @classmethod
    @abstractmethod
    def from_options(cls, options: HookOptions) -> Self:
        """Return a hook for an engine.

        Raises:
            ConfigError: The options do not fit this hook.
        """

    def tensors(self) -> Mapping[str, TensorMeta] | None:
        """Return what the engine holds, None where it cannot say; the follower then asks what it loaded last."""
        return None

    @abstractmethod
    def prepare(self, target: WeightDirectory) -> None:
        """Get ready without touching what the engine runs.

        Raises:
            RefusedError: It can never be loaded by this engine.
            EngineUnreachableError: The engine does not answer.
        """

    @abstractmethod
    def load(self, target: WeightDirectory) -> None:
        """Take the weights in; the engine may be left paused until `commit` or `abort`.

        Raises:
            LoadFailedError: The engine could not.
            EngineUnreachableError: The engine does not answer.
        """

    @abstractmethod
    def commit(self, target: WeightDirectory) -> None:
        """Make the loaded weights what is served, and let the engine work.

        Raises:
            LoadFailedError: The engine could not.
            EngineUnreachableError: The engine does not answer.
        """

    @abstractmethod
    def current_version(self) -> Running:
        """Ask the engine what it runs.

        Raises:
            EngineUnreachableError: The engine does not answer.
        """

    @abstractmethod
    def abort(self, last_good: WeightDirectory | None) -> None:
        """Bring the engine back after a failure.

        Args:
            last_good: The version to go back to, still on this host; None if there is none, then an engine whose
                weights were touched is dead.

        Raises:
            EngineDeadError: It cannot be brought back.
            EngineUnreachableError: The engine does not answer.
        """

    def close(self) -> None:
        """Let go of connections; the engine keeps running."""
