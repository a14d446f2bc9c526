"""Fills a model and its optimizer from the files of another number of ranks, tensor by tensor.

Each rank maps the files of all ranks and reads only what it holds itself, so a load takes no memory beyond the state.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from trainer.export.fsdp import Region, region_of

if TYPE_CHECKING:
    from trainer.engines.verl.models import Model  # imports verl

_ADAPTER = "lora_"


def fill_model(model: "Model", saved: Sequence[Mapping[str, torch.Tensor]], rank: int) -> None:
    """Fill this rank's part of an FSDP2 model from the weights in all ranks' files; adapters alone, or all."""
    own = model.module.state_dict()
    is_adapter = bool(saved[0]) and all(_ADAPTER in name for name in saved[0])
    expected = {name for name in own if _ADAPTER in name} if is_adapter else set(own)
    if expected != set(saved[0]):
        raise ValueError(f"names differ: {sorted(expected ^ set(saved[0]))[:3]}")
    for name in saved[0]:
        _fill(own[name], [part[name] for part in saved], rank)


def fill_optimizer(model: "Model", saved: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Fill this rank's part of an FSDP2 model's optimizer from the state in each rank's file, in their order."""
    parameters = [parameter for group in model.optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for number, values in saved[0]["state"].items():
        if number >= len(parameters):
            raise ValueError(f"the optimizer has {len(parameters)} parameters, and the files have more")
        state[number] = {
            name: _of_parameter(parameters[number], [part["state"][number][name] for part in saved], rank)
            for name in values
        }
    model.optimizer.load_state_dict({"state": state, "param_groups": saved[0]["param_groups"]})


def _of_parameter(parameter: torch.Tensor, parts: Sequence[Any], rank: int) -> Any:
    """Return this rank's part of a value that the optimizer keeps for a parameter; what is not spread, as it is."""
    if not isinstance(parts[0], DTensor):
        return parts[0].clone() if isinstance(parts[0], torch.Tensor) else parts[0]
    made = torch.zeros_like(parameter, dtype=parts[0].dtype, requires_grad=False)
    _fill(made, parts, rank)
    return made


@torch.no_grad()
def _fill(target: torch.Tensor, parts: Sequence[torch.Tensor], rank: int) -> None:
    """Copy into a rank's part of a tensor what the parts of other ranks, one of each, have of it."""
    if target.shape != parts[0].shape:
        raise ValueError(f"a tensor is {list(parts[0].shape)} in the files and {list(target.shape)} here")
    local = target._local_tensor if isinstance(target, DTensor) else target.detach()  # noqa: SLF001
    wanted, seen = _region(target, rank), list[Region]()
    for owner, part in enumerate(parts):
        held = _region(part, owner)
        if held not in seen:  # replicas hold the same
            seen.append(held)
            _copy_overlap(local, wanted, part, held)


def _copy_overlap(local: torch.Tensor, wanted: Region, part: torch.Tensor, held: Region) -> None:
    source = part._local_tensor if isinstance(part, DTensor) else part.detach()  # noqa: SLF001
    both = [
        slice(max(cut.start, other.start), min(cut.stop, other.stop))
        for cut, other in zip(wanted, held, strict=True)
    ]
    if any(cut.start >= cut.stop for cut in both):
        return
    local[_within(both, wanted)].copy_(source[_within(both, held)])


def _within(both: Sequence[slice], region: Region) -> Region:
    return tuple(
        slice(cut.start - of.start, cut.stop - of.start) for cut, of in zip(both, region, strict=True)
    )


def _region(tensor: torch.Tensor, rank: int) -> Region:
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    return region_of(tuple(tensor.shape), tensor.device_mesh.mesh, tensor.placements, rank)
