"""The seam between the follower and an engine: `Hook`, and what hooks share.

A follower loads one version by these calls, in this order, in one thread:

    prepare(target)      the engine is not touched; what can be refused is refused here
    load(target)         the engine stops taking work if it must, and reads the weights
    commit(target)       caches are reset, the engine gets the version's label, it works again
    current_version()    returns what the engine itself says that it runs

If `probes` is "held", `probe(target, tokens)` comes before `commit`; if it is "serving", after it.
If `load` or `commit` raises, `abort(last_good)` follows: the engine works again on the last good version, or
`EngineDeadError` says that it cannot.
"""

import contextlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, Self

from syncd.client.client import Client
from syncd.errors import ConfigError, EngineDeadError, LoadFailedError, RefusedError
from syncd.protocol.version import UNKNOWN_LABEL, Pair, pair_of
from syncd.transports.base import EarlyReceiver, ReceiveContext, WeightDirectory, WeightTensors
from syncd.transports.tensors import TensorMeta

RESTART = "restart the engine"

ProbeTime = Literal["", "held", "serving"]
"""When an engine answers probes: never, while its work is held, or only while it works."""

Checksums = Mapping[str, Mapping[str, str]]
"""Of each replica the checksum of each parameter, by worker and name; empty where the engine gives none of it."""

_FLAGS = ("true", "false")


@dataclass(frozen=True, slots=True)
class Running:
    """What an engine says that it runs.

    Args:
        label: The engine's label for its weights; None if it was never given one, so it runs its start weights. A
            label that is of no version of the job means that nobody knows what the engine runs.
        paused: Whether it was left paused, so that it takes no work.
        unproven: How many loads ended in weights that were never proven, the present one too until it is proven. A
            follower counts them. Work that begins with one count and ends with another may be of such weights.
    """

    label: str | None
    paused: bool = False
    unproven: int = 0

    @property
    def pair(self) -> Pair | None:
        """Return the pair that the label names, None if it names none; its job is not checked here."""
        return pair_of(self.label)


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

    checks_content: ClassVar[bool] = False
    """Whether `load` itself compares every byte with its digest if the target is not verified."""

    probes: ProbeTime = ""
    """Whether the engine answers probes: not at all, while its work is held, or only while it works."""

    @classmethod
    @abstractmethod
    def from_options(cls, options: HookOptions) -> Self:
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

    def probe(
        self, target: WeightDirectory | WeightTensors | None, tokens: Sequence[Sequence[int]]
    ) -> ProbeAnswer:
        """Return what the engine answers to a probe; called only if `probes` says when.

        Args:
            target: The version that it was given last; None for its start weights.
            tokens: Sequences of token ids, each of at least two.

        Raises:
            LoadFailedError: It gives no answer, or none that can be read.
            EngineUnreachableError: It does not answer.
        """
        raise NotImplementedError

    def checksums(self) -> Checksums | None:
        """Return checksums of the parameters that the engine holds, None if it gives none.

        Two answers are compared with each other only: how they are computed is the engine's affair.

        Raises:
            EngineUnreachableError: It does not answer.
        """
        return None

    def reload_start(self) -> bool:
        """Have an engine on its start weights read them again; return false if it cannot be asked to.

        Raises:
            LoadFailedError: It could not; it gets no work until `abort`.
            EngineUnreachableError: It does not answer.
        """
        return False

    def dtype(self) -> str | None:
        """Return the dtype in which the engine computes, by its name in torch; None if it does not say.

        Raises:
            EngineUnreachableError: It does not answer.
        """
        return None

    def close(self) -> None:
        """Close connections; the engine keeps running."""


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
    def load_received(self, weights: WeightTensors, receiver: EarlyReceiver) -> None:
        """Have the engine run weights that were received, before they are published, and report that it does.

        Args:
            weights: The weights, which run under their `label` until then.
            receiver: What received them.

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


class HookSettings:
    """The settings of a hook, `--hook-option KEY=VALUE`: each value is checked, and an unknown key is refused.

    Args:
        hook: The hook's name, for messages.
        given: Values by name.
    """

    def __init__(self, hook: str, given: Mapping[str, str]) -> None:
        self._hook = hook
        self._given = dict(given)
        self._known: list[str] = []

    def text(self, key: str, default: str) -> str:
        """Return a text."""
        self._known.append(key)
        return self._given.get(key, default)

    def choice(self, key: str, default: str, among: tuple[str, ...]) -> str:
        """Return one of a few words.

        Raises:
            ConfigError: It is another word.
        """
        return self._checked(key, default, f"one of {', '.join(among)}", lambda value: value in among)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return true or false.

        Raises:
            ConfigError: It is neither.
        """
        return self._checked(key, str(default).lower(), "true or false", _FLAGS.__contains__) == "true"

    def seconds(self, key: str, default: float) -> float:
        """Return a number of seconds above 0.

        Raises:
            ConfigError: It is not one.
        """
        return float(self._checked(key, str(default), "a number of seconds above 0", _is_positive))

    def count(self, key: str, default: int) -> int:
        """Return a whole number, at least 0.

        Raises:
            ConfigError: It is not one.
        """
        is_count = re.compile("[0-9]+").fullmatch
        return int(self._checked(key, str(default), "a whole number", is_count))

    def done(self) -> None:
        """Return if every given setting was read.

        Raises:
            ConfigError: One is unknown.
        """
        if unknown := sorted(set(self._given) - set(self._known)):
            raise ConfigError(
                f"the hook {self._hook} has no setting {', '.join(unknown)}",
                hint=f"it has {', '.join(sorted(self._known))}",
            )

    def _checked(self, key: str, default: str, wanted: str, is_good: Callable[[str], object]) -> str:
        value = self.text(key, default)
        if not is_good(value):
            raise ConfigError(f"{key}={value} of the hook {self._hook}", hint=f"{key} is {wanted}")
        return value


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


@contextlib.contextmanager
def restoring(failure: str, hint: str, path: object = None) -> Iterator[None]:
    """Restore an engine in the block.

    Raises:
        EngineDeadError: The block raised `LoadFailedError`.
    """
    try:
        yield
    except LoadFailedError as error:
        raise EngineDeadError(f"{failure}: {error.message}", path=path, hint=hint) from error


class LoadState:
    """Whether an engine's weights may differ from the last version that it served well.

    They may from `load` on, until the next `prepare`: by then the follower has accepted what was committed.
    """

    def __init__(self) -> None:
        self.touched = False
        self._committed = False

    def prepare(self) -> None:
        """Begin with a version; the last one was good if it was committed and not restored away."""
        if self._committed:
            self.touched = False

    def load(self) -> None:
        """Note that the engine's weights are about to change."""
        self.touched, self._committed = True, False

    def commit(self) -> None:
        """Note that the version is served."""
        self._committed = True

    def restored(self) -> None:
        """Note that the engine is back on a good version."""
        self.touched = False
        self._committed = False

    @contextlib.contextmanager
    def restoring(self, hint: str) -> Iterator[None]:
        """Restore the engine in the block.

        Raises:
            EngineDeadError: The block raised `LoadFailedError`.
        """
        with restoring("the engine could not be restored", hint):
            yield
        self.restored()

    def require_untouched(self, hint: str) -> None:
        """Return if the engine still runs the last version that it served well.

        Raises:
            EngineDeadError: Its weights were touched, and there is no version to restore.
        """
        if self.touched:
            raise EngineDeadError(
                "the engine was touched and there is no good version to go back to", hint=hint
            )


class PhaseHook(Hook):
    """A hook that has somebody else's program do each phase, and remembers what was committed last."""

    kinds: ClassVar[frozenset[str]] = frozenset({"weights", "lora", "remote", "foreign"})

    def __init__(self) -> None:
        self._state = LoadState()
        self._label: str | None = None

    @abstractmethod
    def _do(self, phase: str, target: WeightDirectory) -> None:
        """Have the program do `prepare`, `load` or `commit` of a version, or `abort` with the one to restore."""

    def prepare(self, target: WeightDirectory) -> None:
        """Refuse a version of another kind or without a directory; the program may refuse it too."""
        require_loadable(target, self)
        self._state.prepare()
        self._do("prepare", target)

    def load(self, target: WeightDirectory) -> None:
        """Have the program load it."""
        self._state.load()
        self._do("load", target)

    def commit(self, target: WeightDirectory) -> None:
        """Have the program serve it; the label is the new one from now on."""
        self._do("commit", target)
        self._keep(target.label)
        self._state.commit()

    def abort(self, last_good: WeightDirectory | None) -> None:
        """Have the program restore the last good version."""
        if last_good is None:
            self._state.require_untouched(RESTART)
            return
        self._keep(UNKNOWN_LABEL)
        with self._state.restoring(RESTART):
            self._do("abort", last_good)
        self._keep(last_good.label)

    def _keep(self, label: str | None) -> None:
        self._label = label


def require_loadable(target: WeightDirectory, hook: Hook) -> None:
    """Return if a hook can load the kind of a version and its directory is on this host.

    Raises:
        RefusedError: It cannot, or there is no directory.
    """
    kind = target.version.kind
    if kind not in hook.kinds:
        loads = ", ".join(sorted(hook.kinds))
        raise RefusedError(
            f"version {target.label} is of kind {kind}, and the hook {hook.name} loads {loads}",
            hint="use the hook that fits what the trainer publishes",
        )
    if kind != "remote" and not os.path.isdir(target.path):
        raise RefusedError(
            f"the directory of version {target.label} is not on this host", path=target.path, hint="syncd ls"
        )
