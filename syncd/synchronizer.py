"""The client that trainers and explorers use: status, waits, leases and state dicts over the files of a job.

No server and no actor stands between them: each process writes its own presence, the daemon writes the
version, and everybody reads. `Synchronizer` is for threads, `AsyncSynchronizer` has the same methods as
coroutines.
"""

from syncd.client.aio import AsyncSynchronizer
from syncd.client.blocking import Synchronizer
from syncd.client.lease import Leased
from syncd.client.payload import Tensor, TensorMeta
from syncd.client.sync_policy import (
    SyncMethod,
    SyncStyle,
    explorer_needs_sync,
    should_load,
    trainer_needs_sync,
)
from syncd.protocol.presence import RunningStatus

__all__ = [
    "AsyncSynchronizer",
    "Leased",
    "RunningStatus",
    "SyncMethod",
    "SyncStyle",
    "Synchronizer",
    "Tensor",
    "TensorMeta",
    "explorer_needs_sync",
    "should_load",
    "trainer_needs_sync",
]
