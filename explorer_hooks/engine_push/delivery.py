"""One version from this process's memory into one paused engine: what is common to all engines.

    with contextlib.closing(delivery):
        delivery.push("2.120", tensors)

The weights are cut into buckets of whole tensors. For each bucket the engine gets a request that names its tensors.
Meanwhile the tensors go through a process group of this process and the engine's workers.
The group is over gloo and listens on one address only, so the engine's weights may be anywhere and this process needs
no accelerator.
"""

import contextlib
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from explorer_hooks.http_client import HttpClient
from syncd.client.wait import Deadline
from syncd.errors import LoadFailedError, SyncdError
from syncd.protocol.local_disk import SystemClock
from syncd.transports.broadcast.group_calls import Failure, GroupError, seconds_left
from syncd.transports.broadcast.process_group import ProcessGroup

BUCKET = 256 << 20
"""Bytes of a bucket unless one tensor is larger: the engine needs memory for one bucket beside its weights."""

JOINING = 60.0
"""Seconds that the engine's workers may take to join a group; they are idle."""

_LAST_ERROR = 2.0
"""Seconds that an engine may take to report why a group broke."""

_ENDING = 10.0
"""Seconds that a request may last after its group has ended."""

_GROUP_ENDING = 2.0
"""Seconds that the end of a group may take."""

_POLL = 0.002


@dataclass(frozen=True, slots=True)
class Invitation:
    """What an engine's workers need to join a group.

    Args:
        address: Where the group's store listens.
        port: Its port.
        world_size: Members: this process and the workers.
        secret: The name of the group, and a prefix of its keys in the store.
    """

    address: str
    port: int
    world_size: int
    secret: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)


class Delivery(ABC):
    """One version on its way into an engine. Used by one thread.

    Args:
        server: The engine's server, whose time-out of a load is that of one version.
        address: The address of this host on which the group listens.
        flush_cache: Whether the engine drops keys and values of the old weights, if it does so while it loads.
    """

    prefixes: ClassVar[tuple[str, ...]]
    """What the engine puts before the keys of its group, the outermost first; `{secret}` is replaced."""
    begin: ClassVar[str]
    end: ClassVar[str]
    """The paths that begin and end an update."""
    may_lack_updates: ClassVar[bool] = False
    """Whether old releases know no such paths."""
    hint: ClassVar[str]

    def __init__(self, server: HttpClient, address: str, *, flush_cache: bool = False) -> None:
        self._server, self._address, self._flush_cache = server, address, flush_cache
        self._deadline = Deadline(SystemClock(), server.timeout)
        self._group: ProcessGroup | None = None
        self._request: EngineRequest | None = None
        self._is_updating = False
        self.touched = False
        """Whether the engine's weights may have changed."""

    @abstractmethod
    def _open(self) -> None:
        """Begin an update, and form a group of this process and the engine's workers."""

    @abstractmethod
    def _invite(self, invitation: Invitation) -> None:
        """Ask the engine's workers to join the group."""

    def push(self, label: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load weights into the engine.

        Args:
            label: The engine's label for them.
            tensors: All of them by name.

        Raises:
            SyncdError: The engine did not load them; `touched` tells whether its weights may have changed.
        """
        self._open()
        buckets = list(cut({name: tensor.nbytes for name, tensor in tensors.items()}, BUCKET))
        for names in buckets:
            is_last = names is buckets[-1]
            self._carry({name: tensors[name] for name in names}, label if is_last else None)
        self._finish_update()

    @abstractmethod
    def _update(self, tensors: Mapping[str, torch.Tensor], label: str | None) -> None:
        """Request that the engine loads the tensors that are sent next, and wait until it has.

        Args:
            tensors: The tensors, in the order in which they are sent.
            label: The label of the weights, with the last bucket only.
        """

    def _begin_update(self) -> None:
        """Begin an update, after one that an earlier process left unfinished."""
        reply = self._server.post_raw(self.begin)
        if reply.has_no_route and self.may_lack_updates:
            return
        self._is_updating = True
        if reply.is_error:
            self._finish_update()
            self._post(self.begin)
            self._is_updating = True

    def _finish_update(self) -> None:
        """Tell the engine that all tensors were sent."""
        if self._is_updating:
            self._post(self.end)
            self._is_updating = False

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        self._server.post(path, body, hint=self.hint)

    @abstractmethod
    def _leave(self) -> None:
        """Make the engine drop the group and an unfinished update; the group has ended already.

        Raises:
            SyncdError: It did not.
        """

    def close(self) -> None:
        """End the group and make the engine drop it, whatever has happened; takes seconds at most."""
        group, self._group = self._group, None
        ending = group.abort() if group is not None else None
        if ending is not None:
            ending.join(_GROUP_ENDING)
        if self._request is not None:
            self._request.wait(_ENDING)
        with contextlib.suppress(SyncdError):
            self._leave()

    def _form_group(self, workers: int) -> None:
        """Form the group with so many workers: the engine is asked to join while this process connects."""
        joining = Deadline(SystemClock(), min(JOINING, max(self._deadline.left(), 0.0)))
        self._group = group = ProcessGroup.listen(self._address, seconds_left(self._deadline))
        invitation = Invitation(group.address, group.port, workers + 1)
        named = [prefix.format(secret=invitation.secret) for prefix in self.prefixes]
        self._request = EngineRequest(lambda: self._invite(invitation))
        connecting = EngineRequest(lambda: group.connect(named, workers + 1, joining))
        wait_for_all((self._request, connecting), joining)

    def _carry(self, tensors: Mapping[str, torch.Tensor], label: str | None) -> None:
        group = self._group
        if group is None:
            raise LoadFailedError("the engine is in no group")
        self.touched = True
        self._request = request = EngineRequest(lambda: self._update(tensors, label))
        try:
            works = [
                group.broadcast(tensor.detach().cpu().contiguous(), self._deadline)
                for tensor in tensors.values()
            ]
            for work in works:
                group.finish(work, self._deadline, request.is_healthy)
        except GroupError:
            # If the engine still answers, its own error says more.
            request.wait(_LAST_ERROR)
            request.is_healthy()
            raise
        wait_for_all((request,), self._deadline)


class EngineRequest:
    """One call in a separate thread, because it has another half: a request to an engine, or joining a group.

    Args:
        call: The call; it has a time-out.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._failure = Failure()
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="engine-call", daemon=True).start()

    def is_healthy(self) -> bool:
        """Return that it has not failed.

        Raises:
            SyncdError: It has failed; raised once.
        """
        if self._ended.is_set():
            self._failure.raise_once()
        return True

    @property
    def has_ended(self) -> bool:
        """Return whether it has ended, with or without an error."""
        return self._ended.is_set()

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, with or without an error, `seconds` at most."""
        self._ended.wait(seconds)

    def _run(self) -> None:
        try:
            self._call()
        except SyncdError as error:
            # The error must not keep this thread's frames, and with them the group, if nobody asks for it.
            self._failure.keep(error.with_traceback(None))
        except Exception as error:  # noqa: BLE001 - the thread that waits would wait for ever
            self._failure.keep(LoadFailedError(f"it failed: {type(error).__name__}: {error}"))
        finally:
            self._ended.set()


def wait_for_all(requests: Sequence[EngineRequest], deadline: Deadline) -> None:
    """Wait until all requests have ended; the first that fails ends the wait.

    Raises:
        LoadFailedError: They did not end in time.
        SyncdError: One of them failed.
    """
    while not all(request.has_ended for request in requests):
        for request in requests:
            request.is_healthy()
        if deadline.left() <= 0:
            raise LoadFailedError(f"the engine did not answer within {deadline.seconds:g} s")
        time.sleep(_POLL)
    for request in requests:
        request.is_healthy()


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


def described(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[object]]:
    """Return names, dtypes as torch names them, and shapes, as both engines want them."""
    return {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }
