"""A Qwen2 of random parameters that chats: a byte tokenizer with merges, and a chat template with tools."""

import json

MARKS = ("<|end|>", "<|stop|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
MERGES = ("th", "the", "er", "in", "an", "to", "co", "ca", "ll", "call", "ou", "re")
END, STOP = 0, 1

TEMPLATE = """\
{%- if tools %}<|system|>You may call <tool_call>:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|assistant|>{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|end|>
{% else %}<|{{ 'system' if message.role == 'developer' else message.role }}|>{{ message.content }}<|end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


def make_tokenizer(marks=MARKS, template=TEMPLATE, end=MARKS[END]):
    """Return a byte tokenizer whose text can be cut into tokens in several ways; `marks` are special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*marks, *alphabet, *MERGES]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
    merges = [(word[:-1], word[-1]) for word in MERGES if word[:-1] in vocabulary]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, clean_up_tokenization_spaces=False
    )
    made.chat_template = template
    return made


def write_chat_model(directory, seed=0, window=2048):
    """Write a model directory, and return the model."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=window,
        tie_word_embeddings=False,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=END,
    )
    model = Qwen2ForCausalLM(config).float().eval()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    with open(f"{directory}/generation_config.json", "w") as file:
        json.dump({"eos_token_id": [END, STOP]}, file)
    return model
