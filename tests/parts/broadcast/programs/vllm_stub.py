"""As much of vLLM as the back end that this package gives it needs, in a process that has no vLLM."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Generic, TypeVar

One, Other = TypeVar("One"), TypeVar("Other")


class WeightTransferEngine(Generic[One, Other]):
    def __init__(self, config, vllm_config, device, model):
        self.vllm_config, self.parallel_config = vllm_config, vllm_config.parallel_config
        self.model_config, self.device, self.model = vllm_config.model_config, device, model

    def parse_init_info(self, document):
        return self.init_info_cls(**document)

    def parse_update_info(self, document):
        return self.update_info_cls(**document)


class Factory:
    engines: dict = {}  # noqa: RUF012 - as vLLM has it

    @classmethod
    def register_engine(cls, name, engine):
        if name in cls.engines:
            raise ValueError(f"{name} is there already")
        cls.engines[name] = engine


def module(name, **content):
    made = ModuleType(name)
    vars(made).update(content)
    sys.modules[name] = made


def worker(load, model=None, device="cpu"):
    """Return a worker's end; what it receives is loaded by `load`, or by the model's own `load_weights`."""
    for name in ("vllm", "vllm.distributed", "vllm.model_executor", "vllm.model_executor.model_loader"):
        module(name, __path__=[])
    infos = {name: type(name, (), {}) for name in ("WeightTransferInitInfo", "WeightTransferUpdateInfo")}
    module("vllm.distributed.weight_transfer", __path__=[])
    module("vllm.distributed.weight_transfer.base", WeightTransferEngine=WeightTransferEngine, **infos)
    module("vllm.distributed.weight_transfer.factory", WeightTransferEngineFactory=Factory)
    nothing = {"initialize_layerwise_reload": lambda *_: None, "finalize_layerwise_reload": lambda *_: None}
    module("vllm.model_executor.model_loader.reload", **nothing)
    from explorer_hooks.parts.broadcast import vllm_backend

    vllm_backend.register()
    vllm_backend.register()
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    config = SimpleNamespace(parallel_config=parallel, model_config=None)
    model = model or SimpleNamespace(load_weights=load, parameters=list, buffers=list)
    return Factory.engines["syncd"](None, config, device, model)
