"""Adapters in a model of this process: versions are loaded into the layers that peft has put into the model."""

from collections.abc import Sequence
from typing import Any, ClassVar

import peft
import torch

from explorer_hooks.hook import ProbeAnswer
from explorer_hooks.hooks.adapters import BaseCheck, require_adapter
from explorer_hooks.hooks.transformers import TransformersHook
from syncd.errors import ConfigError, RefusedError
from syncd.jobfile.sections import LoraSection
from syncd.transports.base import WeightDirectory, WeightTensors

_NAME = "default"  # what peft calls the one adapter


class PeftHook(TransformersHook):
    """Loads adapters into a model of this process, between two generations.

    Args:
        model: What `with_adapter` returns.
        directory: The directory of the model below the adapter; adapters of another model are refused.
    """

    name: ClassVar[str] = "peft"
    kinds: ClassVar[frozenset[str]] = frozenset({"lora"})

    def __init__(self, model: torch.nn.Module, directory: str, *, timeout: float = 300.0) -> None:
        super().__init__(model, timeout=timeout)
        self._base = BaseCheck(lambda: directory)
        self._before: dict[str, torch.Tensor] = {}  # the adapter before an exam

    def prepare(self, target: WeightDirectory) -> None:
        """Refuse an adapter of another model, of other layers, or of another rank or alpha."""
        own = self._settings()
        if target.version.kind in self.kinds:
            adapter = require_adapter(target)
            for key, value in own.items():
                if adapter.get(key) != value:
                    text = f"the adapter has {key} = {adapter.get(key)}, and this explorer's file {value}"
                    raise RefusedError(text, path=target.path, hint="use the trainer's [model.lora]")
            self._base.require(target)
        super().prepare(target)

    def probe(
        self, target: WeightDirectory | WeightTensors | None, tokens: Sequence[Sequence[int]]
    ) -> ProbeAnswer:
        """Run the model on the probe; without a version, which asks for the start model, without the adapter."""
        if target is not None:
            return super().probe(target, tokens)
        model: Any = self.model
        with model.disable_adapter():
            return super().probe(target, tokens)

    def mark(self, label: str) -> None:
        """Keep the adapter: unlike a model's start weights it lies in no directory."""
        del label
        self._before = {name: tensor.detach().clone() for name, tensor in self._loadable_tensors().items()}

    def end_exam(self) -> bool:
        tensors = self._loadable_tensors()
        with torch.no_grad():
            for name, before in self._before.items():
                tensors[name].copy_(before)
        self._before = {}
        self.unload()
        return False

    def no_broadcasts(self) -> str:
        return "the job's steps are adapters, which come through files"

    def _loadable_tensors(self) -> dict[str, torch.Tensor]:
        """Return the adapter's tensors by peft's names in a file."""
        tensors = self.model.state_dict(keep_vars=True)
        return {
            name.replace(f".{_NAME}.", "."): tensor for name, tensor in tensors.items() if ".lora_" in name
        }

    def _settings(self) -> dict[str, object]:
        model: Any = self.model
        config = model.peft_config[_NAME]
        return {"r": config.r, "lora_alpha": config.lora_alpha, "use_rslora": config.use_rslora}


def with_adapter(model: Any, section: LoraSection) -> torch.nn.Module:
    """Return a transformers model with the adapter that a job trains, as the training starts with it."""
    try:
        if section.adapter:
            adapted: torch.nn.Module = peft.PeftModel.from_pretrained(
                model, section.adapter, autocast_adapter_dtype=False
            )
        else:
            adapted = peft.get_peft_model(model, _config(section), autocast_adapter_dtype=False)
    except (ValueError, OSError) as error:
        what = str(error).partition("\n")[0]
        raise ConfigError(f"the adapter cannot be made: {what}", hint="see [model.lora]") from error
    return adapted


def _config(section: LoraSection) -> peft.LoraConfig:
    targets = section.targets if isinstance(section.targets, str) else list(section.targets)
    return peft.LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        target_modules=targets,
        exclude_modules=list(section.exclude) or None,
        task_type="CAUSAL_LM",
    )
