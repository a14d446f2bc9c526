"""One receiver of benchmarks/broadcast.py: parameters, and the ways by which new weights come into them."""

import os
import time
import traceback
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from explorer_hooks.follower.follower import Follower
from explorer_hooks.hooks.transformers import TransformersHook
from syncd.parts.broadcast.receive import BroadcastReceiver
from syncd.transports.base import WeightTensors

BROADCAST, FILES, TENSORS, LINK = "broadcast", "files", "tensor by tensor", "one buffer"
LONG = 300.0
_WINDOW = 512 << 20
"""The most bytes of the buffer that shows what the link carries: larger weights need the memory."""

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Case:
    """What one process of a group is told.

    Args:
        place: The directory of the case, with the job in `job`.
        shapes: Of the weights by name, all of them bf16.
        world_size: Processes of the group: the trainer and all receivers.
    """

    place: str
    shapes: Shapes
    world_size: int

    @property
    def bytes(self) -> int:
        """Return the bytes of the weights."""
        return sum(2 * torch.Size(shape).numel() for shape in self.shapes.values())


def join(case: Case, rank: int) -> torch.Tensor:
    """Join the plain group, and return a buffer for `carry`."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meeting = f"file://{case.place}/meeting"
    dist.init_process_group("gloo", meeting, timedelta(seconds=LONG), case.world_size, rank)
    return torch.zeros(min(case.bytes, _WINDOW), dtype=torch.uint8)


def carry(buffer: torch.Tensor, size: int) -> None:
    """Broadcast as many bytes as all weights have from one buffer, as often as that takes."""
    for start in range(0, size, buffer.nbytes):
        dist.broadcast(buffer[: size - start], 0)


def receive_forever(pipe: Connection, case: Case, number: int) -> None:
    """Take weights by each way that is named, until None is."""
    try:
        _serve(pipe, case, number)
    except BaseException:  # noqa: BLE001 - whoever waits must hear of it
        pipe.send(traceback.format_exc())


def _serve(pipe: Connection, case: Case, number: int) -> None:
    with ExitStack() as opened:
        ways = Ways(case, number, opened)
        pipe.send({})
        while (way := pipe.recv()) is not None:
            pipe.send({})
            ways.take(way)
            pipe.send({"ended": time.monotonic(), "weights": ways.weights(way)})
        dist.destroy_process_group()


class Ways:
    """Parameters and what fills them.

    Args:
        case: What is measured.
        number: Of the receiver.
        opened: What is closed with it.
    """

    def __init__(self, case: Case, number: int, opened: ExitStack) -> None:
        self._buffer, self._size = join(case, number + 1), case.bytes
        self.model = torch.nn.ParameterDict(
            {
                name: torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)
                for name, shape in case.shapes.items()
            }
        )
        # Several processes of this host read the same files: through the page cache.
        hook = TransformersHook(self.model, direct=False)
        self._follower = opened.enter_context(Follower.open(f"{case.place}/job", hook, f"r{number}"))
        self._receiver = opened.enter_context(
            closing(BroadcastReceiver(self._follower.client, self.model.state_dict(keep_vars=True)))
        )

    def take(self, way: str) -> None:
        """Bring the next weights in."""
        if way == BROADCAST:
            came = self._receiver.wait(self._follower.met, LONG)
            assert isinstance(came, WeightTensors), came
            self._receiver.load(came)
        elif way == FILES:
            outcome = self._follower.turn(LONG)
            assert outcome.kind == "applied", outcome
        elif way == TENSORS:
            for parameter in self.model.values():
                dist.broadcast(parameter.data, 0)
        else:
            carry(self._buffer, self._size)

    def weights(self, way: str) -> float:
        """Return the element that says which step it is."""
        held: Any = self._buffer if way == LINK else self.model["p0"]
        return float(held[0])
