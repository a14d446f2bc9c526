"""The synchronizer for asyncio: the same methods as coroutines; all file work runs in threads.

Cancelling a wait closes it: the status is restored before the cancellation goes on.
"""

import contextlib
import functools
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, Concatenate, Self, TypeVar, Unpack

from syncd.client.base import P, Role, checked
from syncd.client.client import Client, Options
from syncd.client.lease import Leased
from syncd.client.payload import Tensor
from syncd.client.wait import T, Wait, drive_async, in_thread
from syncd.errors import SyncdError
from syncd.protocol.layout import Job
from syncd.protocol.version import Pair, Version

S = TypeVar("S", bound="AsyncSynchronizer")


def threaded(
    method: Callable[Concatenate[Client, P], T],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Make a coroutine of a method that does file work."""

    @functools.wraps(method)
    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await in_thread(lambda: method(self.client, *args, **kwargs))

    return call


def waited(
    wait: Callable[Concatenate[Client, P], Wait[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Make a coroutine that waits of a method that says how."""

    @functools.wraps(wait)
    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        # The check too is in a thread: a heartbeat that hangs on a stalled mount must not stop the event loop.
        return await drive_async(checked(self.client, wait(self.client, *args, **kwargs)))

    return call


class AsyncSynchronizer:
    """`Synchronizer` for asyncio.

    Args:
        client: The connection; `open` makes it.
    """

    def __init__(self, client: Client) -> None:
        self.client = client

    @classmethod
    async def open(
        cls,
        job_dir: str | os.PathLike[str],
        role: Role = "observer",
        identity: str | None = None,
        **options: Unpack[Options],
    ) -> Self:
        """Connect to a job; see `Synchronizer.open`."""
        opened: list[Client] = []
        try:
            return cls(await drive_async(_noted(Client.opening(job_dir, role, identity, **options), opened)))
        except BaseException:
            # Cancelled in the very moment in which it was opened: nobody else would close it.
            for client in opened:
                await in_thread(client.close)
            raise

    @property
    def identity(self) -> str | None:
        """Return the name of this process in the job; None for an observer."""
        return self.client.identity

    @property
    def job(self) -> Job:
        """Return the job."""
        return self.client.job

    @property
    def confirmed(self) -> Pair | None:
        """Return what this process has confirmed last."""
        return self.client.confirmed

    @property
    def confirmed_digest(self) -> str:
        """Return the digest of what this process has confirmed last, empty where it is not known."""
        return self.client.confirmed_digest

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except SyncdError:
            if error is None:  # what ended the body matters more
                raise

    @contextlib.asynccontextmanager
    async def lease(self, version: int | Pair | Version) -> AsyncIterator[Leased]:
        """Keep a version from being removed while it is read; see `Synchronizer.lease`."""
        stack = contextlib.ExitStack()
        try:
            yield await in_thread(lambda: stack.enter_context(self.client.lease(version)))
        finally:
            await in_thread(stack.close)

    async def get_model_state_dict_iterator(self) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield the published weights tensor by tensor; close it (`aclose`) if it is not read to its end."""
        tensors = self.client.get_model_state_dict_iterator()
        try:
            while (item := await in_thread(lambda: next(tensors, None))) is not None:
                yield item
        finally:
            await in_thread(tensors.close)

    close = threaded(Client.close)
    beat = threaded(Client.beat)
    add_module = threaded(Client.add_module)
    set_trainer_status = threaded(Client.set_trainer_status)
    get_trainer_status = threaded(Client.get_trainer_status)
    trainer_requires_weight_sync = threaded(Client.trainer_requires_weight_sync)
    set_explorer_status = threaded(Client.set_explorer_status)
    get_explorer_status_counts = threaded(Client.get_explorer_status_counts)
    explorer_requires_sync = threaded(Client.explorer_requires_sync)
    notify_no_new_model_state_dict = threaded(Client.notify_no_new_model_state_dict)
    set_model_state_dict = threaded(Client.set_model_state_dict)
    set_model_state_dict_with_step_num = threaded(Client.set_model_state_dict_with_step_num)
    checkpoint_shard_counter = threaded(Client.checkpoint_shard_counter)
    get_model_state_dict = threaded(Client.get_model_state_dict)
    get_state_dict_meta = threaded(Client.get_state_dict_meta)
    get_latest_model_version = threaded(Client.get_latest_model_version)
    get_latest_version = threaded(Client.get_latest_version)
    get_latest_model_path = threaded(Client.get_latest_model_path)
    confirm = threaded(Client.confirm)
    describe = threaded(Client.describe)
    setup_weight_sync_group = threaded(Client.setup_weight_sync_group)
    get_weight_sync_info = threaded(Client.get_weight_sync_info)
    weight_sync_group_is_closing = threaded(Client.weight_sync_group_is_closing)

    broadcast_members = threaded(Client.broadcast_members)
    agreed_members = threaded(Client.agreed_members)
    open_round = threaded(Client.open_round)
    end_round = threaded(Client.end_round)
    end_group = threaded(Client.end_group)
    take_part = threaded(Client.take_part)
    broadcast_wanted = threaded(Client.broadcast_wanted)
    set_ahead = threaded(Client.set_ahead)
    confirm_published = threaded(Client.confirm_published)
    ahead_is_void = threaded(Client.ahead_is_void)
    sender_is_here = threaded(Client.sender_is_here)
    acknowledge_round = threaded(Client.acknowledge_round)
    round_goes_on = threaded(Client.round_goes_on)
    refuse_round = threaded(Client.refuse_round)

    wait_for = waited(Client.waiting_for)
    wait_new_model_state_dict = waited(Client.waiting_for_new)
    vacate = waited(Client.vacating)
    ready_to_nccl_sync = waited(Client.agreeing)
    coordinate_weight_sync_setup = waited(Client.setting_up)
    coordinate_weight_sync_teardown = waited(Client.tearing_down)
    confirm_received = waited(Client.confirming)
    wait_for_round_or_version = waited(Client.waiting_for_round_or_version)
    follow_round = waited(Client.following_round)
    teardown_weight_sync_group = coordinate_weight_sync_teardown


def _noted(wait: Wait[T], results: list[T]) -> Wait[T]:
    result = yield from wait
    results.append(result)
    return result
