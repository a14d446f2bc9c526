"""What differs between the releases of verl that this engine runs, 0.8 and 0.9; other modules ask no release.

0.8 has no platforms: it asks `torch.cpu` itself. Its export is bfloat16 whatever the weights are, and it lacks a few
losses and settings, which are refused here by name.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from syncd.errors import ConfigError
from syncd.jobfile.model import JobFile
from syncd.jobfile.problems import Problem
from trainer.config.algorithms import estimator_and_loss, with_published
from trainer.config.strategies import strategy_of

_INSTALL = "pip install 'verl>=0.8,<0.10'"
_NEWEST = "pip install 'verl>=0.9.1,<0.10'"
_PACKED_EXPERTS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")


@dataclass(frozen=True, slots=True)
class Lacks:
    platforms: bool = False  # whether it lacks platforms, and asks `torch.cpu` itself
    losses: frozenset[str] = frozenset()  # policy losses that it does not have
    aggregations: frozenset[str] = frozenset()  # values of `algorithm.loss_agg_mode` that it does not have
    # Policy losses that ignore `algorithm.loss_agg_mode`, with the one that they compute.
    fixed: Mapping[str, str] = field(default_factory=dict)
    options: frozenset[str] = frozenset()  # names of `engine.options` that it does not have
    adapter_states: bool = False  # whether it lacks the load of a training state that has an adapter alone
    whole_export: bool = False  # whether it lacks an export in the dtype of the weights
    whole_value_loss: bool = False  # whether it lacks a value loss over all micro-batches of an update


RELEASES: Mapping[str, Lacks] = {
    "0.8": Lacks(
        platforms=True,
        losses=frozenset({"dro"}),
        aggregations=frozenset({"token-sum"}),
        fixed={"gspo": "seq-mean-token-mean"},
        options=frozenset({"use_no_sync_for_gradient_accumulation"}),
        adapter_states=True,
        whole_export=True,
        whole_value_loss=True,
    ),
    "0.9": Lacks(),
}

LEGACY = "0.7.1"  # the release that the engine `verl_legacy` runs


def installed_release() -> str:
    """Return the installed release, one of `RELEASES`, without importing verl."""
    whole = version("verl")
    release = ".".join(whole.split(".")[:2])
    if release not in RELEASES:
        releases = " and ".join(f"{name}.x" for name in RELEASES)
        hint = 'engine.name = "verl_legacy"' if whole == LEGACY else _INSTALL
        raise ConfigError(f"verl {whole} is installed; the engine verl runs {releases}", hint=hint)
    return release


def release_problems(config: JobFile) -> Iterator[Problem]:
    release = installed_release()
    yield from lacking_problems(config, release, RELEASES[release])


def lacking_problems(config: JobFile, release: str, lacks: Lacks) -> Iterator[Problem]:
    section = with_published(config.algorithm)
    _, loss = estimator_and_loss(section)
    mode = f'algorithm.loss_agg_mode = "{section.loss_agg_mode}"'
    if loss in lacks.losses:
        yield _problem("algorithm.loss", release, f"the loss {loss}")
    if section.loss_agg_mode in lacks.aggregations:
        yield _problem("algorithm.loss_agg_mode", release, mode)
    elif section.loss_agg_mode != lacks.fixed.get(loss, section.loss_agg_mode):
        yield _problem("algorithm.loss_agg_mode", release, f"{mode} with the loss {loss}")
    for name in sorted(lacks.options.intersection(config.engine.options)):
        yield _problem(f"engine.options.{name}", release, f"engine.options.{name}")
    strategy = strategy_of(config)
    if strategy is not None and release not in strategy.releases:
        yield _problem("engine.strategy", release, f"{strategy.noun} that is supported here")
    if lacks.adapter_states and config.model.lora.rank:
        yield _problem(
            "model.lora.rank", release, "training state of an adapter alone, which [model.lora] needs"
        )
    if lacks.whole_value_loss and config.critic.enabled:
        yield _problem("critic.enabled", release, "value loss that is independent of how rows are split")
    if lacks.whole_export and config.engine.strategy == "fsdp" and config.engine.offload_params:
        yield _problem(
            "engine.offload_params", release, 'export of offloaded parameters with engine.strategy = "fsdp"'
        )


def _problem(key: str, release: str, what: str) -> Problem:
    return Problem(key, f"verl {release} has no {what}", _NEWEST)


def set_processors(device_module: ModuleType, answers: Mapping[str, Callable[..., Any]]) -> None:
    """Make verl compute on processors; before anything of `verl.workers` is imported.

    `device_module` replaces `torch.cuda`; `answers` has the methods of a platform by name.
    """
    if RELEASES[installed_release()].platforms:
        extend_torch_cpu(device_module, answers["current_device"])
        return
    from verl.plugin.platform import PlatformBase, set_platform  # noqa: PLC0415 -- not in 0.8

    names = {"device_name": "cpu", "vendor_name": "cpu", "device_module": device_module}
    set_platform(type("ProcessorPlatform", (PlatformBase,), {**names, **answers})())


def extend_torch_cpu(device_module: ModuleType, current_device: Callable[..., Any]) -> None:
    """Give `torch.cpu` the functions of a device that verl before 0.9 calls; torch's own stay, but for one."""
    if torch.cuda.is_available():
        hint = f"start with CUDA_VISIBLE_DEVICES= (empty), or {_NEWEST}"
        raise ConfigError(
            "verl before 0.9 takes the GPU that it sees, whatever engine.device says", hint=hint
        )
    for name, value in vars(device_module).items():
        if not name.startswith("__") and not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, value)
    torch.cpu.current_device = current_device


@functools.cache
def _exports_whole() -> bool:
    return not RELEASES[installed_release()].whole_export


def whole_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Walk over the whole weights by Hugging Face names, in the dtype that they have; all ranks walk all of it."""
    if _exports_whole():
        yield from model.get_per_tensor_param()[0]
        return
    from verl.utils.device import get_device_id  # noqa: PLC0415 -- verl asks for its platform
    from verl.utils.model import convert_weight_keys  # noqa: PLC0415 -- the same

    module = getattr(model.module, "_fsdp_wrapped_module", model.module)
    for name, value in convert_weight_keys(model.module.state_dict(), module).items():
        if name.endswith(_PACKED_EXPERTS):
            message = f"verl 0.8 does not export the experts of {name} one by one"
            raise ConfigError(message, hint=_NEWEST)
        yield name, _whole(value, get_device_id()) if isinstance(value, DTensor) else value


def _whole(part: Any, device: Any) -> torch.Tensor:
    """Return the whole of a sharded tensor, on the device: there its group can gather."""
    whole: torch.Tensor = part.to(device).full_tensor()
    return whole
