"""What all engines behind HTTP share that take weights in place, between a pause and a resume.

An engine is left alone in one of three states: it works; it is paused with weights that are whole; it is paused with
weights that nobody knows. The hook never resumes the third: it loads what is good first.
"""

import contextlib
import ipaddress
import json
import os
from abc import abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from explorer_hooks.engine_push.delivery import Delivery, Link
from explorer_hooks.hook import Hook, HookOptions, Running
from explorer_hooks.hooks.settings import Settings
from explorer_hooks.hooks.start_check import Start, refuse_misfit, start_of
from explorer_hooks.http_client import Server
from syncd.errors import (
    ConfigError,
    EngineDeadError,
    EngineUnreachableError,
    LoadFailedError,
    RefusedError,
    SyncdError,
)
from syncd.protocol.version import is_unpublished
from syncd.safe_open import open_read
from syncd.transports.base import WeightDirectory
from syncd.transports.tensors import Tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

MAX_DOCUMENT = 1 << 20

UNTOLD = "default"
"""What an engine says that was never told a version."""

_LOOPBACK = "127.0.0.1"


class UntouchedError(LoadFailedError):
    """The engine said no before it had written anything."""


class Ahead(NamedTuple):
    """What an engine runs that no manifest stands behind yet.

    Args:
        told: What the engine calls it: no follower that comes later takes this for a version.
        label: What it is called here: the same, and once it is published the label of its files.
    """

    told: str
    label: str


class ServedHook(Hook):
    """An engine behind HTTP that is paused, loaded, told its version and resumed.

    Args:
        server: Where the engine listens.
        paths: How its paths differ from those of this host.
        start_check: How closely a version is compared with what the engine was started from.
        address: The address of this host on which the engine's workers meet it, for weights that come by a
            broadcast; None: they come from files alone.
    """

    restart_hint: str
    """What to do about an engine that is dead."""

    def __init__(
        self, server: Server, paths: "PathMap", start_check: str = "full", address: str | None = None
    ) -> None:
        self._server = server
        self._paths = paths
        self._start_check = start_check
        self._address = address
        self._ahead: Ahead | None = None
        self._start: Start | None = None
        self._touched = False
        self._paused_by_us = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._server.address})"

    @abstractmethod
    def _check_engine(self) -> None:
        """Check that the engine is one that can be driven."""

    @abstractmethod
    def _started_from(self) -> str | None:
        """Return the directory of the weights that the engine has, as far as it says."""

    @abstractmethod
    def _pause(self) -> None:
        """Have the engine stop at a whole token."""

    @abstractmethod
    def _reload(self, target: WeightDirectory) -> None:
        """Have the engine read a directory; it is paused."""

    @abstractmethod
    def _announce(self, label: str) -> None:
        """Drop what the old weights left in caches, tell the engine its version; it is paused."""

    @abstractmethod
    def _tell_version(self, label: str) -> None:
        """Tell the engine what it is to call its weights; it works meanwhile."""

    @abstractmethod
    def _delivery(self, link: Link) -> Delivery:
        """Return a way for weights in memory into the engine."""

    @abstractmethod
    def _resume(self) -> None:
        """Have the engine work again."""

    def prepare(self, target: WeightDirectory) -> None:
        """Check the kind, the directory and the engine; the engine is not touched."""
        refuse_unfit(self, target)
        self._check_engine()
        if self._start_check != "off":
            self._check_start(target)

    def load(self, target: WeightDirectory) -> None:
        """Pause the engine and have it read the directory; it stays paused."""
        self._hold()
        self._reload_touching(target)

    def commit(self, target: WeightDirectory) -> None:
        """Reset caches, tell the version, resume."""
        self._announce(target.label)
        self._resume()
        self._touched = self._paused_by_us = False
        self._ahead = None

    def no_broadcasts(self) -> str:
        """Say why weights in this process's memory cannot be handed to the engine, nothing if they can."""
        return "" if self._address else "the engine is on another host, or broadcast=false"

    def check_offered(self, tensors: Tensors) -> None:
        """Compare what a broadcast brings with what the engine was started from.

        Raises:
            RefusedError: It does not fit.
            EngineUnreachableError: The engine does not answer.
        """
        if self._start_check != "off":
            self._refuse_misfit(tensors, "the broadcast")

    def take(self, told: str, tensors: "Mapping[str, torch.Tensor]") -> None:
        """Have the engine run weights that are in this process's memory, before they are published.

        Args:
            told: What they are called until then (`base.unpublished_label`).
            tensors: All of them by name.

        Raises:
            UntouchedError: The engine took nothing; it goes on with what it ran.
            LoadFailedError: It is paused, and nobody knows its weights, until a version is loaded or `abort`.
            EngineUnreachableError: It does not answer.
        """
        self._hold()
        delivery = self._delivery(Link(self._address or _LOOPBACK, self._server.timeout))
        try:
            with contextlib.closing(delivery):
                delivery.open()
                delivery.push(told, tensors)
        except (SyncdError, OSError) as error:
            self._touched = self._touched or delivery.touched
            if isinstance(error, EngineUnreachableError):
                raise
            raise self._not_taken(error) from error
        self._touched = True
        self._announce(told)
        self._ahead = Ahead(told, told)
        self._resume()
        self._touched = self._paused_by_us = False

    def own(self, label: str) -> None:
        """Have the engine say the label of what it has taken, which is published by now."""
        if self._ahead is not None:
            self._ahead = Ahead(self._ahead.told, label)
            self._tell_version(label)

    def disown(self) -> None:
        """Say that what the engine has taken is no version of the job."""
        self._ahead = None

    def abort(self, last_good: WeightDirectory | None) -> None:
        """Have the engine on the last good version, working, or say that it is dead."""
        running = self.current_version()
        if self._is_whole(running, last_good):
            self._let_go(running)
            return
        if last_good is None:
            raise EngineDeadError(
                "the engine is half loaded and there is no last good version",
                path=self._server.address,
                hint=self.restart_hint,
            )
        self._bring_back(last_good)

    def _check_start(self, target: WeightDirectory) -> None:
        tensors = target.tensors
        if (
            not tensors and not target.shards
        ):  # a directory that no manifest lists: the model that a run began with
            found = start_of(target.path)
            tensors = found.tensors if found else {}
        self._refuse_misfit(tensors, target.path)

    def _refuse_misfit(self, tensors: Tensors, where: str) -> None:
        if self._start is None:
            directory = self._started_from()
            self._start = start_of(self._paths.here(directory)) if directory else None
        if self._start is not None:
            refuse_misfit(tensors, self._start, self._start_check, where)

    def _running(self, told: str, *, paused: bool) -> Running:
        """Return what an engine's own words stand for.

        What it has taken before it was published is known here alone, until it is disowned. Else nobody can say
        what such an engine runs, and it counts as one that takes no work.
        """
        ahead = self._ahead
        if ahead is not None and told == ahead.told:
            return Running(ahead.label, paused)
        if is_unpublished(told):
            return Running(told, paused=True)
        return Running(None if told == UNTOLD else told, paused)

    def _not_taken(self, error: SyncdError | OSError) -> SyncdError:
        """Return what to raise where the engine did not take weights; one that is whole works again."""
        message, hint = str(error), None
        if isinstance(error, SyncdError):
            message, hint = error.message, error.hint
        if self._touched:
            return LoadFailedError(message, path=self._server.address, hint=hint)
        try:
            self._let_go(Running(None, paused=True))
        except SyncdError as other:
            return other
        return UntouchedError(message, path=self._server.address, hint=hint)

    def _hold(self) -> None:
        """Pause the engine, and remember whether it had been left paused by somebody else."""
        if not self.current_version().paused:
            self._paused_by_us = True
        self._pause()

    def _reload_touching(self, target: WeightDirectory) -> None:
        before, self._touched = self._touched, True
        try:
            self._reload(target)
        except UntouchedError:
            self._touched = before
            raise

    def _is_whole(self, running: Running, last_good: WeightDirectory | None) -> bool:
        """Return whether what the engine holds is known and is what it should hold."""
        if last_good is not None and running.label != last_good.label:
            return False
        if self._touched:
            # Only a restart takes the pause of a load away, and the labels with it.
            return last_good is None and running == Running(None)
        return self._paused_by_us or not running.paused

    def _let_go(self, running: Running) -> None:
        if running.paused:
            self._resume()
        self._touched = self._paused_by_us = False

    def _bring_back(self, last_good: WeightDirectory) -> None:
        try:
            self._pause()
            self._reload_again(last_good)
            self._announce(last_good.label)
            self._resume()
        except LoadFailedError as error:
            raise EngineDeadError(
                f"the engine cannot go back to {last_good.label}: {error.message}",
                path=self._server.address,
                hint=self.restart_hint,
            ) from error
        self._touched = self._paused_by_us = False

    def _reload_again(self, last_good: WeightDirectory) -> None:
        """Load twice: the first may be mixed with what the failed load had buffered, the second is not."""
        with contextlib.suppress(LoadFailedError):
            self._reload_touching(last_good)
        self._reload_touching(last_good)


class PathMap:
    """Where the engine sees a directory of this host, such as in a container.

    Args:
        text: `HERE:THERE`, or nothing if both are the same.

    Raises:
        ConfigError: It is not two absolute paths.
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
        """Return the engine's path of a directory; it is absolute, since the engine has another working directory."""
        return _replaced(os.path.abspath(path), self._here, self._there)


def _replaced(path: str, old: str, new: str) -> str:
    is_below = bool(old) and (path == old or path.startswith(f"{old}/"))
    return new + path[len(old) :] if is_below else path


def refuse_unfit(hook: Hook, target: WeightDirectory) -> None:
    """Check what can be known without the engine: the kind and the directory.

    Raises:
        RefusedError: The hook does not load such versions, or a file is not there.
    """
    kind = target.version.kind
    if kind not in hook.kinds:
        loads = ", ".join(sorted(hook.kinds))
        raise RefusedError(
            f"version {target.label} is of kind {kind}, and the hook {hook.name} loads {loads}",
            hint="use the hook that fits what the trainer publishes",
        )
    if not os.path.isdir(target.path):
        raise RefusedError(
            f"the directory of version {target.label} is not on this host", path=target.path, hint="syncd ls"
        )
    for shard in target.shards:
        refuse_wrong_size(f"{target.path}/{shard.name}", shard.size)


def refuse_wrong_size(path: str, size: int) -> None:
    """Check that a file is there with its size: engines are damaged by what is missing or cut off.

    Raises:
        RefusedError: It is not.
    """
    try:
        found = os.stat(path).st_size
    except OSError as error:
        raise RefusedError(
            f"a file of the version cannot be read: {error.strerror}", path=path, hint="syncd verify --deep"
        ) from error
    if found != size:
        raise RefusedError(f"it has {found} bytes instead of {size}", path=path, hint="syncd verify --deep")


def floor(version: object, lowest: tuple[int, ...]) -> bool:
    """Return whether a version that an engine tells is at least the lowest; what cannot be read counts as new."""
    numbers = leading_numbers(version)
    return not numbers or numbers >= lowest


def leading_numbers(version: object) -> tuple[int, ...]:
    """Return the numbers that a version begins with: (0, 32, 0) of 0.32.0rc1+cpu; none of what is no release."""
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


def document_of(path: str) -> dict[str, object]:
    """Return a JSON object of a small file.

    Raises:
        RefusedError: It cannot be read or is something else.
    """
    try:
        with open(open_read(path), "rb") as file:
            document = json.loads(file.read(MAX_DOCUMENT))
    except (OSError, ValueError, RecursionError) as error:
        raise RefusedError(f"it cannot be read: {error}", path=path, hint="syncd verify --deep") from error
    if not isinstance(document, dict):
        raise RefusedError("it is not a JSON object", path=path, hint="syncd verify --deep")
    return document


def server_settings(
    settings: Settings, options: HookOptions, default: str, missing: str
) -> tuple[Server, PathMap]:
    """Return the server and the paths that the options which all engines behind HTTP share stand for.

    Args:
        settings: The hook's settings.
        options: What the hook was given.
        default: The address where none was given.
        missing: The hint where the server does not know a path.

    Raises:
        ConfigError: One of them is not usable.
    """
    server = Server(
        options.address or default,
        token=options.token,
        timeout=options.timeout,
        ask_timeout=settings.seconds("ask_timeout", 10.0),
        missing=missing,
    )
    return server, PathMap(settings.text("path_map", ""))


def meeting_address(settings: Settings, server: Server) -> str | None:
    """Return the address on which an engine's workers meet this process, None where broadcasts are not taken.

    An engine on this host's loopback is met there; for any other one the address has to be given.

    Raises:
        ConfigError: What was given is none.
    """
    given = settings.text("broadcast", "true")
    if given == "false":
        return None
    if given == "true":
        return _LOOPBACK if server.host in ("localhost", "::1") or server.host.startswith("127.") else None
    try:
        return str(ipaddress.ip_address(given))
    except ValueError:
        raise ConfigError(
            f"broadcast={given} is neither true, false nor an address of this host",
            hint="broadcast=10.0.0.5, an address of this host that the engine reaches",
        ) from None
