"""The synchronizer for threads: each wait sleeps in the thread that calls it."""

import functools
import os
from collections.abc import Callable
from typing import Concatenate, Self, TypeVar, Unpack

from syncd.client.base import Base, P, Role, checked
from syncd.client.client import Client, Options
from syncd.client.wait import T, Wait, drive
from syncd.context import Closing
from syncd.protocol.local_disk import SystemClock

C = TypeVar("C", bound=Base)


def blocking(wait: Callable[Concatenate[C, P], Wait[T]]) -> Callable[Concatenate[C, P], T]:
    """Make a method that waits of one that says how."""

    @functools.wraps(wait)
    def call(self: C, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return drive(checked(self, wait(self, *args, **kwargs)), self.clock)

    return call


class Synchronizer(Client, Closing):
    """What trainer and explorers use to follow each other, over the files of a job alone.

    Examples:
        A trainer:

            with Synchronizer.open("/ckpt/job", "trainer") as sync:
                sync.set_model_state_dict(state, step)

        An explorer:

            with Synchronizer.open("/ckpt/job", "explorer", "e0") as sync:
                step = sync.wait_new_model_state_dict(step)
                with sync.lease(step) as leased:
                    engine.load(leased.path)
                sync.confirm(step)
    """

    @classmethod
    def open(
        cls,
        job_dir: str | os.PathLike[str],
        role: Role = "observer",
        identity: str | None = None,
        **options: Unpack[Options],
    ) -> Self:
        """Connect to a job and publish this process in it.

        Args:
            job_dir: The job directory; it must exist.
            role: trainer, explorer, or observer: one that publishes nothing of itself.
            identity: Its name, unique among those that live; `trainer`, or host and process unless given.
            **options: See `Options`.

        Raises:
            UsageError: The identity is held by another process that lives.
            JobMissingError: The job directory is not there.
        """
        clock = options.get("clock") or SystemClock()
        return drive(cls.opening(job_dir, role, identity, **options), clock)

    wait_for = blocking(Client.waiting_for)
    wait_new_model_state_dict = blocking(Client.waiting_for_new)
    vacate = blocking(Client.vacating)
    ready_to_nccl_sync = blocking(Client.agreeing)
    coordinate_weight_sync_setup = blocking(Client.setting_up)
    coordinate_weight_sync_teardown = blocking(Client.tearing_down)
    confirm_received = blocking(Client.confirming)
    wait_for_round_or_version = blocking(Client.waiting_for_round_or_version)
    follow_round = blocking(Client.following_round)
    teardown_weight_sync_group = coordinate_weight_sync_teardown
