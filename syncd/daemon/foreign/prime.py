"""Steps of prime-rl: `step_<N>/` with weights under Hugging Face names, and `STABLE` once all are there."""

import re

from syncd.daemon.foreign.layout import Layout
from syncd.daemon.foreign.look import Look
from syncd.daemon.foreign.names import numbered_after
from syncd.daemon.foreign.shards import find_adapter, find_shards
from syncd.daemon.foreign.weights import Weights, lacking

STABLE = "STABLE"
_PLACES = ("", "weight", "weights")
# Each rank writes under such a name and renames its files once it knows how many there are.
_UNNAMED = re.compile(r"tmp-rank[0-9]+.*\.safetensors", re.ASCII)


def _find(look: Look) -> Weights | None:
    found = _weights(look)
    if found is None:
        # Where weights are broadcast the step is empty but for the ready file.
        return Weights("", missing="it is ready and holds no weights") if STABLE in look.names() else None
    return found if look.has_file("", STABLE) else lacking(found, f"{STABLE} is not there yet")


def _weights(look: Look) -> Weights | None:
    for place in _PLACES:
        found = find_shards(look, place) or find_adapter(look, place)
        if found is not None:
            return found
        if any(map(_UNNAMED.fullmatch, look.names(place))):
            return Weights(place)
    return None


def _is_full(look: Look) -> bool:
    return look.has_file("trainer", ".metadata")


PRIME = Layout("prime-rl", numbered_after("step_"), _find, _is_full, "itself")
