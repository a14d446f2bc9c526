"""Makes an exam: a copy of a start model in which every tensor differs, and what transformers answers of both.

    python -m explorer_hooks.parts.exam.model START COPY DTYPE < tokens.json > exam.json

A factor for a whole tensor is invisible where a norm follows. So each tensor is changed by signs that differ from
row to row and from column to column. The copy follows from the start model alone: every host makes the same one.
"""

import json
import os
import random
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from explorer_hooks.parts.exam.exam import TIED
from explorer_hooks.proof.log_probs import log_probs_of
from explorer_hooks.proof.start_model import shard_names

CHANGE = 0.5
"""How far a value moves, as a part of itself; of a vector, as a part of its root mean square."""

_LEAST = 0.5
"""The root mean square that a vector counts with at the least: biases and some norms begin with zeros."""

_ZERO = 0.02
"""How far the values of a matrix of zeros move."""

_LARGEST = 64 << 20
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

Answer = list[list[float]]


def make(start: str, target: str, dtype: str, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    write_copy(start, target)
    return dict(measure(start, target, rows, dtype))


def write_copy(start: str, target: str) -> None:
    """Write the copy of a start model, with its configuration and tokenizer, into a new directory."""
    os.makedirs(target)
    copy_beside(start, target)
    for name in shard_names(start):
        with safe_open(os.path.realpath(f"{start}/{name}"), framework="pt") as file:
            changed = {key: changed_tensor(key, file.get_tensor(key)) for key in file.keys()}  # noqa: SIM118 - no mapping
        save_file(changed, f"{target}/{name}", {"format": "pt"})


def copy_beside(start: str, target: str) -> None:
    for name in sorted(os.listdir(start)):
        path = os.path.realpath(f"{start}/{name}")
        is_beside = not name.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf"))
        if is_beside and os.path.isfile(path) and os.path.getsize(path) <= _LARGEST:
            shutil.copyfile(path, f"{target}/{name}")


def changed_tensor(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose values have all moved, by signs that follow from its name.

    Raises:
        ValueError: Its values are no ordinary floating-point numbers, or none.
    """
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16) or not tensor.numel():
        raise ValueError(f"{name} is of dtype {tensor.dtype}")
    signs = torch.ones([1] * tensor.dim())
    for axis, size in enumerate(tensor.shape):
        shape = [size if at == axis else 1 for at in range(tensor.dim())]
        signs = signs * signs_of(f"{name}/{axis}", size).reshape(shape)
    if tensor.dim() > 1 and bool(tensor.any()):
        return (tensor * (1 + CHANGE * signs)).to(tensor.dtype).contiguous()
    root = float(tensor.float().square().mean().sqrt())
    step = max(root, _LEAST) * CHANGE if tensor.dim() <= 1 else _ZERO
    return (tensor.float() + step * signs).to(tensor.dtype).contiguous()


def signs_of(key: str, size: int) -> torch.Tensor:
    draw = random.Random(key)  # noqa: S311 - the same on every host
    return torch.tensor([1.0 if byte & 1 else -1.0 for byte in draw.randbytes(size)])


def measure(start: str, copy: str, rows: Sequence[Sequence[int]], dtype: str) -> Mapping[str, Any]:
    """Return the log-probs of rows by the start model, by the copy, and by the copy with each kind left as it was."""
    begin, changed = loaded(start, dtype), loaded(copy, dtype)
    old = dict(begin.named_parameters())
    kinds: dict[str, list[str]] = {}
    for name in dict(changed.named_parameters()):
        kinds.setdefault(kind_of(name), []).append(name)
    stale: dict[str, Answer] = {}
    for kind, names in sorted(kinds.items()):
        with _left(changed, old, names):
            stale[kind] = answers_of(changed, rows)
    if changed.get_output_embeddings().weight is changed.get_input_embeddings().weight:
        with _head_left(changed, begin):
            stale[TIED] = answers_of(changed, rows)
    return {"start": answers_of(begin, rows), "exam": answers_of(changed, rows), "kinds": stale}


def kind_of(name: str) -> str:
    """Return the kind of a tensor or layer: its name without the numbers of layers and experts."""
    return _NUMBER.sub("*", name)


@contextmanager
def _left(model: Any, old: Mapping[str, torch.Tensor], names: Sequence[str]) -> Iterator[None]:
    """Have some parameters be those of the start model in the block."""
    parameters = dict(model.named_parameters())
    kept = {name: parameters[name].data for name in names}
    for name in names:
        parameters[name].data = old[name].data
    try:
        yield
    finally:
        for name, data in kept.items():
            parameters[name].data = data


@contextmanager
def _head_left(model: Any, begin: Any) -> Iterator[None]:
    """Have a tied head stay that of the start model in the block, while the embedding is the copy's."""
    head = model.get_output_embeddings()
    tied, head.weight = head.weight, torch.nn.Parameter(begin.get_output_embeddings().weight.detach())
    try:
        yield
    finally:
        head.weight = tied


def loaded(directory: str, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    return model.eval()


def answers_of(model: Any, rows: Sequence[Sequence[int]]) -> Answer:
    with torch.no_grad():
        return [list(row) for row in log_probs_of(model, rows)]


def main() -> None:
    start, copy, dtype = sys.argv[1:]
    sys.stdout.write(json.dumps(make(start, copy, dtype, json.load(sys.stdin))))


if __name__ == "__main__":
    main()
