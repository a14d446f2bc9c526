"""The seam between the follower and an engine: `Hook`, and what some hooks have besides.

A follower loads one version by these calls, in this order, in one thread:

    prepare(target)      the engine is not touched; what can be refused is refused here
    load(target)         the engine stops taking work if it must, and reads the weights
    commit(target)       caches are reset, the engine gets the version's label, it works again
    current_version()    returns what the engine itself says that it runs
    settle(target)       what was kept to go back from the version is given up

A `ProbingHook` is also asked `probe(target, tokens)`: before `commit` if its `probes` is "held", after it if that is
"serving".
If `load` or `commit` raises, `abort(last_good)` follows: the engine works again on the last good version, or
`EngineDeadError` says that it cannot.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

from syncd.client.client import Client
from syncd.errors import LoadFailedError
from syncd.protocol.version import Pair, engine_label, pair_of
from syncd.transports.base import ReceiveContext, WeightDirectory, WeightTensors
from syncd.transports.tensors import TensorMeta

ProbeTime = Literal["", "held", "serving"]
"""When an engine answers probes: never, while its work is held, or only while it works."""

EXAM_DIGEST = f"sha256:{hashlib.sha256(b'an exam of syncd').hexdigest()}"
EXAM_LABEL = engine_label((0, 0), EXAM_DIGEST)
"""What an engine runs that is examined: the label of no version of any job."""

Checksums = Mapping[str, Mapping[str, str]]
"""Of each replica the checksum of each parameter, by worker and name; empty where the engine gives none of it."""


class Unproven(NamedTuple):
    """What is not proven of an engine's weights under one label.

    Args:
        failed: How many loads under this label ended in weights that were never proven.
        pending: Whether it may work on weights under this label whose probe it has not answered yet.
    """

    failed: int = 0
    pending: bool = False


class PendingProof(NamedTuple):
    """A probe of an engine's weights that it has not answered yet.

    Args:
        label: Their label.
        failed: How many loads under this label had ended unproven by then.
    """

    label: str
    failed: int

    def has_passed(self, loads: Mapping[str, Unproven]) -> bool:
        """Return whether it has proven these weights since then.

        Args:
            loads: What is not proven now, by label.
        """
        now = loads.get(self.label, Unproven())
        return not now.pending and now.failed == self.failed


@dataclass(frozen=True, slots=True)
class Running:
    """What an engine says that it runs.

    Args:
        label: The engine's label for its weights; None if it was never given one, so it runs its start weights. A
            label that is of no version of the job means that nobody knows what the engine runs.
        paused: Whether it was left paused, so that it takes no work.
        unproven: What is not proven, by label. A follower counts it; the engine does not know.
    """

    label: str | None
    paused: bool = False
    unproven: Mapping[str, Unproven] = field(default_factory=dict)

    @property
    def pair(self) -> Pair | None:
        """Return the pair that the label names, None if it names none; its job is not checked here."""
        return pair_of(self.label)

    def unproven_since(self, before: "Running") -> frozenset[str]:
        """Return the labels of weights on which it may have worked since then, and which were not proven."""
        earlier = before.unproven
        return frozenset(
            label
            for label, now in self.unproven.items()
            if now.pending or now.failed != earlier.get(label, Unproven()).failed
        )

    def pending_since(self, before: "Running") -> PendingProof | None:
        """Return the probe that alone can tell whether weights are the right ones on which it may have worked.

        None if there is none, or if a load under the same label has failed since then.
        """
        earlier = before.unproven
        return next(
            (
                PendingProof(label, now.failed)
                for label, now in self.unproven.items()
                if now.pending and now.failed == earlier.get(label, Unproven()).failed
            ),
            None,
        )


class ProbeAnswer(NamedTuple):
    """What an engine answers to a probe.

    Args:
        logprobs: For each sequence, the log-prob of each token after the first.
        fresh: The log-prob of the token that the engine chose after one long prompt, read without its prefix cache;
            None if that was not asked.
        cached: The same, for a request that goes through its prefix cache.
        others: The answers of the other replicas behind the engine's address, which may hold other weights.
    """

    logprobs: tuple[tuple[float, ...], ...]
    fresh: float | None = None
    cached: float | None = None
    others: tuple["ProbeAnswer", ...] = ()


@dataclass(frozen=True, slots=True)
class HookOptions:
    """What every hook is opened with.

    Args:
        address: The text behind `=` in `--hook NAME=ADDRESS`: a URL, a command, an import path.
        argv: The command behind `--`, if one was given.
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
    """Makes one engine load versions, and reports which one it runs."""

    name: ClassVar[str]
    kinds: ClassVar[frozenset[str]] = frozenset({"weights"})
    """The kinds of version that it can load."""

    takes: ClassVar[frozenset[str]] = frozenset({"directory"})
    """In which form it takes weights: "directory", "tensors" (in this process's memory), or both."""

    checks_content: bool = False
    """Whether `load` itself compares every byte with its digest if the target is not verified."""

    @classmethod
    @abstractmethod
    def from_options(cls, options: HookOptions) -> "Hook":
        """Return a hook for an engine.

        Raises:
            ConfigError: The options do not fit this hook.
        """

    def tensors(self) -> Mapping[str, TensorMeta] | None:
        """Return the engine's tensors, None if it cannot list them; then those of the first version count."""
        return None

    @abstractmethod
    def prepare(self, target: WeightDirectory) -> None:
        """Check the version without touching what the engine runs.

        Raises:
            RefusedError: This engine can never load it.
            EngineUnreachableError: The engine does not answer.
        """

    @abstractmethod
    def load(self, target: WeightDirectory) -> None:
        """Have the engine read the weights; it may be left paused until `commit` or `abort`.

        Raises:
            LoadFailedError: The engine could not.
            EngineUnreachableError: The engine does not answer.
        """

    @abstractmethod
    def commit(self, target: WeightDirectory) -> None:
        """Have the engine serve the loaded weights, and take work.

        Raises:
            LoadFailedError: The engine could not.
            EngineUnreachableError: The engine does not answer.
        """

    @abstractmethod
    def current_version(self) -> Running:
        """Return what the engine says that it runs.

        Raises:
            EngineUnreachableError: The engine does not answer.
        """

    @abstractmethod
    def abort(self, last_good: WeightDirectory | None) -> None:
        """Restore the engine after a failed load.

        Args:
            last_good: The version to restore, still on this host; None if there is none: an engine whose weights
                were touched is dead then.

        Raises:
            EngineDeadError: The engine cannot be restored.
            EngineUnreachableError: The engine does not answer.
        """

    def settle(self, target: WeightDirectory) -> None:
        """Give up what only going back from a version would need; called once the engine has confirmed or proven it.

        Nothing here may fail the version: what cannot be given up now is given up after the next one.
        """

    def close(self) -> None:
        """Close connections; the engine keeps running."""


class ProbingHook(Hook):
    """A hook whose engine answers probes: whether it runs a version can be proven."""

    probes: ProbeTime = "serving"
    """When the engine answers: while its work is held, only while it works, or not at all if that is switched off."""

    asks_cache: bool = True
    """Whether an answer also says what a prefix cache holds; false once an exam has shown that loads reset it."""

    @abstractmethod
    def probe(
        self, target: WeightDirectory | WeightTensors | None, tokens: Sequence[Sequence[int]]
    ) -> ProbeAnswer:
        """Return what the engine answers to a probe; called when `probes` says so.

        Args:
            target: The version that it was given last; None for its start weights.
            tokens: Sequences of token ids, each of at least two.

        Raises:
            LoadFailedError: It gives no answer, or none that can be read.
            EngineUnreachableError: It does not answer.
        """

    def checksums(self) -> Checksums | None:
        """Return checksums of the parameters that the engine holds, None if it gives none.

        Two answers are compared with each other only: how they are computed is the engine's affair.

        Raises:
            EngineUnreachableError: It does not answer.
        """
        return None

    is_own: ClassVar[bool] = False
    """Whether nobody but this process can have the engine work."""

    def start_directory(self) -> str:
        """Return the directory of this host that the engine was started from, if it can read that again; else empty.

        Raises:
            EngineUnreachableError: It does not answer.
        """
        return ""

    def mark(self, label: str) -> None:
        """Give an engine a label before other weights, so that whoever follows it next knows that they came.

        Raises:
            SyncdError: The engine was not told.
        """

    def reload_start(self) -> bool:
        """Have an engine on its start weights read them again; return false if it cannot be asked to.

        Raises:
            LoadFailedError: It could not; it gets no work until `abort`.
            EngineUnreachableError: It does not answer.
        """
        return False

    def end_exam(self) -> bool:
        """Take back what an exam has loaded; return whether the engine has read its start weights again.

        Raises:
            LoadFailedError: It could not; it gets no work until `abort`.
            EngineUnreachableError: It does not answer.
        """
        return self.reload_start()

    def dtype(self) -> str | None:
        """Return the dtype in which the engine computes, by its name in torch; None if it does not say.

        Raises:
            EngineUnreachableError: It does not answer.
        """
        return None

    def has_ended(self) -> bool | None:
        """Return whether the engine's process has ended, None if this host cannot see that; it never raises."""
        return None

    def engine_kind(self) -> str:
        """Return the engine's product and release, and those of its flags that it tells of.

        Raises:
            EngineUnreachableError: It does not answer.
        """
        return self.name

    def adapter_kind(self, target: WeightDirectory | WeightTensors | None) -> str:
        """Return what kind of adapter a version is, empty for whole weights."""
        del target
        return ""

    def rounding(self) -> str:
        """Return the flags by which the engine rounds weights, keys or values further than its dtype does.

        Empty if it has none, or does not say. Its answers then differ from the trainer's by an amount that nobody
        knows beforehand.

        Raises:
            EngineUnreachableError: It does not answer.
        """
        return ""


class ChangesHook(Hook):
    """A hook that also takes versions that are stored as changes, and puts them into memory of this process.

    It is given such a version without its files: `WeightDirectory.changes` says where the changes are.
    """

    reads_changes: bool = True
    """Whether it takes them at all: a hook may do so only with what it was opened with."""

    @abstractmethod
    def takes_changes(self) -> bool:
        """Return whether changes are quicker than files: the memory can be read as the bytes of a file."""

    def fill_seconds(self) -> float | None:
        """Return what it took to read the last version and to put it into memory, None if that was not measured.

        Waiting for whoever uses the memory does not count. The trainer compares these times of whole versions with
        those of changes.
        """
        return None


class UntouchedError(LoadFailedError):
    """The engine refused the weights before it wrote anything."""


class TensorHook(Hook):
    """A hook that also loads what a transport has received into memory, before the step is published."""

    takes: ClassVar[frozenset[str]] = frozenset({"directory", "tensors"})
    is_restored_at_once: ClassVar[bool] = False
    """Whether the follower restores an engine that `load_received` left half loaded, before files are loaded."""

    def no_broadcasts(self) -> str:
        """Return why the engine cannot take weights from this process's memory, empty if it can."""
        return ""

    @abstractmethod
    def receive_context(self, client: Client, stop: Callable[[], bool]) -> ReceiveContext:
        """Return what a receiver for this engine is opened with."""

    @abstractmethod
    def load_received(self, weights: WeightTensors, fill: Callable[[], None]) -> None:
        """Have the engine run weights that were received, before they are published.

        Args:
            weights: The weights, which run under their `label` until then.
            fill: Gives them to the parameters that the receiver was opened with.

        Raises:
            UntouchedError: The engine took nothing and still runs what it ran.
            LoadFailedError: It gets no work until a version is loaded or `abort` is called.
            EngineUnreachableError: It does not answer.
        """

    @abstractmethod
    def set_label(self, label: str) -> None:
        """Replace the label of weights from `load_received` by that of their files, once they are published.

        Raises:
            SyncdError: The engine was not told.
        """

    @abstractmethod
    def drop_label(self) -> None:
        """Forget the label of weights that were not published: the engine runs unknown weights."""
