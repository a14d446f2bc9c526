"""Checks `[model.lora]` and reads the configuration of adapters as peft writes it. Needs neither torch nor peft."""

import errno
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from syncd.client.sync_policy import SyncMethod
from syncd.errors import ConfigError, CorruptDataError, StorageError, storage_error
from syncd.jobfile.model import JobFile
from syncd.jobfile.problems import Problem, shown
from syncd.jobfile.sections import LoraSection
from syncd.protocol.documents import parse_json
from syncd.protocol.layout import ADAPTER, ADAPTER_CONFIG
from trainer.config.attention import text_config

_METHODS = frozenset({SyncMethod.CHECKPOINT.value, SyncMethod.AUTO.value})
PLACE = f"model.lora.adapter is a directory with {ADAPTER_CONFIG} and {ADAPTER}, as peft's save_pretrained writes it"
_CHANGES: Mapping[str, str] = {
    "use_dora": "DoRA",
    "modules_to_save": "whole layers beside the adapter",
    "rank_pattern": "several ranks",
    "alpha_pattern": "several alphas",
    "lora_bias": "biases",
    "target_parameters": "adapters of parameters",
    "layer_replication": "replicated layers",
    "trainable_token_indices": "trained tokens",
}
"""Fields of peft's configuration that change more than A and B of linear layers, with what they stand for."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    rank: int
    alpha: float
    rslora: bool = False  # whether what it adds is divided by the root of the rank
    base: str = ""  # the model that it belongs to, as its writer called it

    @property
    def scaling(self) -> float:
        """Return what B.A is multiplied by before it is added."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def lora_problems(config: JobFile) -> Iterator[Problem]:
    section, method = config.model.lora, config.sync.method
    if section.rank == 0:
        yield from _unread(section, [name for name in LoraSection.model_fields if name != "rank"], "a rank")
        return
    if section.adapter:
        yield from _unread(section, ["targets", "exclude"], "new adapters: those of `adapter` have their own")
    if config.engine.strategy != "fsdp2":
        text = f'model.lora with engine.strategy = "{config.engine.strategy}" is not supported'
        yield Problem("engine.strategy", text, 'engine.strategy = "fsdp2"')
    if config.model.publishes_adapters and method not in _METHODS:
        text = f'sync.method = "{method}" sends whole weights, and steps are adapters'
        yield Problem("sync.method", text, 'sync.method = "checkpoint", or model.lora.publish = "merged"')


def _unread(section: LoraSection, names: list[str], reader: str) -> Iterator[Problem]:
    for name in names:
        if getattr(section, name) != LoraSection.model_fields[name].default:
            yield Problem(
                f"model.lora.{name}", f"model.lora.{name} has no effect without {reader}", "leave it out"
            )


def check_start_adapter(section: LoraSection) -> None:
    if not section.rank or not section.adapter:
        return
    path = section.adapter
    try:
        adapter = read_adapter_config(path)
    except (CorruptDataError, StorageError) as error:
        if isinstance(error, StorageError) and error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        text = f"the adapter to start from cannot be read: {error.message}"
        raise ConfigError(text, path=error.path, hint=PLACE) from error
    if not os.path.isfile(f"{path}/{ADAPTER}"):
        raise ConfigError(f"the adapter to start from has no {ADAPTER}", path=path, hint=PLACE)
    for key, value, its in (("rank", section.rank, adapter.rank), ("alpha", section.alpha, adapter.alpha)):
        if value != its:
            text = f"the adapter to start from has {key} {its:g}, and model.lora.{key} = {value}"
            raise ConfigError(text, path=path, hint=f"{key} = {its:g}")
    if adapter.rslora:
        hint = "merge it into model.path by peft's merge_and_unload"
        raise ConfigError(
            "the adapter to start from uses rsLoRA, which is not supported", path=path, hint=hint
        )


def check_rank(section: LoraSection, model: Mapping[str, Any], path: str) -> None:
    """Refuse adapters of a rank above the model's width, which could be no more than whole weights."""
    width = text_config(model).get("hidden_size")
    if isinstance(width, int) and section.rank > width:
        text = f"model.lora.rank = {section.rank} is more than the model's width, {width}"
        raise ConfigError(text, path=path, hint="model.lora.rank = 16, or 0 to train all weights")


def read_adapter_config(directory: str) -> AdapterConfig:
    path = f"{directory}/{ADAPTER_CONFIG}"
    try:
        with open(path, encoding="utf-8") as file:
            document = parse_json(file.read())
    except OSError as error:
        raise storage_error(error, path) from error
    except ValueError as error:
        raise CorruptDataError("not a JSON object", path=path) from error
    return adapter_config(document, path)


def adapter_config(document: Any, path: str) -> AdapterConfig:
    if not isinstance(document, dict) or document.get("peft_type") != "LORA":
        raise CorruptDataError("not an adapter_config.json of LoRA", path=path)
    rank, alpha = document.get("r"), document.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise CorruptDataError(
            f"r = {shown(rank)} and lora_alpha = {shown(alpha)} are no rank and alpha", path=path
        )
    changes = [words for name, words in _CHANGES.items() if document.get(name)]
    if changes or document.get("bias", "none") != "none":
        raise CorruptDataError(f"an adapter with {(*changes, 'biases')[0]} is not supported", path=path)
    return AdapterConfig(
        rank, alpha, bool(document.get("use_rslora")), str(document.get("base_model_name_or_path"))
    )
