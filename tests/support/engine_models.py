"""The models of the matrix of real engines: tiny, random, float32, and far from each other from seed to seed."""

import os

from support import small_qwen

_SMALL = {
    "vocab_size": small_qwen.VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": small_qwen.WINDOW,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}

MODELS = {
    "Qwen2, untied": ("Qwen2", {"tie_word_embeddings": False}),
    "Qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "Qwen3, untied": ("Qwen3", {"tie_word_embeddings": False}),
    "Qwen3, tied": ("Qwen3", {"tie_word_embeddings": True}),
    "Llama, untied": ("Llama", {"tie_word_embeddings": False}),
    "Qwen3-MoE": ("Qwen3Moe", {"tie_word_embeddings": False, **_MOE}),
    "Gemma3, tied": ("Gemma3", {"tie_word_embeddings": True, "query_pre_attn_scalar": 32}),
}
"""The class of each model in transformers, and what its configuration has besides."""


def model_of(name, seed):
    """Return a model of the matrix, of the weights that a seed stands for."""
    import torch
    import transformers

    kind, more = MODELS[name]
    torch.manual_seed(seed)
    text = "Text" if kind == "Gemma3" else ""
    config = getattr(transformers, f"{kind}{text}Config")(**_SMALL | more)
    return getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()


def write_start(directory, name):
    """Write what an engine is started with: the model of seed 0, and a tokenizer."""
    os.makedirs(directory)
    model_of(name, 0).save_pretrained(directory)
    small_qwen.write_tokenizer(directory)
    return str(directory)
