"""Exports of a small model as a trainer writes them, each a few changed words after the one before."""

import json
import os
from typing import Any

import numpy as np
from safetensors.numpy import save_file

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


class SmallModel:
    """Two shards: float16 tensors (words of two bytes), a float32 one, flags, an empty tensor, odd sizes.

    Args:
        seed: Of its weights.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        normal = self._random.standard_normal
        self.shards: dict[str, dict[str, Any]] = {
            SHARDS[0]: {"a": (normal((61, 371)) * 0.02).astype(np.float16), "norm": np.ones(13, np.float32)},
            SHARDS[1]: {
                "b": (normal(90_001) * 0.02).astype(np.float16),
                "flags": np.arange(7) % 2 == 0,
                "nothing": np.zeros((0, 4), np.float32),
            },
        }
        self.tokenizer = "{}"

    def train(self, share: float = 0.02) -> "SmallModel":
        """Change this share of the words of two bytes by one unit, and one float32."""
        for tensors in self.shards.values():
            for tensor in tensors.values():
                if tensor.dtype == np.float16:
                    words = tensor.view(np.uint16)
                    words[self._random.random(words.shape) < share] += 1
        self.shards[SHARDS[0]]["norm"][self._random.integers(13)] += np.float32(1e-3)
        return self

    def export(self, directory: object) -> str:
        """Write the model directory and return its path."""
        path = str(directory)
        os.makedirs(path)
        for name, tensors in self.shards.items():
            save_file(tensors, f"{path}/{name}", metadata={"format": "pt"})
        places = {tensor: name for name, tensors in self.shards.items() for tensor in tensors}
        texts = {INDEX: json.dumps({"weight_map": places}), "config.json": '{"a": 1}'}
        for name, text in {**texts, "tokenizer.json": self.tokenizer}.items():
            with open(f"{path}/{name}", "w", encoding="utf-8") as file:
                file.write(text)
        return path


def contents(directory: object) -> dict[str, bytes]:
    """Return each file below a directory by its path, hidden ones too."""
    found = {}
    for place, _, names in os.walk(str(directory)):
        for name in names:
            path = os.path.join(place, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, str(directory))] = file.read()
    return found
