"""Settings and helpers that all hooks of engines behind HTTP share."""

import hashlib
import ipaddress
import json
import os
import re
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import ClassVar

from explorer_hooks.hook import HookOptions, ProbingHook
from explorer_hooks.hooks.phases import restoring
from explorer_hooks.hooks.settings import HookSettings
from explorer_hooks.http_client import HttpClient, is_loopback
from syncd.errors import ConfigError, EngineUnreachableError

LOOPBACK = "127.0.0.1"

_UNAVAILABLE = 503


class PathMap:
    """Translates paths of this host to those of an engine elsewhere, by `HERE:THERE`; empty if both are the same."""

    def __init__(self, text: str) -> None:
        here, colon, there = text.partition(":")
        if text and not (colon and here.startswith("/") and there.startswith("/") and ":" not in there):
            raise ConfigError(f"path_map={text} is not two paths", hint="path_map=/here:/there")
        self._here, self._there = here.rstrip("/"), there.rstrip("/")

    def here(self, path: str) -> str:
        return _replaced(path, self._there, self._here)

    def there(self, path: str) -> str:
        """Return the engine's path of a directory, absolute since the engine has another working directory."""
        return _replaced(os.path.abspath(path), self._here, self._there)


class ServerHook(ProbingHook):
    """The base of hooks for a server behind HTTP, by default at the engine's usual address on this host.

    Settings of all of them: `ask_timeout`; `path_map`, HERE:THERE; `probe`: whether it is asked for log-probs.
    """

    default_address: ClassVar[str]
    health_path: ClassVar[str] = "/health"
    missing: ClassVar[str]
    """The hint if the server does not know a path."""

    def __init__(self, options: HookOptions) -> None:
        settings = HookSettings(self.name, options.settings)
        self._server = HttpClient(
            options.address or self.default_address,
            token=options.token,
            timeout=options.timeout,
            ask_timeout=settings.seconds("ask_timeout", 10.0),
            missing=self.missing,
        )
        self._paths = PathMap(settings.text("path_map", ""))
        if not settings.flag("probe", default=True):
            self.probes = ""
        self._configure(settings)
        settings.done()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._server.address})"

    @classmethod
    def from_options(cls, options: HookOptions) -> ProbingHook:
        return cls(options)

    def _restoring(self, label: str, hint: str) -> AbstractContextManager[None]:
        """Restore the engine to a version in the block, which raises `EngineDeadError` if it fails."""
        return restoring(f"the engine cannot be restored to {label}", hint, self._server.address)

    def has_ended(self) -> bool | None:
        """Return whether nobody listens at the address any more, or the server says that its engine is dead."""
        try:
            return self._server.get_any(self.health_path).status == _UNAVAILABLE
        except EngineUnreachableError as error:
            return isinstance(error.__cause__, ConnectionRefusedError)
        except ConfigError:
            return False

    @abstractmethod
    def engine_kind(self) -> str:
        """Return the engine's product and release, and those of its flags that it tells of."""

    def _kind_of(self, product: str, version: object, flags: Mapping[str, object]) -> str:
        """Return a kind of engine by flags that a restart does not change."""
        text = json.dumps(flags, sort_keys=True, default=str)
        return f"{product} {version}, flags {hashlib.sha256(text.encode()).hexdigest()[:12] if flags else 'unknown'}"

    @abstractmethod
    def _configure(self, settings: HookSettings) -> None:
        """Read the settings of this hook."""


def meeting_address(settings: HookSettings, server: HttpClient) -> str | None:
    """Return this host's address at which an engine's workers join a group, None if it takes no broadcasts.

    The default is the loopback address for an engine on this host; for any other the setting `broadcast` names it.
    """
    value = settings.text("broadcast", "true")
    if value == "false":
        return None
    if value == "true":
        return LOOPBACK if is_loopback(server.host) else None
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        raise ConfigError(
            f"broadcast={value} is neither true, false nor an address of this host",
            hint="broadcast=10.0.0.5, an address of this host that the engine reaches",
        ) from None


def push_ways(settings: HookSettings, server: HttpClient) -> tuple[str, ...]:
    """Return how weights in this process's memory reach an engine's workers, the best way first.

    `ipc` is for an engine on this host. `auto` tries it there, and falls back to `gloo`. It never chooses `nccl`, for
    which this process needs a GPU.
    """
    value = settings.choice("push", "auto", ("auto", "ipc", "gloo", "nccl"))
    is_here = is_loopback(server.host)
    if value == "ipc" and not is_here:
        raise ConfigError(
            f"push=ipc shares memory with the engine, and {server.address} is not an address of this host's loopback",
            hint="push=gloo, or the engine's address as http://127.0.0.1:PORT",
        )
    if value == "auto":
        return ("ipc", "gloo") if is_here else ("gloo",)
    return (value,)


def is_at_least(version: object, lowest: tuple[int, ...]) -> bool:
    """Return whether an engine's release is at least the lowest; one that cannot be parsed counts as new."""
    numbers = leading_numbers(version)
    return not numbers or numbers >= lowest


def leading_numbers(version: object) -> tuple[int, ...]:
    """Return the numbers that a release begins with: (0, 32, 0) of 0.32.0rc1+cpu; none if it is no release."""
    match = re.match(r"\d+(\.\d+){0,2}", str(version), re.ASCII)
    parts = tuple(map(int, match[0].split("."))) if match else ()
    # A build of a branch without tags calls itself 0.1.dev<N>.
    return () if "dev" in str(version) and parts[:2] == (0, 1) else parts


def _replaced(path: str, old: str, new: str) -> str:
    """Return a path with another beginning; the empty one is the root's, below which every absolute path is."""
    if old and path == old:
        return new or "/"
    return new + path[len(old) :] if path.startswith(f"{old}/") else path
