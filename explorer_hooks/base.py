"""The seam between the follower and an engine: what is to be loaded, and who loads it.

One version is loaded by these calls, in this order, by one thread:

    prepare(target)      the engine is not touched; whatever can be refused is refused here
    load(target)         the engine stops taking work if it must, and takes the weights in
    commit(target)       caches are reset, the engine is told its version, it works again
    current_version()    what the engine itself says that it runs

If `load` or `commit` raises, `abort(last_good)` follows: the engine is back on the last good version and works,
or `EngineDeadError` says that it cannot be.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Self

from syncd.protocol.receipt import FileRecord
from syncd.protocol.version import Pair, Version

UNKNOWN = "unknown"
"""The label of weights that nobody can name: neither a version nor the weights that the engine started with."""

_CONTENT = re.compile(r"[0-9a-f]{16}", re.ASCII)
_LABEL = re.compile(r"(0|[1-9][0-9]{0,15})\.(0|[1-9][0-9]{0,15})(?:\.[0-9a-f]{16}|\+[!-~]+)", re.ASCII)


class TensorMeta(NamedTuple):
    """What a tensor is, without its elements.

    Args:
        dtype: As safetensors names it: F32, BF16, ...
        shape: Its shape.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """A version that can be loaded from this host.

    Args:
        version: The version.
        path: The directory to load: the staged copy or the job's own; the URI for kind remote.
        shards: Its safetensors files, names relative to `path`; none where others wrote the step.
        tensors: What each tensor is, by name; none where that cannot be known without the engine.
        verified: Whether every byte at `path` was compared with the manifest's digests already.
    """

    version: Version
    path: str
    shards: tuple[FileRecord, ...] = ()
    tensors: Mapping[str, TensorMeta] = field(default_factory=dict)
    verified: bool = False

    @property
    def label(self) -> str:
        """Return the version as engines are told it."""
        return engine_label(self.version.pair, self.version.digest)


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
    def prepare(self, target: Target) -> None:
        """Get ready without touching what the engine runs.

        Raises:
            RefusedError: It can never be loaded by this engine.
            EngineUnreachableError: The engine does not answer.
        """

    @abstractmethod
    def load(self, target: Target) -> None:
        """Take the weights in; the engine may be left paused until `commit` or `abort`.

        Raises:
            LoadFailedError: The engine could not.
            EngineUnreachableError: The engine does not answer.
        """

    @abstractmethod
    def commit(self, target: Target) -> None:
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
    def abort(self, last_good: Target | None) -> None:
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


def label_of(pair: Pair) -> str:
    """Return a pair as people read it, such as 2.120."""
    return f"{pair[0]}.{pair[1]}"


def engine_label(pair: Pair, digest: str) -> str:
    """Return a version as engines are told it, such as 2.120.0f1e2d3c4b5a6978: the pair and its content.

    Args:
        pair: The version's pair.
        digest: The digest of its manifest, or the fingerprint of a step that others wrote.
    """
    found = digest.rpartition(":")[2][:16]
    if not _CONTENT.fullmatch(found):
        found = hashlib.sha256(digest.encode()).hexdigest()[:16]
    return f"{label_of(pair)}.{found}"


def unpublished_label(pair: Pair, attempt: str) -> str:
    """Return what engines are told of weights that came by a broadcast, until their version is published.

    They have no manifest yet, so the attempt of the save that writes them to files names the content.
    """
    return f"{label_of(pair)}+{attempt}"


def is_unpublished(label: str) -> bool:
    """Say whether a label is of weights that came by a broadcast and were not published yet."""
    return "+" in label and pair_of(label) is not None


def pair_of(label: str | None) -> Pair | None:
    """Return the pair of a label that names content, None of anything else: of a bare 2.120 too."""
    found = _LABEL.fullmatch(label or "")
    return (int(found[1]), int(found[2])) if found else None
