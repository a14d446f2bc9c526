"""What stands in for a model where nothing loads it: the files that a start looks for, without torch."""

import json
import os


def leave_model(path, *, tokenizer=True, shards=()):
    """Make the directory of a model: config, weights of no tensors (or shards and their index), and tokenizer."""
    os.makedirs(path, exist_ok=True)
    _write(f"{path}/config.json", {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"})
    if tokenizer:
        _write(f"{path}/tokenizer.json", {"model": {"type": "WordLevel"}})
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number, _ in enumerate(shards, 1)]
    for name in names or ["model.safetensors"]:
        with open(f"{path}/{name}", "wb") as file:
            file.write((2).to_bytes(8, "little") + b"{}")
    if names:
        index = {"weight_map": dict(zip(shards, names, strict=True))}
        _write(f"{path}/model.safetensors.index.json", index)
    return str(path)


def _write(path, document):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file)
