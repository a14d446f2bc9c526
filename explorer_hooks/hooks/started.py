"""Whether a version fits the directory that an engine was started from.

An engine behind HTTP does not say which tensors it holds, and one that meets a wrong shape dies of it. What it
was started from tells enough: a version of the same model has the same parameters with the same shapes. Dtypes may
differ, since engines convert; so may names that only some checkpoints of a model carry.
"""

import os
from collections.abc import Mapping

from explorer_hooks.base import TensorMeta
from explorer_hooks.errors import RefusedError
from syncd.errors import SyncdError
from syncd.protocol.disk import LocalDisk
from syncd.protocol.safetensors import read_header

Tensors = Mapping[str, TensorMeta]

CHECKS = ("full", "shapes", "off")

_SUFFIX = ".safetensors"
_PARAMETERS = (".weight", ".bias")
_OPTIONAL = ("lm_head.", "embed_out.")
"""Parameters that a checkpoint leaves out, or not, where they are tied to others."""

_NAMED = 3


def tensors_in(directory: str) -> Tensors | None:
    """Return what each tensor of a directory of safetensors is, None where it cannot be read from this host."""
    disk, found = LocalDisk(), {}
    try:
        names = [name for name in os.listdir(directory) if name.endswith(_SUFFIX)]
        for name in names:
            for tensor in read_header(disk, f"{directory}/{name}").tensors.values():
                found[tensor.name] = TensorMeta(tensor.dtype, tensor.shape)
    except (OSError, SyncdError):
        return None
    return found or None


def refuse_misfit(found: Tensors, start: Tensors, check: str, path: str) -> None:
    """Check a version against what an engine was started from.

    Args:
        found: The version's tensors; nothing is checked without any.
        start: The engine's tensors at its start.
        check: `full`, `shapes`, or `off`.
        path: The version's directory, for messages.

    Raises:
        RefusedError: A tensor has another shape, or with `full` a parameter is missing or unknown.
    """
    if not found or check == "off":
        return
    wrong = _misfits(found, start, names=check == "full")[:_NAMED]
    if wrong:
        raise RefusedError(
            f"it does not fit the model that the engine was started from: {'; '.join(wrong)}",
            path=path,
            hint="start the engine from a checkpoint of the model that is trained, or see start_check",
        )


def _misfits(found: Tensors, start: Tensors, *, names: bool) -> list[str]:
    shapes = [
        f"{name} has shape {list(found[name].shape)} instead of {list(start[name].shape)}"
        for name in sorted(found.keys() & start.keys())
        if found[name].shape != start[name].shape
    ]
    if not names:
        return shapes
    missing = [f"{name} is missing" for name in sorted(start.keys() - found.keys()) if _is_needed(name)]
    unknown = [f"{name} is unknown" for name in sorted(found.keys() - start.keys()) if _is_needed(name)]
    return shapes + missing + unknown


def _is_needed(name: str) -> bool:
    return name.endswith(_PARAMETERS) and not name.startswith(_OPTIONAL)
