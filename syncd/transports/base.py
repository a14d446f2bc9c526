"""The interface of a transport: how weights leave a trainer and reach an explorer. Imports no torch.

A transport is registered under the entry point group `syncd.transports` by the name that `sync.method` says, as a
`Transport`: the import paths of its two ends. An end is imported when it is opened, so that a follower without torch
can open the end that it needs.

Every sender also makes the durable step on disk. So an explorer that a transport does not reach loads the files.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Self, TypeVar

from syncd.client.sync_policy import TRANSPORTS
from syncd.errors import ConfigError
from syncd.protocol.adapter_base import AdapterBase
from syncd.protocol.broadcast_round import Round
from syncd.protocol.layout import Job
from syncd.protocol.manifest import Manifest
from syncd.protocol.probe import Probe
from syncd.protocol.receipt import FileRecord
from syncd.protocol.version import Pair, Version, engine_label, unpublished_label
from syncd.registered import registered
from syncd.transports.host_memory import HostMemory, unlimited
from syncd.transports.tensors import TensorMeta

if TYPE_CHECKING:
    import torch

    from syncd.client.client import Client
    from syncd.jobfile.sections import SyncSection
    from syncd.transports.ranks import Ranks

E = TypeVar("E", bound="WeightSender | WeightReceiver")

FILES = "checkpoint"
"""The transport through files. It always works, and every other one wraps its sender."""

Export = Callable[[], "Iterable[tuple[str, torch.Tensor]]"]
"""Begins a walk over the names and tensors of the weights; every rank walks all of it."""

Announcement = Version | Round
"""What tells an explorer of newer weights: a published version, or a broadcast that begins."""


@dataclass(frozen=True, slots=True)
class StoredChanges:
    """How a version is stored as changes of earlier ones, for models of this process.

    Args:
        manifests: Of the version, and of what it is stored as changes of: the version first. Those of a delta end
            with its keyframe; that of weights with a shortcut is alone.
    """

    job: Job
    manifests: tuple[Manifest, ...]


@dataclass(frozen=True, slots=True)
class WeightDirectory:
    """A version that can be loaded from this host.

    Args:
        path: The directory to load: the staged copy or the job's own; the URI for kind remote.
        shards: Its safetensors files, names relative to `path`; none where others wrote the step.
        tensors: What each tensor is, by name; none where that cannot be known without the engine.
        verified: Whether every byte at `path` was compared with the manifest's digests already.
        probe: What the trainer's model answers with these weights; None if its manifest has no probe.
        base: For adapters, the model that they belong to; None if the manifest does not say.
        changes: How it is stored as changes; only for a `ChangesHook`. Of a delta, `path` does not have the shards.
    """

    version: Version
    path: str
    shards: tuple[FileRecord, ...] = ()
    tensors: Mapping[str, TensorMeta] = field(default_factory=dict)
    verified: bool = False
    probe: Probe | None = None
    base: AdapterBase | None = None
    changes: StoredChanges | None = None

    @property
    def label(self) -> str:
        """Return the name by which engines know this version."""
        return engine_label(self.version.pair, self.version.digest)


@dataclass(frozen=True)
class WeightTensors:
    """A step whose tensors are in this process's memory; its files may not be published yet.

    Args:
        pair: The pair that the step has once it is published.
        attempt: The save that writes the same weights to files.
        tensors: The tensors by name. They are valid until the receiver is next asked for weights; the parameters
            that the receiver gave them to stay valid.
        probe: What the trainer's model answers with these weights; None if the round has no probe.
    """

    pair: Pair
    attempt: str
    tensors: "Mapping[str, torch.Tensor]" = field(repr=False)
    probe: Probe | None = None

    @property
    def step(self) -> int:
        """Return the trainer's step."""
        return self.pair[1]

    @property
    def label(self) -> str:
        """Return the name by which engines know this step until it is published."""
        return unpublished_label(self.pair, self.attempt)


@dataclass(frozen=True, slots=True)
class StepContent:
    """What one step is made of.

    Args:
        files: What belongs beside the weights, by file name.
        probe: What the model answers with these weights, so that receivers get it with them; None without one.
        must_be_whole: Why the step must not be stored as a delta; empty if it may.
    """

    export: Export
    files: Mapping[str, bytes] = field(default_factory=dict)
    probe: Probe | None = None
    must_be_whole: str = ""


@dataclass(frozen=True, slots=True)
class Sent:
    """The result of one send, as one rank knows it.

    Args:
        method: The transport that was asked to send.
        size: Bytes of the weights.
        seconds: nccl: until all members had them. Else: until this rank's files were durable.
        is_done: Whether that transport delivered them; False if only the files did.
        is_received: Whether `seconds` is the time until explorers had them, so that their loads do not count.
        begins_deltas: Whether files have the step whole, and the next one may be stored as changes of it.
    """

    method: str
    step: int
    size: int
    seconds: float
    is_done: bool
    is_received: bool = False
    begins_deltas: bool = False


@dataclass(frozen=True)
class SendContext:
    """What a sender is opened with.

    Args:
        settings: The job file's section `[sync]`.
        client: The trainer's client; None on all ranks but the first.
        tied: Names of the export that repeat another tensor, and are left out.
        fence: The directory through which this trainer seals and announces steps.
        files: The opened sender of transport `checkpoint`; None while that one is opened.
        base: If steps are adapters, the model that they belong to; None if steps are whole weights.
        memory: The budget of this rank for buffers and copies in the memory of its host.
    """

    job: Job
    ranks: "Ranks"
    settings: "SyncSection"
    client: "Client | None" = None
    tied: Collection[str] = ()
    fence: str = ""
    files: "WeightSender | None" = None
    base: AdapterBase | None = None
    memory: HostMemory = field(default_factory=unlimited)


@dataclass(frozen=True)
class ReceiveContext:
    """What a receiver is opened with.

    Args:
        stop: Polled while weights are received; once it returns true, the receiver gives up.
        parameters: The tensors to fill, by name; None if another process holds them.
        check_fit: Raises RefusedError if the engine cannot load such tensors; None to compare with `parameters`.
        allocate: Returns so many bytes of main memory for a receiver that has no parameters; None for torch's own.
    """

    client: "Client"
    stop: Callable[[], bool]
    parameters: "Mapping[str, torch.Tensor] | None" = None
    check_fit: Callable[[Mapping[str, TensorMeta]], None] | None = None
    allocate: "Callable[[int], torch.Tensor] | None" = None


class WeightSender(ABC):
    """The trainer's end of a transport. All ranks make the same calls in the same order."""

    name: str
    """What `sync.method` calls it."""

    sends_checkpoints: bool = False
    """Whether the weights of a full checkpoint go out this way too if no sync is due."""

    @classmethod
    @abstractmethod
    def open(cls, context: SendContext) -> Self:
        """Return a sender.

        Raises:
            SyncdError: It cannot be opened; on all ranks.
        """

    @abstractmethod
    def prepare(self, export: Export) -> None:
        """Allocate what the first send needs, by shapes and dtypes alone. A second call does nothing."""

    @abstractmethod
    def send(self, step: int, attempt: str, content: StepContent) -> None:
        """Begin to send one step; return once training may continue. The send before it must have ended by `wait`.

        Args:
            step: The trainer's step.
            attempt: A name that all ranks share in this send and that no other send has.
            content: The weights, and what goes with them.

        Raises:
            SyncdError: The step will not exist; on all ranks, and nothing of it is left.
        """

    @abstractmethod
    def wait(self) -> None:
        """Return once the step is whole on disk and announced. A second call returns at once.

        Raises:
            SyncdError: The step will not exist; on all ranks, once, and nothing of it is left.
        """

    @property
    @abstractmethod
    def sent(self) -> Sent | None:
        """Return the result of the last send, None while this rank does not know it."""

    @property
    def has_failed(self) -> bool:
        """Return whether this rank knows already that the send in flight has failed; `wait` raises why."""
        return False

    def unavailable(self) -> str:
        """Return why the next send cannot use this transport, empty if it can. Rank 0's answer counts."""
        return ""

    @abstractmethod
    def close(self) -> None:
        """Finish the send in flight, then give threads and memory back. A second call does nothing."""


class WeightReceiver(ABC):
    """The explorer's end of a transport. Used by one thread."""

    name: str
    """What `sync.method` calls it."""

    @classmethod
    @abstractmethod
    def open(cls, context: ReceiveContext) -> Self:
        """Return a receiver.

        Raises:
            SyncdError: It cannot be opened.
        """

    @abstractmethod
    def receive(self, announcement: Announcement, timeout: float) -> WeightDirectory | WeightTensors | None:
        """Return the announced weights, None if this transport does not have them here: ask the next one.

        Raises:
            SyncdError: They are damaged, or the job cannot be read.
        """

    def join(self) -> None:
        """Have the trainer count on this explorer. Only transports that need it do something."""

    def leave(self) -> None:
        """Have the trainer no longer count on this explorer, until `join`."""

    @abstractmethod
    def close(self) -> None:
        """Leave, and give memory back. A second call does nothing."""


@dataclass(frozen=True, slots=True)
class Transport:
    """The import paths `module:class` of a transport's two ends; an end is imported when it is opened.

    Args:
        source: For a transport that delivers before publication: the explorer's `WeightSource` over its receiver, so
            that this module does not know it; empty for all others.
    """

    sender: str
    receiver: str
    source: str = ""

    def open_sender(self, context: SendContext) -> WeightSender:
        """Return the trainer's end."""
        return _imported(self.sender, WeightSender).open(context)  # type: ignore[type-abstract]

    def receiver_class(self) -> type[WeightReceiver]:
        """Return the class of the explorer's end."""
        return _imported(self.receiver, WeightReceiver)  # type: ignore[type-abstract]

    def open_receiver(self, context: ReceiveContext) -> WeightReceiver:
        """Return the explorer's end."""
        return self.receiver_class().open(context)


def transport_names() -> tuple[str, ...]:
    """Return the names of all installed transports."""
    return tuple(registered(TRANSPORTS))


def find_transport(name: str) -> Transport:
    """Return the transport that an installed package registers under a name.

    Raises:
        ConfigError: There is none, or it cannot be imported.
    """
    points = registered(TRANSPORTS)
    if name not in points:
        installed = ", ".join(points) or "none"
        raise ConfigError(f"no transport is called {name[:80]!r}", hint=f"installed transports: {installed}")
    try:
        transport = points[name].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"transport {name} cannot be imported: {error}") from error
    if not isinstance(transport, Transport):
        raise ConfigError(f"entry point {name!r} of {TRANSPORTS} is not a Transport")
    return transport


def open_senders(names: Iterable[str], context: SendContext) -> dict[str, WeightSender]:
    """Return opened senders by name; the one of transport `checkpoint` is always among them.

    Raises:
        SyncdError: One of them cannot be opened; those before it are closed.
    """
    opened: dict[str, WeightSender] = {}
    try:
        for name in (FILES, *(name for name in names if name != FILES)):
            opened[name] = find_transport(name).open_sender(replace(context, files=opened.get(FILES)))
    except BaseException:
        close_senders(opened.values())
        raise
    return opened


def close_senders(senders: Collection[WeightSender]) -> None:
    """Close senders, the last one first; an error is raised when all of them are closed."""
    with ExitStack() as closing:
        for sender in senders:
            closing.callback(sender.close)


def _imported(path: str, kind: type[E]) -> type[E]:
    try:
        end = resolve_name(path)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"transport end {path} cannot be imported: {error}") from error
    if not (isinstance(end, type) and issubclass(end, kind)):
        raise ConfigError(f"{path} is no {kind.__name__}")
    return end
