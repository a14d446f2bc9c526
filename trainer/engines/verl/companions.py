"""What belongs beside the weights so that the directory loads by itself: config, generation config, tokenizer."""

import json
import os

from syncd.errors import storage_error
from trainer.config.model_files import read_model_config

_NAMES = frozenset({
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.json",
    "preprocessor_config.json",
})  # fmt: skip
_SUFFIXES = (".model", ".tiktoken", ".jinja")
_CODE = ".py"


def companions(path: str, dtype: str, *, code: bool) -> dict[str, bytes]:
    """Return files of a model directory by name, all but the weights.

    Args:
        path: The model directory.
        dtype: Of the weights that they go with, which config.json is made to say.
        code: Whether the model's own code goes along.

    Raises:
        ConfigError: It is not a model directory.
        StorageError: A file cannot be read.
    """
    config = read_model_config(path) | {"dtype": dtype, "torch_dtype": dtype}
    found = {"config.json": json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"}
    suffixes = (*_SUFFIXES, _CODE) if code else _SUFFIXES
    try:
        for name in sorted(os.listdir(path)):
            if name in _NAMES or name.endswith(suffixes):
                with open(os.path.join(path, name), "rb") as file:
                    found[name] = file.read()
    except OSError as error:
        raise storage_error(error, path) from error
    return found
