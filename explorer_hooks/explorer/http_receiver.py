"""Weights in by a broadcast for an engine in another process: received here, and handed on once they count."""

from explorer_hooks.hooks.http_engine import HttpEngineHook
from syncd.client.client import Client
from syncd.protocol.buckets import BucketPlan
from syncd.transports.broadcast.receive import Receiver
from syncd.transports.tensors import TensorMeta


class ServedReceiver(Receiver):
    """An explorer's side of broadcasts whose engine is a server: this process has no parameters, and room for all.

    Args:
        sync: The explorer's connection to the job.
        hook: Knows what the engine holds.
    """

    def __init__(self, sync: Client, hook: HttpEngineHook) -> None:
        self._hook = hook
        super().__init__(sync, {})

    def check_fit(self, plan: BucketPlan) -> None:
        """Compare what is offered with what the engine was started from, as far as that can be read here."""
        self._hook.check_offered({place.name: TensorMeta(place.dtype, place.shape) for place in plan.slots})
