"""Plain Hugging Face exports: `checkpoint-<N>/`. Nothing announces them; they count once they stand still."""

from syncd.daemon.foreign.layout import Layout
from syncd.daemon.foreign.look import Look
from syncd.daemon.foreign.names import numbered_after
from syncd.daemon.foreign.shards import CONFIG, find_adapter, find_shards, needing
from syncd.daemon.foreign.weights import Weights

_OPTIMIZER = ("optimizer.pt", "optimizer.bin")


def _find(look: Look) -> Weights | None:
    model = find_shards(look, "")
    if model is not None:
        return needing(look, model, CONFIG)
    return find_adapter(look, "") or (Weights("") if CONFIG in look.names() else None)


def _is_full(look: Look) -> bool:
    return any(look.has_file("", name) for name in _OPTIMIZER)


HUGGINGFACE = Layout("huggingface", numbered_after("checkpoint-"), _find, _is_full, "time")
