"""What verl, transformers and torch say of a model that they cannot build, as an error of the job's file."""

import contextlib
import pickle
import shlex
from collections.abc import Iterator

import torch
from safetensors import SafetensorError

from syncd.errors import ConfigError
from syncd.transports.ranks import lost_rank

_REFUSALS = (
    *(ValueError, TypeError, AssertionError, ImportError, OSError, KeyError, EOFError, RuntimeError),
    *(pickle.UnpicklingError, SafetensorError),
)
"""What verl, transformers and torch raise for a model that they do not take, or cannot read."""


@contextlib.contextmanager
def refusals(path: str, *, has_adapters: bool = False) -> Iterator[None]:
    try:
        yield
    except _REFUSALS as error:
        if isinstance(error, torch.OutOfMemoryError) or lost_rank(error) is not None:
            raise
        hint = _hint(error, path, has_adapters=has_adapters)
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(f"the model cannot be built: {reason}", path=path, hint=hint) from error


def _hint(error: Exception, path: str, *, has_adapters: bool) -> str:
    if isinstance(error, ImportError) and error.name == "trl":
        return (
            "pip uninstall trl: where it is installed, verl imports from it what newer releases do not have"
        )
    if "does not recognize this architecture" in str(error):
        return "pip install --upgrade transformers, or name a model that it has"
    again = f"hf download ORG/MODEL --local-dir {shlex.quote(path)}  # if a file of it is damaged"
    if has_adapters and isinstance(error, ValueError):
        return "model.lora.targets names linear layers only"
    # peft says of some layers that it cannot add to them by an error that a damaged file may raise, too.
    unclear = has_adapters and not isinstance(
        error, OSError | EOFError | pickle.UnpicklingError | SafetensorError
    )
    return f"model.lora.targets names linear layers only; else {again}" if unclear else again
