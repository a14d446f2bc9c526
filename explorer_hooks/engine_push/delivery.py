"""One version from this process's memory into one engine, which is paused: what is common to all engines.

    with contextlib.closing(delivery):
        delivery.open()
        delivery.push("2.120", tensors)

The weights are cut into buckets of whole tensors. For each, the engine is sent a request that says what comes, and
while it works on that, the tensors go through a group of this process and the engine's workers.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from explorer_hooks.engine_push.call import Call, finish
from syncd.client.wait import Deadline
from syncd.errors import LoadFailedError, SyncdError
from syncd.protocol.local_disk import SystemClock
from syncd.transports.broadcast.carrying import GroupError

if TYPE_CHECKING:
    import torch

    from explorer_hooks.engine_push.group import LocalGroup

BUCKET = 256 << 20
"""Bytes of a bucket, but for tensors that are larger: the engine has room for one beside its weights."""

JOINING = 60.0
"""Seconds that the engine's workers may take to come into a group; they are there, and idle."""

_LAST_WORDS = 2.0
"""Seconds that an engine may take to say why a group broke."""

_SETTLING = 10.0
"""Seconds that a request may go on for whose group is gone."""


class Link(NamedTuple):
    """How a group with an engine's workers is formed.

    Args:
        address: The address of this host on which it listens.
        timeout: Seconds that one version may take.
    """

    address: str
    timeout: float


class Delivery(ABC):
    """One version on its way into an engine. Used by one thread.

    Args:
        link: How the group is formed.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._deadline = Deadline(SystemClock(), link.timeout)
        self._group: LocalGroup | None = None
        self._call: Call | None = None
        self.touched = False
        """Whether the engine's weights may be something else than before."""

    @abstractmethod
    def open(self) -> None:
        """Have the engine and this process meet in a group.

        Raises:
            SyncdError: They did not; `touched` says what became of the engine.
        """

    def push(self, label: str, tensors: "Mapping[str, torch.Tensor]") -> None:
        """Have the engine take the weights in.

        Args:
            label: What the engine is to call them.
            tensors: All of them by name.

        Raises:
            SyncdError: It did not.
        """
        buckets = list(cut({name: tensor.nbytes for name, tensor in tensors.items()}, BUCKET))
        for names in buckets:
            is_last = names is buckets[-1]
            self._carry({name: tensors[name] for name in names}, label if is_last else None)
        self._seal(label)

    @abstractmethod
    def _update(self, tensors: "Mapping[str, torch.Tensor]", label: str | None) -> None:
        """Tell the engine which tensors come now, and wait for it to have taken them in.

        Args:
            tensors: The tensors, in the order in which they are sent.
            label: What the weights are called, with the last ones only.
        """

    @abstractmethod
    def _seal(self, label: str) -> None:
        """Tell the engine that this was all."""

    @abstractmethod
    def _leave(self) -> None:
        """Have the engine forget the group and an update that was not ended; the group is gone already.

        Raises:
            SyncdError: It did not.
        """

    def close(self) -> None:
        """End the group, and have the engine forget it, whatever has happened; within seconds."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()
        if self._call is not None:
            self._call.settle(_SETTLING)
        with contextlib.suppress(SyncdError):
            self._leave()

    def _meet(self, workers: int, invite: "Sequence[str]", ask: Any) -> None:
        """Form the group while the engine is asked to come.

        Args:
            workers: How many there are.
            invite: What the engine puts before its keys, as `LocalGroup.form` has it, without the secret.
            ask: Called with the group; asks the engine.
        """
        from explorer_hooks.engine_push.group import LocalGroup  # noqa: PLC0415 - torch

        joining = Deadline(SystemClock(), min(JOINING, max(self._deadline.left(), 0.0)))
        self._group = group = LocalGroup(self._link.address, workers, self._deadline)
        prefixes = [prefix.format(secret=group.secret) for prefix in invite]
        self._call = Call(lambda: ask(group))
        forming = Call(lambda: group.form(prefixes, joining))
        finish((self._call, forming), joining)

    def _carry(self, tensors: "Mapping[str, torch.Tensor]", label: str | None) -> None:
        group = self._group
        if group is None:
            raise LoadFailedError("the engine is in no group")
        self.touched = True
        self._call = call = Call(lambda: self._update(tensors, label))
        try:
            works = [group.send(tensor) for tensor in tensors.values()]
            for work in works:
                group.finish(work, call.goes_on)
        except GroupError:
            # The engine's own words say more, where it is still there to say any.
            call.settle(_LAST_WORDS)
            call.goes_on()
            raise
        finish((call,), self._deadline)


def cut(sizes: Mapping[str, int], bucket: int) -> Iterator[list[str]]:
    """Yield the names of each bucket, in order: as many as fit, and one at least.

    Args:
        sizes: Bytes of each tensor by name.
        bucket: Bytes of a bucket.
    """
    names: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if names and filled + size > bucket:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += size
    if names:
        yield names


def described(tensors: "Mapping[str, torch.Tensor]") -> tuple[list[str], list[str], list[list[int]]]:
    """Return names, dtypes as torch calls them, and shapes."""
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()]
    return list(tensors), dtypes, [list(tensor.shape) for tensor in tensors.values()]
