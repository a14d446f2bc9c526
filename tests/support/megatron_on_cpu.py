"""megatron-core on processors, for tests: what it asks of CUDA is answered here, with the layers of its local spec.

Megatron's parallel layers, its optimizer, its schedules, its checkpoints and verl's engine are the real ones. Where
GPUs have layers of Transformer Engine these are torch's, so not what runs on GPUs: norms, attention, the inner
optimizer. `install` changes this process for good.
"""

import warnings


def install():
    """Make verl's Megatron engine compute on processors, in float32 too."""
    import torch

    _answer_for_cuda(torch)
    warnings.filterwarnings("ignore", module="(megatron|mbridge|verl).*")
    from trainer.engines.verl import platform, quiet_import

    with quiet_import():
        platform.install()
        from verl.workers.engine import EngineRegistry
        from verl.workers.engine.megatron import MegatronEngineWithLMHead
    EngineRegistry.register("language_model", "megatron", device="cpu")(MegatronEngineWithLMHead)
    _take_float32()
    _use_local_layers()
    _mend_core()


def _answer_for_cuda(torch):
    """Have tensors that are asked for on CUDA made on the processor."""
    from torch.overrides import TorchFunctionMode

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.FloatTensor = lambda values: torch.tensor(values, dtype=torch.float32)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self

    class OnProcessor(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if function is torch.Tensor.type and len(args) == 1 and not kwargs:  # core knows dtypes by these
                return function(*args).replace("torch.", "torch.cuda.", 1)
            if "cuda" in str(kwargs.get("device", "")):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

    OnProcessor().__enter__()
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()


def _take_float32():
    """Have verl's configuration take float32, in which a comparison shows more than in bfloat16."""
    from verl.workers.config import McoreEngineConfig

    checked = McoreEngineConfig.__post_init__

    def unchecked(self):
        dtype = self.dtype
        object.__setattr__(self, "dtype", "bfloat16")
        checked(self)
        object.__setattr__(self, "dtype", dtype)

    McoreEngineConfig.__post_init__ = unchecked


def _use_local_layers():
    """Have mbridge build layers without Transformer Engine, and know their names."""
    from mbridge.core import llm_bridge
    from mbridge.core.bridge import Bridge
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    spec, names, attend = (
        llm_bridge.get_gpt_decoder_block_spec,
        Bridge._weight_name_mapping_mcore_to_hf,
        DotProductAttention.forward,
    )
    fused = {
        ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
        ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
    }

    def renamed(self, name):
        for own, its in fused.items():
            name = name.replace(own, its)
        return names(self, name)

    def local(config, use_transformer_engine=True, **more):
        return spec(config, use_transformer_engine=False, **more)

    def causal(self, query, key, value, attention_mask, *args, **more):
        # Padding comes last, so a causal mask hides it. Transformer Engine ignores the mask in the same way.
        return attend(self, query, key, value, None, *args, **more)

    llm_bridge.get_gpt_decoder_block_spec = local
    Bridge._weight_name_mapping_mcore_to_hf = renamed
    DotProductAttention.forward = causal


def _mend_core():
    """Mend core's distributed optimizer around torch's AdamW; on GPUs it has that of Transformer Engine.

    Core reads a count of updates, which torch has none of before the first. After a load it has all parameters share
    one, which each of them counts up, and which is that of the optimizer before the load.
    """
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    describe, load = DistributedOptimizer.state_dict, DistributedOptimizer.load_state_dict

    def described(self):
        if not self.optimizer.state:
            for parameter in (one for group in self.optimizer.param_groups for one in group["params"]):
                zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}
        return describe(self)

    def loaded(self, state):
        updates = float(state["optimizer"]["param_groups"][0]["step"])
        load(self, state)
        for own in self.optimizer.state.values():
            own["step"] = torch.tensor(updates)

    DistributedOptimizer.state_dict, DistributedOptimizer.load_state_dict = described, loaded


LAYERS = {
    "masked_softmax_fusion": False, "bias_dropout_fusion": False, "bias_activation_fusion": False,
    "gradient_accumulation_fusion": False, "use_cpu_initialization": True, "attention_backend": "local",
}  # fmt: skip
"""What a configuration says besides, for layers without CUDA."""
