"""A model of a few hundred thousand parameters that chats and calls tools, as a Hugging Face directory."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from calculator_agent import TOOL
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
MARKS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
WORDS = 600
"""Tokens of the vocabulary at most."""

HIDDEN, LAYERS, HEADS, INNER = 128, 2, 4, 256
POSITIONS = 128
SPREAD = 0.08
"""Standard deviation of the first weights; with the usual 0.02 a model this narrow takes long to learn."""

TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call functions.
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}
{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Chat as Qwen writes it, and calls of tools as Hermes models do: JSON between <tool_call> and </tool_call>."""


def make_model(
    directory: Path, seed: int, conversations: Sequence[Sequence[Any]], *, tied: bool, tool: Any = TOOL
) -> int:
    """Write config, float32 weights and tokenizer of an untrained model; return how many parameters it has.

    Args:
        directory: Where.
        seed: The weights follow from it.
        conversations: Messages whose text decides which tokens there are.
        tied: Whether embedding and head are one tensor.
        tool: The tool that the chat template names before them.
    """
    tokenizer = make_tokenizer(conversations, tool)
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


def make_tokenizer(conversations: Sequence[Sequence[Any]], tool: Any = TOOL) -> PreTrainedTokenizerFast:
    """Return a byte tokenizer whose merges are learnt from conversations; digits and new lines are tokens."""
    tokenizer, special = Tokenizer(models.BPE()), [PAD, START, END]
    parts = pre_tokenizers.Split(Regex(r"\d|\n"), "isolated")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([parts, whole])
    tokenizer.decoder = decoders.ByteLevel()
    marks = re.compile("|".join(map(re.escape, (*special, *MARKS))))
    plain = _wrapped(tokenizer)
    texts = [part for one in conversations for part in marks.split(_text(plain, one, tool))]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=WORDS, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(mark) for mark in MARKS])
    return _wrapped(tokenizer)


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, model_max_length=POSITIONS
    )
    made.chat_template, made.padding_side = TEMPLATE, "left"
    return made


def _text(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Any], tool: Any) -> str:
    return str(tokenizer.apply_chat_template(list(messages), tools=[tool], tokenize=False))
