"""A model of a few hundred thousand parameters and its character tokenizer, as a Hugging Face directory."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<pad>", "<end>", "<unknown>"
CHARACTERS = "0123456789+-="

HIDDEN, LAYERS, HEADS, INNER = 128, 2, 4, 256
POSITIONS = 32
SPREAD = 0.08
"""Standard deviation of the first weights; with the usual 0.02 a model this narrow takes long to learn."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer: one token per character, nothing added at either end."""
    vocabulary = {token: number for number, token in enumerate((PAD, END, UNKNOWN, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        model_max_length=POSITIONS,
    )


def make_model(directory: str | Path, seed: int, *, tied: bool = True) -> int:
    """Write config, float32 weights and tokenizer of an untrained model; return how many parameters it has.

    The weights follow from the seed. `tied`: whether embedding and head are one tensor.
    """
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=POSITIONS,
        initializer_range=SPREAD,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())
