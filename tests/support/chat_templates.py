"""Chat templates that trl ships, and tokenizers that cut their text."""

import os
import re
import sys
from pathlib import Path

from support.chat_model import make_tokenizer

BAR = "\uff5c"
"""Stands in DeepSeek's special tokens where others have |."""

SPECIAL = re.compile(rf"<[|{BAR}]?[a-zA-Z_\u2581/0-9]+[|{BAR}]?>|\[/?[A-Z_]+\]|<[a-z]+\|>")

DIRECTORY = Path(os.environ.get("SYNCD_CHAT_TEMPLATES", f"{sys.prefix}/chat-templates/trl/chat_templates"))
"""Where they are. trl is not installed beside verl, which then imports from it what it does not have any more."""


def template_tokenizer(template, ends):
    """Return a tokenizer of bytes and merges to which a template's special tokens are single ones."""
    tokenizer = make_tokenizer(
        list(dict.fromkeys([*ends, *SPECIAL.findall(template), "<bos>"])), template, ends[0]
    )
    tokenizer.bos_token = "<bos>"
    return tokenizer
