"""reload=restart: the hook owns its server, and starts it on the directory of each version.

For engines that load a model correctly when they start and wrongly when they read weights again. The server is first
started on the start model. If it ends, or has not answered for `start_timeout`, the next question to it starts it
there again; the follower then finds an engine without a version, and loads the newest.
"""

import os
import re
import shlex
import shutil
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from explorer_hooks.hook import HookOptions, ProbeAnswer, ProbingHook, Running
from explorer_hooks.hooks.http_settings import ServerHook
from explorer_hooks.hooks.phases import LoadState
from explorer_hooks.hooks.server_process import ServerProcess
from explorer_hooks.hooks.settings import HookSettings
from explorer_hooks.http_client import is_loopback
from syncd.errors import ConfigError, EngineUnreachableError, LoadFailedError, RefusedError
from syncd.protocol.version import UNKNOWN_LABEL
from syncd.transports.base import WeightDirectory, WeightTensors

WAYS = ("in_place", "restart")
"""How a server gets new weights: it reads them while requests wait, or it is started on them."""

OWN = ("start_model", "start_timeout", "stop_timeout", "server_log")
"""The settings of a server that is started here."""

_PLACEHOLDER = re.compile(r"\{(model|host|port)\}")
_HINT = (
    "--hook vllm=http://127.0.0.1:8000 --hook-option reload=restart --hook-option start_model=DIR -- COMMAND"
)
_TICK = 0.25  # seconds between two questions to a server that starts


class RestartableHook(ServerHook):
    """A hook for a server that can be started on a version in the place of a reload."""

    is_restarted = False
    """Whether the server is started on each version, so that it never reads weights again."""

    @classmethod
    def from_options(cls, options: HookOptions) -> ProbingHook:
        """Return a hook for the server at the address; with `reload=restart`, one that owns the server."""
        settings = dict(options.settings)
        way = settings.pop("reload", WAYS[0])
        if way not in WAYS:
            raise ConfigError(
                f"reload={way} of the hook {cls.name}", hint=f"reload is one of {', '.join(WAYS)}"
            )
        own = {key: settings.pop(key) for key in OWN if key in settings}
        if way == "restart":
            return RestartingHook(
                cls(replace(options, settings=settings)), RestartOptions.read(cls.name, own, options)
            )
        if own or options.argv:
            unused = ", ".join(own) or "the command behind --"
            raise ConfigError(f"{unused}: the hook {cls.name} starts no server", hint=_HINT)
        return cls(replace(options, settings=settings))

    @abstractmethod
    def require_up(self) -> None:
        """Return if the server answers."""

    @property
    def address(self) -> tuple[str, int]:
        return self._server.host, self._server.port


@dataclass(frozen=True, slots=True)
class RestartOptions:
    # The command; `{model}` is replaced by the directory to load, `{host}` and `{port}` by the address's.
    argv: tuple[str, ...]
    start_model: str  # the directory that is loaded before the first version
    start_timeout: float  # seconds in which it must answer
    stop_timeout: float  # seconds that it has to end by itself
    log: str | None  # a file for its output; None for the follower's standard error

    @classmethod
    def read(cls, hook: str, own: dict[str, str], options: HookOptions) -> "RestartOptions":
        settings = HookSettings(hook, own)
        model, log = settings.text("start_model", ""), settings.text("server_log", "")
        start, stop = settings.seconds("start_timeout", 600.0), settings.seconds("stop_timeout", 30.0)
        settings.done()
        argv = options.argv
        if not any("{model}" in word for word in argv):
            shown = shlex.join(argv)[:80] or "no command"
            raise ConfigError(f"reload=restart needs a command with {{model}}, not {shown!r}", hint=_HINT)
        if shutil.which(argv[0]) is None:
            raise ConfigError(f"there is no program {argv[0]}", hint="echo $PATH")
        if not model:
            raise ConfigError(
                "reload=restart needs start_model, the model before the first version", hint=_HINT
            )
        return cls(argv, model, start, stop, log or None)

    def command(self, model: str, host: str, port: int) -> list[str]:
        values = {"model": model, "host": host, "port": str(port)}
        return [_PLACEHOLDER.sub(lambda match: values[match[1]], word) for word in self.argv]


class RestartingHook(ProbingHook):
    name: ClassVar[str] = "restart"
    is_own: ClassVar[bool] = True

    def __init__(self, inner: RestartableHook, options: RestartOptions) -> None:
        host, port = inner.address
        if not is_loopback(host):
            raise ConfigError(
                f"a server at {host} cannot be started from here", hint="--hook vllm=http://127.0.0.1:8000"
            )
        self._inner, self.options, self._host, self._port = inner, options, host, port
        inner.is_restarted, inner.asks_cache = (
            True,
            False,
        )  # a server that was just started has an empty cache
        self.probes = inner.probes
        self._process = ServerProcess(options.stop_timeout, options.log)
        self._lock = threading.Lock()  # held while the process is replaced, but not while one is waited for
        self._state = LoadState()
        self._busy = ""
        """What is being loaded, empty if nothing is. Only the loading thread sets it."""
        self._is_named = True
        """Whether the server has the label of what it was started on; the start model has none."""
        self._answered_at = 0.0

    def __repr__(self) -> str:
        return f"RestartingHook({self._inner!r})"

    @classmethod
    def from_options(cls, options: HookOptions) -> "RestartingHook":
        """Refuse: it is opened by the hook of the server."""
        raise ConfigError(f"a server is restarted by its own hook, not at {options.address}", hint=_HINT)

    def prepare(self, target: WeightDirectory) -> None:
        """Have the server's hook check it; refuse a version that no server can be started on."""
        self._inner.prepare(target)
        if not os.path.isfile(f"{target.path}/config.json"):
            raise RefusedError(
                "no server starts on a version without its model's configuration",
                path=f"{target.path}/config.json",
                hint="publish config.json and the tokenizer beside the weights, as `trainer train` does",
            )
        self._state.prepare()

    def load(self, target: WeightDirectory) -> None:
        """Stop the server and start it on the version; it gets no work until `commit`."""
        self._state.load()
        self._replace(target.path, target.label)

    def commit(self, target: WeightDirectory) -> None:
        self._name(target.label)
        self._state.commit()

    def probe(
        self, target: WeightDirectory | WeightTensors | None, tokens: Sequence[Sequence[int]]
    ) -> ProbeAnswer:
        return self._inner.probe(target, tokens)

    def start_directory(self) -> str:
        return self.options.start_model if os.path.isdir(self.options.start_model) else ""

    def end_exam(self) -> bool:
        self._replace(self.options.start_model, "the start model")
        self._is_named = True
        self._state.restored()
        return True

    def dtype(self) -> str | None:
        return self._inner.dtype()

    def has_ended(self) -> bool | None:
        return not self._process.is_running or self._inner.has_ended()

    def engine_kind(self) -> str:
        return self._inner.engine_kind()

    def rounding(self) -> str:
        return self._inner.rounding()

    def current_version(self) -> Running:
        """Return what the server runs; start one if there is none. Any thread may call this."""
        if self._busy:
            raise EngineUnreachableError(f"the server is being started on {self._busy}")
        self._revive()
        try:
            self._inner.require_up()
            running = self._inner.current_version()
        except EngineUnreachableError:
            self._give_up_silent()
            raise
        self._answered_at = time.monotonic()
        return running if self._is_named else Running(UNKNOWN_LABEL, paused=True)

    def abort(self, last_good: WeightDirectory | None) -> None:
        """Start the server on the last good version; without one, on the start model."""
        if not self._state.touched and self._process.is_running:
            return
        with self._state.restoring("see the log of the server, then start the follower again"):
            if last_good is None:
                self._replace(self.options.start_model, "the start model")
                self._is_named = True
            else:
                self._replace(last_good.path, last_good.label)
                self._name(last_good.label)

    def close(self) -> None:
        with self._lock:
            self._process.stop()
        self._inner.close()

    def _name(self, label: str) -> None:
        self._inner.mark(label)
        self._is_named = True

    def _replace(self, model: str, label: str) -> None:
        self._busy = label
        try:
            with self._lock:
                self._is_named = False
                self._start(model)
            self._await(label)
        except EngineUnreachableError as error:
            raise LoadFailedError(error.message, hint=error.hint) from error
        finally:
            self._busy = ""

    def _await(self, label: str) -> None:
        until = time.monotonic() + self.options.start_timeout
        while True:
            if not self._process.is_running:
                raise LoadFailedError(f"the server, started on {label}, {self._process.end}")
            if self._is_up():
                break
            if time.monotonic() > until:
                raise LoadFailedError(
                    f"the server, started on {label}, did not answer for {self.options.start_timeout:g} s",
                    hint="its log has the reason; a longer start_timeout if it needs more time",
                )
            time.sleep(_TICK)
        self._answered_at = time.monotonic()

    def _is_up(self) -> bool:
        try:
            self._inner.require_up()
        except EngineUnreachableError:
            return False
        return True

    def _revive(self) -> None:
        with self._lock:
            if self._process.is_running or self._busy:
                return
            end = self._process.end
            self._start(self.options.start_model)
            self._is_named = True
        why = f"the server {end}, and is started again" if end else "the server is starting"
        raise EngineUnreachableError(why)

    def _give_up_silent(self) -> None:
        with self._lock:
            if not self._busy and time.monotonic() - self._answered_at > self.options.start_timeout:
                self._process.stop()

    def _start(self, model: str) -> None:
        if not self._process.stop():
            raise EngineUnreachableError("the server does not end, not even by SIGKILL", hint="ps -ef")
        if is_taken(self._host, self._port):
            raise EngineUnreachableError(
                f"port {self._port} of {self._host} is in use by another process",
                hint=f"ss -ltnp 'sport = :{self._port}'",
            )
        self._process.start(self.options.command(model, self._host, self._port))
        self._answered_at = time.monotonic()


def is_taken(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False
