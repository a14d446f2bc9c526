"""Reads the model directory, and checks it before ranks are started: no torch, a few small reads."""

import contextlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from syncd.errors import ConfigError, storage_errors
from syncd.jobfile.code_trust import require_own_model
from syncd.jobfile.model import JobFile
from syncd.protocol.documents import parse_json
from trainer.config.algorithms import SFT, VERL
from trainer.config.attention import check_heads
from trainer.config.lora import check_rank, check_start_adapter

_WHOLE = ("model.safetensors", "pytorch_model.bin")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_VOCABULARIES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("vocab.txt",))
_VOCABULARY_SUFFIXES = (".model", ".tiktoken")
_SHOWN = 5  # missing files that a message names
_LENGTH = 8  # bytes of the length of a header, with which a safetensors file begins


def check_model(config: JobFile, *, trust: bool = False, recorded: bool = False) -> None:
    """Refuse a model that cannot be loaded, whose code others could have written, or that lacks a tokenizer.

    Other engines than verl's check their models' files themselves. With `trust` anybody's code may run; `recorded` is
    as of `require_own_model`.
    """
    path = config.model.path
    require_own_model(path, runs_code=config.model.trust_remote_code and not trust, recorded=recorded)
    if config.engine.name != VERL:
        return
    check_configs(config)
    _check_weights(path)
    if config.critic.enabled and config.critic.path:
        _check_weights(config.critic.path, "critic.path")
    check_start_adapter(config.model.lora)
    with storage_errors(path):
        why = _needs_tokenizer(config)
        if why and not _has_tokenizer(path):
            lacking = ["tokenizer.json (or tokenizer.model, or vocab.json with merges.txt)"]
            raise _incomplete(path, f"the model has no tokenizer, and {why}", lacking)


def check_configs(config: JobFile) -> None:
    """Refuse a policy or a critic without a config, or whose heads cannot be divided as the file says."""
    model, path = read_model_config(config.model.path), config.model.path
    check_heads(config, model, path)
    check_rank(config.model.lora, model, path)
    if config.critic.enabled and config.critic.path:
        check_heads(config, read_model_config(config.critic.path, "critic.path"), config.critic.path)


def _check_weights(path: str, key: str = "model.path") -> None:
    """Refuse a model directory with a part of its weights only; `key` names it in the file."""
    with storage_errors(path):
        missing = list(_missing_weights(path))
    if missing:
        raise _incomplete(path, "the model's weights are missing", missing, key)


def read_model_config(path: str, key: str = "model.path") -> dict[str, Any]:
    file_path = os.path.join(path, "config.json")
    try:
        with open(file_path, encoding="utf-8") as file:
            document = parse_json(file.read())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"not a model directory: {reason}", path=path, hint=_where_from(path, key)
        ) from error
    architectures = document.get("architectures") if isinstance(document, dict) else None
    if not isinstance(architectures, list) or len(architectures) != 1:
        hint = 'write, for example, "architectures": ["Qwen2ForCausalLM"]'
        raise ConfigError("the model's config does not name one architecture", path=file_path, hint=hint)
    return dict(document)


def _missing_weights(path: str) -> Iterator[str]:
    if whole := [name for name in _WHOLE if os.path.isfile(f"{path}/{name}")]:
        yield from _cut_off(path, whole[0])
        return
    index = next((name for name in _INDEXES if os.path.isfile(f"{path}/{name}")), None)
    if index is None:
        yield f"model.safetensors (or {_INDEXES[0]} with its shards)"
        return
    try:
        with open(f"{path}/{index}", encoding="utf-8") as file:
            shards = set(map(str, parse_json(file.read())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        yield f"{index} (the one there is not an index of weights: it has no table weight_map)"
        return
    for name in sorted(shards):
        if os.path.isfile(f"{path}/{name}"):
            yield from _cut_off(path, name)
        else:
            yield name


def _cut_off(path: str, name: str) -> Iterator[str]:
    if not name.endswith(".safetensors"):
        return
    with open(f"{path}/{name}", "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH), "little")
        end = _LENGTH + length + _data_size(file.read(length)) if _LENGTH + length <= size else size + 1
    if size < end or size <= _LENGTH:
        yield f"{name} (the one there is cut off or a pointer of git-lfs: {size} bytes)"


def _data_size(header: bytes) -> int:
    """Return the bytes of all tensors of a safetensors file by its header, 0 where that is none."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, IndexError):
        tensors = [tensor for name, tensor in parse_json(header).items() if name != "__metadata__"]
        return max((int(tensor["data_offsets"][1]) for tensor in tensors), default=0)
    return 0


def _needs_tokenizer(config: JobFile) -> str:
    if config.algorithm.name != SFT:
        return "explorers load it from the steps"
    path = config.data.sft_path
    with storage_errors(path):
        return "" if _has_tokens(path) else f"the rows of {path} are texts"


def _has_tokens(path: str) -> bool:
    """Return whether the first row of a data set has tokens; other files are refused when they are read."""
    if path.endswith(".parquet"):
        import pyarrow as pa  # noqa: PLC0415 - only Parquet needs it
        import pyarrow.parquet as pq  # noqa: PLC0415

        try:
            return "tokens" in pq.read_schema(path).names
        except pa.ArrowException:
            return True
    try:
        with open(path, encoding="utf-8") as file:
            line = next((line for line in file if line.strip()), "{}")
        return "tokens" in parse_json(line)
    except (ValueError, TypeError):
        return True


def _has_tokenizer(path: str) -> bool:
    names = set(os.listdir(path))
    if any(names.issuperset(files) for files in _VOCABULARIES):
        return True
    return any(name.endswith(_VOCABULARY_SUFFIXES) for name in names)


def _incomplete(path: str, what: str, missing: list[str], key: str = "model.path") -> ConfigError:
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    return ConfigError(f"{what}: {', '.join(missing[:_SHOWN])}{more}", path=path, hint=_where_from(path, key))


def _where_from(path: str, key: str) -> str:
    """Return what to run: the hub's cache may have the model that a path ends like; a name alone is never loaded."""
    name = "/".join(path.split("/")[-2:])
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and (cached := _cached(name)):
        return f"the hub's cache has {name}: --{key} {shlex.quote(cached)}"
    return f"{key} is a directory: hf download ORG/MODEL --local-dir {shlex.quote(path)}"


def _cached(name: str) -> str | None:
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    directory = (
        f"{os.environ.get('HF_HUB_CACHE') or f'{home}/hub'}/models--{name.replace('/', '--')}/snapshots"
    )
    try:
        snapshots = [
            entry.path for entry in os.scandir(directory) if os.path.isfile(f"{entry.path}/config.json")
        ]
        return max(snapshots, key=os.path.getmtime, default=None)
    except OSError:
        return None


_COMPANIONS = frozenset({
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.json",
    "preprocessor_config.json",
})  # fmt: skip
_COMPANION_SUFFIXES = (".model", ".tiktoken", ".jinja")


def companions(
    path: str, dtype: str, *, code: bool, changes: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, bytes]:
    """Return files of a model directory by name, all but the weights; with `code`, the model's own code too.

    Its config.json names `dtype`, that of the weights beside it, and says `changes` by their names.
    """
    config = read_model_config(path) | {"dtype": dtype, "torch_dtype": dtype, **changes}
    files = {"config.json": json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"}
    with storage_errors(path):
        for name in companion_names(path, code=code):
            with open(os.path.join(path, name), "rb") as file:
                files[name] = file.read()
    return files


def companion_names(path: str, *, code: bool) -> list[str]:
    """Return the names of a model directory's files but weights and config.json; with `code`, its own code too."""
    suffixes = (*_COMPANION_SUFFIXES, ".py") if code else _COMPANION_SUFFIXES
    return [name for name in sorted(os.listdir(path)) if name in _COMPANIONS or name.endswith(suffixes)]
