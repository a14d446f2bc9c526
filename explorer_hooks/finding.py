"""Finds hooks by name, and a user's own code by import path.

`vllm=http://127.0.0.1:8000` is the hook that an installed package registers as `vllm`.
"""

import difflib
import importlib
import os
import shlex
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from operator import attrgetter
from typing import Any
from urllib.parse import urlsplit

from explorer_hooks.hook import Hook, HookOptions
from syncd.errors import ConfigError
from syncd.extras import install_command
from syncd.registered import registered

GROUP = "syncd.hooks"

FORM = "package.module:attribute"  # how an import path is written


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
        timeout: Seconds that one request, load or command may take.
        token: A bearer token or signing key.
    """
    name, _, address = text.partition("=")
    options = HookOptions(address or None, argv, dict(settings or {}), timeout, token)
    return _hook_class(name).from_options(options)


def installed_hooks() -> list[str]:
    return list(registered(GROUP))


def shown(text: str) -> str:
    """Return NAME=ADDRESS as it may be logged and published: without credentials, paths, queries, arguments."""
    name, _, address = text.partition("=")
    public = _public(address)
    return f"{name}={public}" if public else name


def imported(path: str) -> Any:
    """Return what an import path names: a module, or its attribute. The current directory is searched last."""
    module_name, _, attribute = path.partition(":")
    if not all(
        part.isidentifier() for part in (*module_name.split("."), *attribute.split(".")) if path and part
    ):
        raise ConfigError(f"not an import path: {path!r}", hint=f"write {FORM}")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(f"cannot import {module_name}: {type(error).__name__}: {error}") from error
    try:
        return attrgetter(attribute)(module) if attribute else module
    except AttributeError:
        raise ConfigError(f"{module_name} has no {attribute}", hint=f"write {FORM}") from None


def _public(address: str) -> str:
    parts = urlsplit(address)
    if parts.scheme and parts.netloc:  # not a command with a URL among its arguments
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    try:
        return next(iter(shlex.split(address)), "")
    except ValueError:
        return ""


def _hook_class(name: str) -> type[Hook]:
    entry = registered(GROUP).get(name)
    if entry is None:
        installed = installed_hooks()
        near = difflib.get_close_matches(name, installed, 1)
        raise ConfigError(
            f"there is no hook {name[:80]!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
            hint=f"installed: {', '.join(installed) or 'none'}",
        )
    return _imported_class(entry)


def _imported_class(entry: EntryPoint) -> type[Hook]:
    try:
        loaded = entry.load()
    except Exception as error:  # torch raises OSError without its libraries
        hint = install_command("transformers" if entry.name == "transformers" else "explorer")
        raise ConfigError(f"hook {entry.name} cannot be imported: {error}", hint=hint) from error
    if not (isinstance(loaded, type) and issubclass(loaded, Hook)):
        raise ConfigError(f"{entry.value} is not a hook", hint="derive it from explorer_hooks.hook.Hook")
    return loaded
