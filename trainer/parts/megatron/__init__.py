"""Megatron by verl, as `engine.strategy = "megatron"`: the model is split by megatron-core."""

from syncd.extras import install_command
from trainer.config.strategies import Strategy
from trainer.parts.megatron.config import megatron_problems

STRATEGY = Strategy(
    noun="Megatron engine",
    problems=megatron_problems,
    packages={
        "megatron": install_command("megatron"),
        "mbridge": install_command("megatron"),
        "transformer_engine": "pip install 'transformer-engine[pytorch]', which needs CUDA",
    },
    releases=frozenset({"0.9"}),
    engine="trainer.parts.megatron.engine:MegatronVerlEngine",
    model="trainer.parts.megatron.model:build_megatron",
)
