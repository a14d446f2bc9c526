"""A small model whose head is tied to its embedding, and what it answers."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

PROMPT = torch.tensor([[1, 5, 3, 2, 8]])


def tiny(seed, dtype=torch.float32, width=16):
    """Return a model whose head is tied to its embedding, as small ones are."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=32, hidden_size=width, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).to(dtype).eval()


@torch.no_grad()
def log_probs(model):
    return model(PROMPT).logits.float().log_softmax(-1)
