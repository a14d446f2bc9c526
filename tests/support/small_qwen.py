"""A Qwen2 of 140 000 random parameters, its versions as directories, and what it answers by transformers."""

import json
import os

VOCABULARY = 512
WINDOW = 512
SIZE = 559_360
"""Bytes of all tensors."""
_RANK = 8
ADAPTED = ("q_proj", "v_proj", "gate_proj", "up_proj")
_CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": WINDOW,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def model_of(seed, *, tied=False):
    """Return the model that a seed stands for; its answers differ from those of any other by whole nats."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**_CONFIG | {"tie_word_embeddings": tied})).float().eval()


def weights_of(seed):
    """Return the bytes of each tensor of the model that a seed stands for."""
    return _bytes_of(model_of(seed).state_dict())


def model_from(weights):
    """Return the model with the bytes of each tensor."""
    import torch

    model = model_of(0)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    read = {
        name: torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(shapes[name])
        for name, data in weights.items()
    }
    model.load_state_dict(read)
    return model


def write_model(directory, seed=0, *, tied=False):
    """Write what an engine is started with: configuration, weights and a tokenizer of single bytes."""
    model_of(seed, tied=tied).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def write_shards(directory, seed, shards=2, change=None):
    """Write the weights of a seed, and nothing else, as `shards` files.

    Args:
        change: Changes the tensors by name before they are written.
    """
    from safetensors.torch import save_file

    os.makedirs(directory, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in model_of(seed).state_dict().items()}
    if change is not None:
        change(tensors)
    names = sorted(tensors)
    for at in range(shards):
        part = {name: tensors[name] for name in names[at::shards]}
        save_file(part, f"{directory}/model-{at + 1:05d}-of-{shards:05d}.safetensors", {"format": "pt"})
    return directory


def write_adapter(directory, seed, *, rank=_RANK, model=None, layers=ADAPTED):
    """Write a LoRA adapter of a model, by default that of seed 0, as peft lays it out; alpha is twice the rank."""
    from safetensors.torch import save_file

    os.makedirs(directory, exist_ok=True)
    made = _adapter_of(seed, rank, model, layers)
    tensors = {f"base_model.model.{name}": tensor for name, tensor in made.items()}
    save_file(tensors, f"{directory}/adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(layers),
        "bias": "none",
        "use_rslora": False,
    }
    with open(f"{directory}/adapter_config.json", "w") as file:
        json.dump(config, file)
    return directory


def model_with_adapter(seed, model=None, layers=ADAPTED):
    """Return a model, by default that of seed 0, with an adapter merged into its weights."""
    model = model_of(0) if model is None else model
    return _merged(model, _adapter_of(seed, _RANK, model, layers))


def weights_with_adapter(weights, directory):
    """Return the bytes of each tensor of a model with an adapter's directory merged into it."""
    from safetensors.torch import load_file

    found = load_file(f"{directory}/adapter_model.safetensors")
    adapter = {name.removeprefix("base_model.model."): tensor for name, tensor in found.items()}
    return _bytes_of(_merged(model_from(weights), adapter).state_dict())


def _merged(model, adapter):
    import torch

    weights = model.state_dict()
    with torch.no_grad():
        for stem in {name.rpartition(".lora_")[0] for name in adapter}:
            change = adapter[f"{stem}.lora_B.weight"] @ adapter[f"{stem}.lora_A.weight"]
            weights[f"{stem}.weight"] += 2 * change
    return model


def _bytes_of(tensors):
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def _adapter_of(seed, rank, model, layers):
    import torch

    random = torch.Generator().manual_seed(seed)
    model = model_of(0) if model is None else model
    shapes = {
        name: tensor.shape
        for name, tensor in model.state_dict().items()
        if name.split(".")[-2] in layers and name.endswith(".weight")
    }
    made = {}
    for name, (rows, columns) in shapes.items():
        stem = name.removesuffix(".weight")
        made[f"{stem}.lora_A.weight"] = 0.3 * torch.randn(rank, columns, generator=random)
        made[f"{stem}.lora_B.weight"] = 0.3 * torch.randn(rows, rank, generator=random)
    return made


def expected(model, tokens, answered):
    """Return the log-probs of the last `answered` of some tokens by transformers, in float32.

    Args:
        model: A model, or the seed of one.
    """
    import torch

    model = model_of(model) if isinstance(model, int) else model
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    first = len(tokens) - answered
    return [float(logits[at - 1, tokens[at]]) for at in range(first, len(tokens))]


def following(model, tokens, wanted):
    """Return the log-prob of each wanted token after some tokens by transformers."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
    return [float(logits[token]) for token in wanted]


def likeliest(model, tokens):
    """Return the likeliest token after some tokens by transformers, and its log-prob."""
    import torch

    with torch.no_grad():
        found = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
    return int(found.argmax()), float(found.max())


def write_tokenizer(directory):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {char: 3 + at for at, char in enumerate(alphabet)}
    vocabulary |= {f"<{at}>": at for at in range(len(vocabulary), VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(f"{directory}/tokenizer.json")
    with open(f"{directory}/tokenizer_config.json", "w") as file:
        json.dump(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "</s>",
                "bos_token": "<s>",
                "pad_token": "<pad>",
                "model_max_length": WINDOW,
            },
            file,
        )
