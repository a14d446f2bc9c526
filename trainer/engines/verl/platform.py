"""verl on processors: a platform for it, through its own extension points.

Imported only where the engine's device is `cpu`, and before anything of `verl.workers`, which asks for the platform
while it is imported. On GPUs verl finds its own, and nothing of this is used.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, set_platform


class _AnyIndex(str):
    """`tensor.to(id)` takes a name, `torch.device(f"{name}:{id}")` an index: this is both."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return "0"


class ProcessorPlatform(PlatformBase):  # type: ignore[misc]  # verl is Any to mypy: setup.cfg
    """What verl asks of a device, answered for processors: there is one, with nothing behind the caller's back."""

    device_name = "cpu"
    vendor_name = "cpu"

    def __init__(self) -> None:
        self._module = _device_module()

    @property
    def device_module(self) -> ModuleType:
        return self._module

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return _AnyIndex("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """There is one."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing is pending."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """The allocator is the C library's."""

    def empty_cache(self) -> None:
        """There is no cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:  # noqa: ARG002
        return (None, None)

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CPU_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:  # noqa: ARG002
        yield

    def profiler_start(self) -> None:
        """There is none."""

    def profiler_stop(self) -> None:
        """There is none."""

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


@functools.cache
def install() -> None:
    """Make verl compute on processors in this process, with its FSDP2 engine; once is enough."""
    set_platform(ProcessorPlatform())
    from verl.workers.engine import EngineRegistry  # noqa: PLC0415 -- asks for the platform when imported
    from verl.workers.engine.fsdp import FSDPEngineWithLMHead  # noqa: PLC0415 -- the same

    EngineRegistry.register("language_model", "fsdp2", device="cpu")(FSDPEngineWithLMHead)


def _device_module() -> ModuleType:
    """Return what replaces `torch.cuda`: `torch.cpu` with functions about memory."""
    module = ModuleType("torch.cpu")
    vars(module).update({name: getattr(torch.cpu, name) for name in torch.cpu.__all__})
    vars(module).update(
        get_device_name=_always("cpu"), get_rng_state=torch.get_rng_state, set_rng_state=torch.set_rng_state,
        mem_get_info=_always((0, 0)), empty_cache=_always(None), ipc_collect=_always(None),
        memory_allocated=_always(0), memory_reserved=_always(0), max_memory_allocated=_always(0),
        max_memory_reserved=_always(0), reset_peak_memory_stats=_always(None),
    )  # fmt: skip
    return module


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: answer
