"""Which back end carries a broadcast: NCCL between GPUs where all sides can, else gloo. Pure.

gloo is what everybody can; a member that could take NCCL says on which GPU, beside that, in its presence.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

GLOO, NCCL = "gloo", "nccl"

KEY = "broadcast_gpu"
"""Where in the `info` of a presence a GPU stands. Who says nothing, or is too old to, takes gloo."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU on which a process could take part over NCCL.

    Args:
        uuid: Of the physical device: the same in every container and process, whatever number it has there.
        nccl: The version of NCCL; communicators are made between equal ones only.
    """

    uuid: str
    nccl: str

    def document(self) -> dict[str, str]:
        """Return it as it stands in a presence."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """What carries a broadcast.

    Args:
        backend: nccl or gloo.
        reason: Why it is not the other one.
    """

    backend: str
    reason: str


def gpu_in(info: Mapping[str, Any]) -> Gpu | None:
    """Return the GPU in what a member says of itself, None where it names none that can be read."""
    found = info.get(KEY)
    if not isinstance(found, Mapping):
        return None
    uuid, nccl = found.get("uuid"), found.get("nccl")
    if not (isinstance(uuid, str) and isinstance(nccl, str) and uuid and nccl):
        return None
    return Gpu(uuid, nccl)


def choose_backend(
    sender: Gpu | None, members: Mapping[str, Gpu | None], *, has_failed: bool = False
) -> BackendChoice:
    """Return what carries a broadcast from a sender to members.

    Args:
        sender: Where the sender's weights are; None: not on a GPU, or it cannot use NCCL.
        members: The GPU of each member, None for one that named none.
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
