"""A session with a tinker server, for the trainer and for explorers. The SDK is imported when a session is opened.

The SDK repeats requests on its own, some of them without end, and its newest releases wait for ever for servers that
speak the older protocol. So each call here has an end of its own, and other releases are refused.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol, TypeVar

from syncd.errors import ConfigError, StorageError, SyncdError, TimedOutError, TryAgainError, first_line
from syncd.extras import install_command

SDK = "0.24.1"  # the release of the package `tinker` that this was written for and tested with
SCHEME = "tinker://"  # how the address of what a server keeps begins

_FORBIDDEN = frozenset({401, 403})
_REFUSED, _MISSING, _SERVER_ERROR = 400, 404, 500

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class PendingAnswer(Protocol[T_co]):
    """What the SDK returns at once for a request that is on its way."""

    def result(self, timeout: float | None = None) -> T_co:
        """Return the answer, or raise `TimeoutError`."""


class TinkerSession:
    """One session with one server; a call may take `timeout` seconds, its repetitions included."""

    def __init__(self, url: str, key: str, timeout: float) -> None:
        self.url, self._timeout = url, timeout
        self.sdk = import_sdk()
        self.types: Any = self.sdk.types
        self.service = self.call(
            "opening a session", lambda: self.sdk.ServiceClient(base_url=url, api_key=key)
        )

    def call(self, what: str, function: Callable[[], T]) -> T:
        """Return what a call of the SDK returns that may wait for the server, within the bound.

        A call that outlasts its time cannot be stopped; its thread does not keep the process from ending.
        """
        future: Future[T] = Future()
        threading.Thread(target=_run, args=(future, function), name="tinker", daemon=True).start()
        return self.result(what, future)

    def result(self, what: str, answer: PendingAnswer[T]) -> T:
        """Return the answer to a request that is on its way, within the bound."""
        try:
            return answer.result(self._timeout)
        except SyncdError:
            raise
        except Exception as error:
            raise self._explained(what, error) from error

    def base_model(self, name: str = "") -> tuple[str, int | None]:
        """Return what the server calls a base model, and the longest row that it says the model takes, in tokens.

        Without a name, the server's only model is meant.
        """
        models = self.call("listing models", self.service.get_server_capabilities).supported_models
        lengths = {model.model_name: model.max_context_length for model in models if model.model_name}
        if not name and len(lengths) == 1:
            return next(iter(lengths.items()))
        if name not in lengths:
            what = (
                f"the tinker server has no model {name!r}" if name else "the tinker server has several models"
            )
            names = ", ".join(sorted(lengths)) or "none"
            raise ConfigError(what, path=self.url, hint=f"name one of these: {names}")
        return name, lengths[name]

    def tokens(self, ids: list[int]) -> Any:
        return self.types.ModelInput.from_ints(ids)

    def close(self) -> None:
        """End the session without waiting for the server, which may unload its models. What was saved stays."""
        # The SDK opens a session that is not open yet before it closes it, and waits for the server for that.
        threading.Thread(target=self._end, name="tinker", daemon=True).start()

    def _end(self) -> None:
        with contextlib.suppress(Exception):
            self.service.holder.close()

    def _explained(self, what: str, error: Exception) -> SyncdError:
        asked = f"curl {self.url}/api/v1/healthz"
        if isinstance(error, TimeoutError):
            text = f"{what}: the tinker server did not answer within {self._timeout:g} s"
            return TimedOutError(text, path=self.url, hint=asked)
        said, status = _said(error), _status(error)
        if isinstance(error, self.sdk.APIConnectionError):
            return TimedOutError(f"{what}: {said}", path=self.url, hint=asked)
        if status in _FORBIDDEN:
            return ConfigError(f"{what}: the tinker server refuses the API key", path=self.url)
        if status == _MISSING:
            hint = "was it removed there, or is it on another server?"
            return StorageError(
                f"{what}: the tinker server does not have it: {said}", path=self.url, hint=hint
            )
        if _REFUSED <= status < _SERVER_ERROR:
            return ConfigError(f"{what}: the tinker server refuses it: {said}", path=self.url)
        hint = "see the server's log; start again to resume from the last full checkpoint"
        return TryAgainError(f"{what}: the tinker server failed: {said}", path=self.url, hint=hint)


def api_key(variable: str, environ: Mapping[str, str] = os.environ) -> str:
    if not environ.get(variable):
        hint = f"export {variable}=tml-...; a server of your own takes any key that begins so"
        raise ConfigError(f"the tinker server needs an API key, and {variable} is not set", hint=hint)
    return environ[variable]


def import_sdk() -> Any:
    # Read while the package is imported; it would report each call and error to the server, and wait for it at exit.
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    try:
        release = version("tinker")
    except PackageNotFoundError:
        raise ConfigError("the package tinker is not installed", hint=install_command("tinker")) from None
    if release != SDK:
        text = (
            f"the package tinker is of release {release} instead of {SDK}; from 0.25 on it can wait forever"
        )
        raise ConfigError(text, hint=install_command("tinker"))
    return import_module("tinker")


def _run(future: "Future[T]", function: Callable[[], T]) -> None:
    try:
        future.set_result(function())
    except Exception as error:  # noqa: BLE001 - raised by whoever waits
        future.set_exception(error)


def _status(error: Exception) -> int:
    """Return the status of the server's answer, 0 without one. The SDK keeps some as the cause of another error."""
    codes = [getattr(raised, "status_code", 0) for raised in (error, error.__cause__)]
    return next((status for status in codes if isinstance(status, int) and status), 0)


def _said(error: Exception) -> str:
    text = first_line(error)
    return text if len(text) <= 300 else f"{text[:300]}..."  # noqa: PLR2004
