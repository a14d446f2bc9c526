"""What hooks for adapters share: the check of an adapter's files, and of the model that it belongs to."""

import json
import os
from collections.abc import Callable
from typing import Any

from syncd.errors import RefusedError, SyncdError
from syncd.protocol.adapter_base import model_digest
from syncd.protocol.layout import ADAPTER, ADAPTER_CONFIG
from syncd.protocol.local_disk import LocalDisk
from syncd.safe_open import open_read
from syncd.transports.base import WeightDirectory

_MAX_CONFIG = 1 << 20


def require_adapter(target: WeightDirectory) -> dict[str, Any]:
    """Return an adapter's configuration once its two files are there, the weights as the manifest has them."""
    if target.shards and ADAPTER not in {shard.name for shard in target.shards}:
        raise RefusedError(
            f"the manifest of version {target.label} has no {ADAPTER}", path=target.path, hint="syncd ls JOB"
        )
    if not os.path.isfile(f"{target.path}/{ADAPTER}"):
        raise RefusedError(f"{ADAPTER} does not exist", path=target.path, hint="syncd verify JOB STEP --deep")
    config = f"{target.path}/{ADAPTER_CONFIG}"
    document = _document_of(config)
    if document.get("peft_type") != "LORA":
        raise RefusedError("peft_type is not LORA", path=config, hint="save the adapter with peft")
    return document


def _document_of(path: str) -> dict[str, Any]:
    try:
        with open(open_read(path), "rb") as file:
            document = json.loads(file.read(_MAX_CONFIG))
    except (OSError, ValueError, RecursionError) as error:
        raise RefusedError(
            f"it cannot be read: {error}", path=path, hint="syncd verify JOB STEP --deep"
        ) from error
    if not isinstance(document, dict):
        raise RefusedError("it is not a JSON object", path=path, hint="syncd verify JOB STEP --deep")
    return document


class BaseCheck:
    """Compares the model that an adapter belongs to with the one that an engine was started with.

    Args:
        find: Returns the directory of the engine's model on this host, empty if it is not known here. It is called
            for each adapter, because an engine may be restarted; the digest of a directory is computed once.
    """

    def __init__(self, find: Callable[[], str]) -> None:
        self._find = find
        self._digests: dict[str, str | None] = {}

    def require(self, target: WeightDirectory) -> None:
        """Refuse an adapter that belongs to another model; nothing is compared where one of the two is not known."""
        directory = self._find() if target.base is not None else ""
        if target.base is None or not directory:
            return
        if directory not in self._digests:
            self._digests[directory] = _digest_of(directory)
        digest = self._digests[directory]
        if digest is not None and digest != target.base.digest:
            raise RefusedError(
                f"the adapter belongs to {target.base.model} ({target.base.digest}), and the engine runs {digest}",
                path=directory,
                hint=f"start the engine with the model that the trainer has as {target.base.model}",
            )


def _digest_of(directory: str) -> str | None:
    try:
        return model_digest(LocalDisk(), directory)
    except (SyncdError, OSError):  # not here, not in safetensors
        return None
