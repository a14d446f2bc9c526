"""The text of token ids, by the tokenizer of the job's model: needs the package tokenizers, and no torch."""

import os
from collections.abc import Sequence
from typing import Any

from syncd.errors import ConfigError, CorruptDataError, first_line
from syncd.extras import install_command
from syncd.protocol.layout import CONFIG, Job
from syncd.protocol.permissions import parse_config

_CONFIG_LIMIT = 1 << 20
_TOKENIZER_LIMIT = 64 << 20
_FILE = "tokenizer.json"
_BEFORE = 8  # ids before the first one that is shown: what it reads as depends on them


class TokenText:
    """Turns ids into texts, one for each id; keeps the tokenizer that it has read."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._loaded: tuple[tuple[str, int, int], Any] | None = None

    def tokenizer(self) -> tuple[Any, str]:
        """Return the tokenizer, or None and why there is none."""
        path = self._path()
        if path is None:
            return None, f"{CONFIG} of the job names no model.path that is an absolute path"
        try:
            from tokenizers import Tokenizer  # noqa: PLC0415 - an extra
        except ModuleNotFoundError:
            return None, f"tokenizers is not installed: {install_command('explorer')}"
        try:
            status = os.stat(path)
            key = (path, status.st_mtime_ns, status.st_size)
            if self._loaded is None or self._loaded[0] != key:
                text = self._job.disk.read(os.path.realpath(path), _TOKENIZER_LIMIT).decode()
                self._loaded = (key, Tokenizer.from_str(text))
        except Exception as error:  # noqa: BLE001 - tokenizers raises Exception itself
            return None, f"{path} cannot be read: {first_line(error)[:200]}"
        return self._loaded[1], ""

    def _path(self) -> str | None:
        try:
            config = f"{self._job.root}/{CONFIG}"
            model = parse_config(self._job.disk.read(config, _CONFIG_LIMIT), config).get("model")
        except (OSError, ConfigError, CorruptDataError):
            return None
        path = model.get("path") if isinstance(model, dict) else None
        return os.path.join(path, _FILE) if isinstance(path, str) and os.path.isabs(path) else None


def texts(tokenizer: Any, ids: Sequence[int], start: int, end: int) -> list[str]:
    """Return the text that each id from `start` to `end` adds; of a character's ids the last one has it all."""
    from tokenizers.decoders import DecodeStream  # noqa: PLC0415 - an extra

    begin = max(start - _BEFORE, 0)
    stream = DecodeStream(skip_special_tokens=False)
    texts = [_step(stream, tokenizer, token) for token in ids[begin:end]]
    return texts[start - begin :]


def _step(stream: Any, tokenizer: Any, token: int) -> str:
    try:
        return stream.step(tokenizer, token) or ""
    except Exception:  # noqa: BLE001 - tokenizers raises Exception itself, for ids that form no text
        return "\ufffd"
