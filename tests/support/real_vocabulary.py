"""A vocabulary of a real model: Tekken of Mistral, 130,072 tokens, from a file that mistral-common ships."""

import base64
import functools
import json
import os
import sys
from pathlib import Path

from support.paths import ROOT

_FILE = "mistral_common/data/tekken_240911.json"
_SPECIAL = 1000
"""Ids that the file leaves for special tokens."""


def vocabulary_file():
    """Return the file, None if there is none."""
    if given := os.environ.get("SYNCD_VOCABULARY"):
        return Path(given)
    beside = sorted(ROOT.glob(f".venv-vllm/lib/python3*/site-packages/{_FILE}"))
    return next(
        (path for path in (Path(sys.prefix, "chat-templates", _FILE), *beside) if path.exists()), None
    )


@functools.cache
def real_tokenizer():
    """Return a fast tokenizer of it; there is one, so special tokens that are added stay."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.mistral import MistralConverter

    document = json.loads(vocabulary_file().read_text())
    config = document["config"]
    words = document["vocab"][: config["default_vocab_size"] - _SPECIAL]
    ranks = {base64.b64decode(word["token_bytes"]): word["rank"] for word in words}
    made = MistralConverter(ranks, config["pattern"], additional_special_tokens=["<s>", "</s>"]).converted()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="</s>", clean_up_tokenization_spaces=False
    )
