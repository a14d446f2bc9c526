"""Hooks by name: `vllm=http://127.0.0.1:8000` is the hook that an installed package registers as `vllm`."""

import difflib
import importlib.metadata
import shlex
from collections.abc import Mapping
from urllib.parse import urlsplit

from explorer_hooks.hook import Hook, HookOptions
from syncd.errors import ConfigError

GROUP = "syncd.hooks"


def open_hook(
    text: str,
    *,
    argv: tuple[str, ...] = (),
    settings: Mapping[str, str] | None = None,
    timeout: float = 300.0,
    token: str | None = None,
) -> Hook:
    """Return the hook for an engine.

    Args:
        text: NAME or NAME=ADDRESS.
        argv: A command, for hooks that run one.
        settings: What the hook documents, by key.
        timeout: Seconds that one request, load or command may take.
        token: A bearer token or signing key.

    Raises:
        ConfigError: No installed hook has the name, it cannot be imported, or the options do not fit it.
    """
    name, _, address = text.partition("=")
    options = HookOptions(address or None, argv, dict(settings or {}), timeout, token)
    return _class_of(name).from_options(options)


def shown(text: str) -> str:
    """Return NAME=ADDRESS as it may be logged and published: without credentials, paths, queries, arguments."""
    name, _, address = text.partition("=")
    public = _public(address)
    return f"{name}={public}" if public else name


def _public(address: str) -> str:
    if "://" in address:
        parts = urlsplit(address)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    try:
        return next(iter(shlex.split(address)), "")
    except ValueError:
        return ""


def _class_of(name: str) -> type[Hook]:
    found = importlib.metadata.entry_points(group=GROUP)
    entry = next((one for one in found if one.name == name), None)
    if entry is None:
        known = sorted(one.name for one in found)
        near = difflib.get_close_matches(name, known, 1)
        raise ConfigError(
            f"there is no hook {name[:80]!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
            hint=f"installed: {', '.join(known) or 'none'}",
        )
    return _loaded(entry)


def _loaded(entry: importlib.metadata.EntryPoint) -> type[Hook]:
    try:
        loaded = entry.load()
    except (ImportError, AttributeError) as error:
        hint = "pip install 'syncd[transformers]'" if entry.name == "transformers" else "pip install syncd"
        raise ConfigError(f"hook {entry.name} cannot be imported: {error}", hint=hint) from error
    if not (isinstance(loaded, type) and issubclass(loaded, Hook)):
        raise ConfigError(f"{entry.value} is not a hook", hint="derive it from explorer_hooks.hook.Hook")
    return loaded
