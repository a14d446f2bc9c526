"""verl on processors: what it asks of a device, given as its release takes it (`release.py`).

Imported only where the engine's device is `cpu`, and before anything of `verl.workers`, which asks for the platform
while it is imported. On GPUs verl finds its own, and nothing of this is used.
"""

import contextlib
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from trainer.engines.verl.release import extend_torch_cpu, set_processors


class _AnyIndex(str):
    """`tensor.to(id)` takes a name, `torch.device(f"{name}:{id}")` an index: this is both."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return "0"


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: answer


_ANSWERS: dict[str, Any] = {
    "is_available": True, "current_device": _AnyIndex("cpu"), "device_count": 1, "set_device": None,
    "synchronize": None, "set_allocator_settings": None, "empty_cache": None, "cudart": None,
    "get_device_capability": (None, None), "communication_backend_name": "gloo",
    "visible_devices_envvar": "CPU_VISIBLE_DEVICES", "nvtx_range": contextlib.nullcontext(),
    "profiler_start": None, "profiler_stop": None, "ray_resource_name": "CPU", "ray_noset_envvars": [],
    "is_ipc_supported": False,
}  # fmt: skip
"""What methods of a platform return, whatever they are given: there is one device, and nothing is pending on it."""


@functools.cache
def install() -> None:
    """Make verl compute on processors in this process, with its FSDP2 engines; once is enough."""
    answers = {name: _always(answer) for name, answer in _ANSWERS.items()}
    seed = {name: staticmethod(torch.manual_seed) for name in ("manual_seed", "manual_seed_all")}
    set_processors(_device_module(), {**answers, **seed})
    from verl.workers.engine import EngineRegistry  # noqa: PLC0415 -- asks for the platform when imported
    from verl.workers.engine.fsdp.transformer_impl import (  # noqa: PLC0415 -- the same
        FSDPEngineWithLMHead,
        FSDPEngineWithValueHead,
    )

    EngineRegistry.register("language_model", "fsdp2", device="cpu")(FSDPEngineWithLMHead)
    EngineRegistry.register("value_model", "fsdp2", device="cpu")(FSDPEngineWithValueHead)


def before_platforms() -> None:
    """Make verl before 0.9, which knows no platforms, compute on processors in this process."""
    extend_torch_cpu(_device_module(), _always(_ANSWERS["current_device"]))


def _device_module() -> ModuleType:
    module = ModuleType("torch.cpu")
    vars(module).update({name: getattr(torch.cpu, name) for name in torch.cpu.__all__})
    vars(module).update(
        get_device_name=_always("cpu"), get_rng_state=torch.get_rng_state, set_rng_state=torch.set_rng_state,
        mem_get_info=_always((0, 0)), empty_cache=_always(None), ipc_collect=_always(None),
        memory_allocated=_always(0), memory_reserved=_always(0), max_memory_allocated=_always(0),
        max_memory_reserved=_always(0), reset_peak_memory_stats=_always(None),
    )  # fmt: skip
    return module
