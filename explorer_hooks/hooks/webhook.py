"""webhook: a receiver of signed POST requests loads the version."""

import hashlib
import hmac
import time
import uuid
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from explorer_hooks.hook import HookOptions, Running
from explorer_hooks.hooks.phases import PhaseHook
from explorer_hooks.hooks.settings import HookSettings
from explorer_hooks.http_client import HttpClient, Reply, is_loopback
from syncd.errors import DOCS, ConfigError, EngineUnreachableError, LoadFailedError, RefusedError
from syncd.transports.base import WeightDirectory

SIGNATURE = "X-Syncd-Signature"
TIMESTAMP = "X-Syncd-Timestamp"
PROTOCOL = 1

_OK, _SERVER = 200, 500
_LATER = frozenset({408, 425, 429})
_NO_GET = frozenset({404, 405, 501})
_ASK_TIMEOUT = 10.0
_HINT = f"a receiver in a few lines: {DOCS}/follow-other-engines.md#webhook"


class WebhookHook(PhaseHook):
    """Posts each phase of a load as a JSON document, and reads what runs from the same URL.

    Setting: `ask_timeout`, in seconds. The token signs every request and is never sent.
    """

    name: ClassVar[str] = "webhook"

    def __init__(self, options: HookOptions) -> None:
        address, token = options.address, options.token
        if not address:
            raise ConfigError(
                "the webhook hook needs a URL", hint="--hook webhook=http://127.0.0.1:9000/load"
            )
        settings = HookSettings(self.name, options.settings)
        ask_timeout = settings.seconds("ask_timeout", _ASK_TIMEOUT)
        settings.done()
        self._server = SigningClient(
            address, token=token, timeout=options.timeout, ask_timeout=ask_timeout, missing=_HINT
        )
        if token is None and not is_private(address):
            raise ConfigError(
                "http to another host needs a token to sign with", path=address, hint="--token-file FILE"
            )
        super().__init__()

    @classmethod
    def from_options(cls, options: HookOptions) -> Self:
        return cls(options)

    def current_version(self) -> Running:
        """Return what the receiver says; if it does not answer GET, what was committed last through this hook."""
        reply = self._server.get_any("")
        if reply.status in _NO_GET:
            return Running(self._label)
        if reply.is_error:
            raise EngineUnreachableError(self._server.complaint(reply), path=self._server.address)
        return self._running(reply)

    def _do(self, phase: str, target: WeightDirectory) -> None:
        reply = self._server.post_raw("", document_of(target, phase))
        if not reply.is_error:
            return
        complaint = self._server.complaint(reply)
        if phase != "prepare":
            raise LoadFailedError(complaint, path=self._server.address, hint=_HINT)
        if reply.status >= _SERVER or reply.status in _LATER:
            raise EngineUnreachableError(complaint, path=self._server.address)
        raise RefusedError(complaint, path=self._server.address)

    def _running(self, reply: Reply) -> Running:
        document = reply.document or {}
        label, paused = document.get("label"), document.get("paused", False)
        if "label" not in document or not isinstance(label, str | None) or not isinstance(paused, bool):
            what = '{"label": text or null, "paused": true or false}'
            message = f"{reply.request} is not answered with {what}"
            raise EngineUnreachableError(message, path=self._server.address, hint=_HINT)
        return Running(label, paused)


class SigningClient(HttpClient):
    """A client that signs each request and its time with a shared key."""

    def _authorization(self, data: bytes) -> dict[str, str]:
        return {} if self._token is None else signed(self._token, data, time.time())


def signed(token: str, body: bytes, now: float) -> dict[str, str]:
    """Return the headers that sign a body at a time, in seconds since the epoch."""
    timestamp = str(int(now))
    digest = hmac.new(token.encode(), f"{timestamp}.".encode() + body, hashlib.sha256)
    return {TIMESTAMP: timestamp, SIGNATURE: f"sha256={digest.hexdigest()}"}


def document_of(target: WeightDirectory, phase: str) -> dict[str, Any]:
    """Return the document that is posted: a phase and a version; `delivery` is new each time."""
    version = target.version
    return {
        "protocol": PROTOCOL,
        "phase": phase,
        "delivery": uuid.uuid4().hex,
        "label": target.label,
        "generation": version.generation,
        "step": version.step,
        "kind": version.kind,
        "path": target.path,
        "digest": version.digest,
        "verified": target.verified,
        "shards": [record._asdict() for record in target.shards],
    }


def is_private(address: str) -> bool:
    """Return whether no other host can read or change requests: they use https or stay on this host."""
    url = urlsplit(address)
    return url.scheme == "https" or is_loopback(url.hostname or "")
