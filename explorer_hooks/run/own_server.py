"""A server that `explorer run` starts on the job's start model, and stops when it ends itself.

For `reload = "in_place"` with a command: the server then reads each version as one that somebody else started. With
`reload = "restart"` the hook starts it (`explorer_hooks/hooks/restarting.py`).
"""

import shlex
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import structlog

from explorer_hooks.hook import HookOptions
from explorer_hooks.hooks.restarting import OWN, RestartOptions, is_taken
from explorer_hooks.hooks.server_process import ServerProcess
from explorer_hooks.hooks.sglang import SGLangHook
from explorer_hooks.hooks.vllm import VllmHook
from explorer_hooks.http_client import HttpClient, is_loopback
from explorer_hooks.stopping import Stop
from syncd.errors import ConfigError, EngineDeadError, EngineUnreachableError
from syncd.jobfile.model import JobFile

_HOST = "127.0.0.1"
_PATHS = {"vllm": VllmHook.health_path, "sglang": SGLangHook.health_path}
_TICK = 0.25  # seconds between two looks at the server

_ASK = 5.0
_LOG = structlog.get_logger()


@contextmanager
def serving(file: JobFile, stop: Stop) -> Iterator[JobFile]:
    """Yield the file with its engine's address, once that is started if the file says how; its end sets `stop`."""
    section = file.explorer.engine
    if not section.command or section.reload == "restart":
        yield file
        return
    settings = {key: section.options[key] for key in OWN if key in section.options}
    argv = HookOptions(argv=tuple(shlex.split(section.command)))
    options = RestartOptions.read(section.kind, {"start_model": file.model.path, **settings}, argv)
    with _running(options, *_place(section.address), _PATHS[section.kind], stop) as address:
        rest = {key: value for key, value in section.options.items() if key not in OWN}
        engine = section.model_copy(update={"address": address, "command": "", "options": rest})
        follow = file.explorer.follow
        if follow.exam == "auto":  # nobody else uses this server
            follow = follow.model_copy(update={"exam": "on"})
        yield file.with_values(explorer={"engine": engine, "follow": follow})


def _place(address: str) -> tuple[str, int]:
    """Return host and port of an address, a free port of this host for an empty one."""
    if not address:
        return _HOST, free_port()
    url = urlsplit(address)
    if not is_loopback(url.hostname or "") or url.port is None:
        hint = "leave explorer.engine.address out: a free port is taken"
        raise ConfigError(f"a server at {address} cannot be started from here", hint=hint)
    return url.hostname or _HOST, url.port


def free_port() -> int:
    with socket.create_server((_HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def _running(options: RestartOptions, host: str, port: int, path: str, stop: Stop) -> Iterator[str]:
    if is_taken(host, port):
        hint = f"ss -ltnp 'sport = :{port}'"
        raise EngineDeadError(f"port {port} of {host} is in use by another process", hint=hint)
    address = f"http://{host}:{port}"
    process, over = ServerProcess(options.stop_timeout, options.log), threading.Event()
    process.start(options.command(options.start_model, host, port))
    _LOG.info("engine_started", address=address, model=options.start_model)
    try:
        _await(process, address, path, options.start_timeout, stop)
        watch = threading.Thread(target=_watch, args=(process, stop, over), name="own-server", daemon=True)
        watch.start()
        yield address
        if not process.is_running and not stop.is_signalled:  # a signal may be meant for both
            raise EngineDeadError(f"the server {process.end}", hint="its log has the reason")
    finally:
        over.set()
        process.stop()


def _await(process: ServerProcess, address: str, path: str, seconds: float, stop: Stop) -> None:
    client = HttpClient(address, token=None, timeout=_ASK, ask_timeout=_ASK, missing="")
    until = time.monotonic() + seconds
    while not stop() and not _answers(client, path):
        if not process.is_running:
            raise EngineDeadError(f"the server {process.end}", hint="its log has the reason")
        if time.monotonic() > until:
            hint = "its log has the reason; a longer start_timeout in explorer.engine.options if it needs more time"
            raise EngineDeadError(f"the server did not answer for {seconds:g} s", hint=hint)
        time.sleep(_TICK)


def _answers(client: HttpClient, path: str) -> bool:
    try:
        client.get(path)
    except EngineUnreachableError:
        return False
    except ConfigError:
        pass  # it asks for a key: it is up, and the hook has the key
    return True


def _watch(process: ServerProcess, stop: Stop, over: threading.Event) -> None:
    while not over.wait(_TICK):
        if not process.is_running:
            stop.request()
            return
