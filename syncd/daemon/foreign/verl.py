"""Steps of verl and of Trinity-RFT, which trains with it: `global_step_<N>/`, announced by the job's marker.

docs/foreign.md says what each was checked against.
"""

import re
from collections.abc import Iterator

from syncd.daemon.foreign.archive import whole_archive
from syncd.daemon.foreign.distributed import find_distributed
from syncd.daemon.foreign.layout import Layout
from syncd.daemon.foreign.look import Look, joined
from syncd.daemon.foreign.shards import SAFETENSORS, find_adapter, find_shards
from syncd.daemon.foreign.weights import Weights, gather, together
from syncd.protocol.layout import ACTOR, FULL_CHECKPOINT, parse_step_name

_ADAPTER = f"{ACTOR}/lora_adapter"
_EXPORT = "huggingface"
_STREAM = "model.safetensors.tmp"
_NUMBER = r"(0|[1-9][0-9]{0,5})"
_RANKED = re.compile(rf"(model|optim|extra_state)_world_size_{_NUMBER}_rank_{_NUMBER}\.pt", re.ASCII)


def _base(look: Look) -> str:
    """Return where an engine's checkpoint is: verl's supervised trainer writes into the step itself."""
    return ACTOR if look.has_directory(ACTOR) else ""


def _with_adapter(look: Look, weights: Weights | None) -> Weights | None:
    """Return weights that are whole only with the adapter beside them, if its directory is there."""
    if weights is None or not look.has_directory(_ADAPTER):
        return weights
    return together(weights, find_adapter(look, _ADAPTER) or Weights(_ADAPTER, expected=1))


def _streamed(look: Look) -> Weights | None:
    found = find_shards(look, ACTOR, (SAFETENSORS,))
    # The stream is renamed when it ends. One that a crash left behind must not hide what was saved later.
    if found is None and _STREAM in look.names(ACTOR) and not (_sharded(look) or _megatron(look)):
        found = Weights(ACTOR, expected=1)
    return _with_adapter(look, found)


def _ranks(look: Look, place: str, part: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, world size and rank of each file of one part of a checkpoint."""
    for name in look.names(place):
        match = _RANKED.fullmatch(name)
        if match and match[1] == part:
            yield name, int(match[2]), int(match[3])


def _sharded(look: Look) -> Weights | None:
    place = _base(look)
    found = list(_ranks(look, place, "model"))
    if not found:
        others = {size for part in ("optim", "extra_state") for _, size, _ in _ranks(look, place, part)}
        # A checkpoint may leave the ranks' shards out in favour of an export.
        if not others or find_shards(look, joined(place, _EXPORT)):
            return None
        return Weights(place, expected=min(others) if len(others) == 1 else None)
    files = gather(look, place, (name for name, _, _ in found), whole_archive)
    sizes = sorted({size for _, size, _ in found})
    if len(sizes) > 1:
        return Weights(place, files, broken=f"shards of world sizes {sizes[0]} and {sizes[-1]} are mixed")
    if beyond := [name for name, size, rank in found if rank >= size]:
        return Weights(place, files, broken=f"{beyond[0]} has a rank beyond its world size")
    return _with_adapter(look, Weights(place, files, sizes[0]))


def _megatron(look: Look) -> Weights | None:
    base = _base(look)
    nested = joined(base, "model")
    root = nested if look.has_directory(nested) else base
    data, export = joined(root, "dist_ckpt"), joined(root, _EXPORT)
    if not look.has_directory(data) and not (root == nested and look.has_directory(export)):
        return None
    # With a bridge the weights are the export, and what was distributed is the optimizer's state.
    found = (
        find_shards(look, export) or find_distributed(look, data) or find_adapter(look, f"{export}/adapter")
    )
    return found or Weights(data)


def _exported(look: Look) -> Weights | None:
    place = joined(_base(look), _EXPORT)
    found = find_shards(look, place)
    if found is None and look.has_directory(place) and not look.has_directory(_ADAPTER):
        found = Weights(place)
    return _with_adapter(look, found)


def _adapter_alone(look: Look) -> Weights | None:
    if not look.has_directory(_ADAPTER):
        return None
    return find_adapter(look, _ADAPTER) or Weights(_ADAPTER, expected=1, kind="lora")


def _is_full(look: Look) -> bool:
    return look.has_file("", FULL_CHECKPOINT)


def _has_optimizer(look: Look) -> bool:
    states = [size for _, size, _ in _ranks(look, _base(look), "optim")]
    return _is_full(look) or (bool(states) and len(states) == min(states))


def _has_distributed_optimizer(look: Look) -> bool:
    return _is_full(look) or look.has_file(joined(_base(look), "optimizer/dist_ckpt"), ".metadata")


TRINITY = Layout("trinity-0.6", parse_step_name, _streamed, _is_full, "marker")
FSDP = Layout("verl-fsdp", parse_step_name, _sharded, _has_optimizer, "marker")
MEGATRON = Layout("verl-megatron", parse_step_name, _megatron, _has_distributed_optimizer, "marker")
EXPORT = Layout("verl-huggingface", parse_step_name, _exported, _is_full, "marker")
ADAPTER = Layout("verl-lora", parse_step_name, _adapter_alone, _is_full, "marker")
