"""The adapter of a tinker server as files that peft, vLLM and SGLang load."""

import io
import json
import tarfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from syncd.errors import CorruptDataError, TimedOutError
from syncd.protocol.documents import parse_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTORS = (".lora_A.", ".lora_B.", ".lora_embedding_A", ".lora_embedding_B")


class TinkerAdapter(NamedTuple):
    config: bytes
    weights: bytes
    tensors: int


def download_adapter(url: str, base_model: str, timeout: float) -> TinkerAdapter:
    """Return the adapter behind a server's address of its archive; the server may be silent for `timeout` seconds.

    The address is enough to read it, and may be of another host, so the API key is not sent there.
    """
    shown = url.partition("?")[0]  # what follows may be a signature
    if not url.startswith(("http://", "https://")):
        raise CorruptDataError("the tinker server's address of an adapter is not an HTTP address", path=shown)
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:  # noqa: S310 - the server gave it
            archive = answer.read()
    except (OSError, urllib.error.URLError) as error:
        raise TimedOutError(f"the adapter cannot be downloaded: {error}", path=shown) from error
    return read_adapter(archive, base_model)


def read_adapter(archive: bytes, base_model: str) -> TinkerAdapter:
    """Return the adapter in a tar archive, with a configuration that names every module it has tensors for.

    A server may write `target_modules: null`. peft then takes its own defaults for the architecture, and leaves out
    the tensors of all other modules without a word.
    """
    try:
        files = _files_of(archive)
        config, weights = parse_json(files[CONFIG]), files[WEIGHTS]
        tensors = load(weights)
    except (tarfile.TarError, KeyError, ValueError, SafetensorError) as error:
        raise CorruptDataError(f"the tinker server's archive holds no adapter: {error!r}") from error
    modules = target_modules(tensors)
    config |= {"target_modules": modules, "base_model_name_or_path": base_model}
    return TinkerAdapter(json.dumps(config, indent=2, sort_keys=True).encode() + b"\n", weights, len(tensors))


def target_modules(tensors: Mapping[str, Any]) -> list[str]:
    """Return the modules that an adapter changes, by the names of its tensors: `q_proj`, `down_proj`, ..."""
    modules = set()
    for name in tensors:
        stem = next((name.partition(factor)[0] for factor in _FACTORS if factor in name), "")
        if not stem.startswith(_PREFIX):
            raise CorruptDataError(f"the adapter has a tensor {name!r}, which is no name of peft")
        modules.add(stem.rpartition(".")[2])
    return sorted(modules)


def adapter_tensors(adapter: TinkerAdapter) -> dict[str, torch.Tensor]:
    return load(adapter.weights)


def _files_of(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        members = [member for member in opened.getmembers() if member.isfile()]
        return {
            member.name.rpartition("/")[2]: file.read()
            for member in members
            if (file := opened.extractfile(member)) is not None
        }
