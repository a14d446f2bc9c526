"""Settings and helpers that all hooks of engines behind HTTP share."""

import ipaddress
import os

from explorer_hooks.hook import HookOptions, HookSettings
from explorer_hooks.http_client import HttpClient
from syncd.errors import ConfigError

LOOPBACK = "127.0.0.1"


class PathMap:
    """Translates paths between this host and an engine that sees them elsewhere, such as in a container.

    Args:
        text: `HERE:THERE`, empty if both are the same.

    Raises:
        ConfigError: The text is not two absolute paths.
    """

    def __init__(self, text: str) -> None:
        here, colon, there = text.partition(":")
        if text and not (colon and here.startswith("/") and there.startswith("/") and ":" not in there):
            raise ConfigError(f"path_map={text} is not two paths", hint="path_map=/here:/there")
        self._here, self._there = here.rstrip("/"), there.rstrip("/")

    def here(self, path: str) -> str:
        """Return this host's path of a directory of the engine."""
        return _replaced(path, self._there, self._here)

    def there(self, path: str) -> str:
        """Return the engine's path of a directory, absolute since the engine has another working directory."""
        return _replaced(os.path.abspath(path), self._here, self._there)


def server_settings(
    settings: HookSettings, options: HookOptions, default: str, missing: str
) -> tuple[HttpClient, PathMap]:
    """Return the server and the path map that a hook's address and settings name.

    Args:
        settings: The hook's settings.
        options: The hook's options.
        default: The address if none was given.
        missing: The hint if the server does not know a path.

    Raises:
        ConfigError: One of them is wrong.
    """
    server = HttpClient(
        options.address or default,
        token=options.token,
        timeout=options.timeout,
        ask_timeout=settings.seconds("ask_timeout", 10.0),
        missing=missing,
    )
    return server, PathMap(settings.text("path_map", ""))


def meeting_address(settings: HookSettings, server: HttpClient) -> str | None:
    """Return this host's address at which an engine's workers join a group, None if it takes no broadcasts.

    The default is the loopback address for an engine on this host; for any other the setting `broadcast` names it.

    Raises:
        ConfigError: The setting is not an address.
    """
    given = settings.text("broadcast", "true")
    if given == "false":
        return None
    if given == "true":
        return LOOPBACK if server.host in ("localhost", "::1") or server.host.startswith("127.") else None
    try:
        return str(ipaddress.ip_address(given))
    except ValueError:
        raise ConfigError(
            f"broadcast={given} is neither true, false nor an address of this host",
            hint="broadcast=10.0.0.5, an address of this host that the engine reaches",
        ) from None


def is_at_least(version: object, lowest: tuple[int, ...]) -> bool:
    """Return whether an engine's release is at least the lowest; one that cannot be parsed counts as new."""
    numbers = leading_numbers(version)
    return not numbers or numbers >= lowest


def leading_numbers(version: object) -> tuple[int, ...]:
    """Return the numbers that a release begins with: (0, 32, 0) of 0.32.0rc1+cpu; none if it is no release."""
    parts: list[int] = []
    for part in str(version).split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
        if digits != part:
            break
    # A build of a branch without tags calls itself 0.1.dev<N>.
    return () if "dev" in str(version) and parts[:2] == [0, 1] else tuple(parts)


def _replaced(path: str, old: str, new: str) -> str:
    is_below = bool(old) and (path == old or path.startswith(f"{old}/"))
    return new + path[len(old) :] if is_below else path
