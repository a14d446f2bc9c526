"""The backend of a broadcast: NCCL between GPUs if all sides support it, else gloo. Pure.

Every member supports gloo; one that supports NCCL too publishes its GPU in its presence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from syncd.protocol.documents import record_in

GLOO, NCCL = "gloo", "nccl"

KEY = "broadcast_gpu"
"""The key of a GPU in the `info` of a presence. A member without it takes gloo."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU on which a process supports NCCL."""

    uuid: str  # of the physical device: the same in every container and process, whatever its index there
    nccl: str  # the version of NCCL; all members of a communicator need the same one


@dataclass(frozen=True, slots=True)
class BackendChoice:
    backend: str  # nccl or gloo
    reason: str  # why it was chosen


def gpu_in(info: Mapping[str, Any]) -> Gpu | None:
    """Return the GPU in a member's `info`, None if it names none that can be read."""
    gpu = record_in(Gpu, info, KEY)
    return gpu if gpu and gpu.uuid and gpu.nccl else None


def choose_backend(
    sender: Gpu | None, members: Mapping[str, Gpu | None], *, has_failed: bool = False
) -> BackendChoice:
    """Return the backend of a broadcast from a sender to members.

    Args:
        sender: The GPU of the sender's weights; None if they are not on a GPU, or it does not support NCCL.
        members: The GPU of each member, None if it published none.
        has_failed: Whether a broadcast over NCCL has failed with these members.
    """
    if sender is None:
        return BackendChoice(GLOO, "the trainer's weights are not on a GPU with NCCL")
    if has_failed:
        return BackendChoice(GLOO, "NCCL has failed with these explorers")
    seen = {sender.uuid: "the trainer"}
    for name, gpu in sorted(members.items()):
        if gpu is None:
            return BackendChoice(GLOO, f"explorer {name} has no GPU of its own with NCCL")
        if gpu.nccl != sender.nccl:
            return BackendChoice(GLOO, f"explorer {name} has NCCL {gpu.nccl}, the trainer {sender.nccl}")
        if gpu.uuid in seen:
            return BackendChoice(GLOO, f"explorer {name} shares its GPU with {seen[gpu.uuid]}")
        seen[gpu.uuid] = f"explorer {name}"
    return BackendChoice(NCCL, "every side has a GPU of its own")
