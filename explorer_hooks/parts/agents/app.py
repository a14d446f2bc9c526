"""The gateway's routes.

Agents name their session in the path, as API key, or in the header `X-Session-ID`; drivers show the token of the
gateway's token file.
"""

import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Protocol

import structlog
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from explorer_hooks.follower.health import Health
from explorer_hooks.parts.agents.answers import Completion
from explorer_hooks.parts.agents.api_errors import (
    BAD_REQUEST,
    NOT_FOUND,
    UNAUTHORISED,
    UNAVAILABLE,
    ApiError,
    refused,
)
from explorer_hooks.parts.agents.chat import ChatRequest, read_request
from explorer_hooks.parts.agents.driver import SessionRequest
from explorer_hooks.parts.agents.gateway import Gateway
from explorer_hooks.parts.agents.responses_api import ResponseAnswer, read_responses_request
from syncd.errors import SyncdError

MOST_BODY = 16 << 20  # bytes of a request's body

_RETRY, _KEY, _SESSION = "x-stainless-retry-count", "idempotency-key", "x-session-id"
_TOO_LARGE, _BROKEN = 413, 500
_PLAIN_ERRORS = {404: "there is no such route", 405: "the route takes another method"}

_SHOWN = 300
_LOG = structlog.get_logger()

Handler = Callable[[Request], Awaitable[Response]]


class Reader(Protocol):
    def __call__(self, body: object, *, tolerates: bool) -> ChatRequest:
        """Return the request."""


class GatewayApp:
    def __init__(self, gateway: Gateway, token: str, health: Callable[[], Health]) -> None:
        self._gateway, self._token, self._health = gateway, token, health

    def application(self) -> Starlette:
        agents = [
            Route(f"{base}{path}", _guarded(handler), methods=[method])
            for base in ("/v1", "/s/{session}/v1")
            for path, handler, method in (
                ("/chat/completions", self._chat, "POST"),
                ("/responses", self._responses, "POST"),
                ("/models", self._models, "GET"),
                ("/models/{model:path}", self._one_model, "GET"),
                ("/reward", self._agent_reward, "POST"),
            )
        ]
        drivers = [
            Route(path, _guarded(handler), methods=[method])
            for path, handler, method in (
                ("/sessions", self._open, "POST"),
                ("/s/{session}", self._session, "GET"),
                ("/s/{session}/reward", self._reward, "POST"),
                ("/s/{session}/abandon", self._abandon, "POST"),
                ("/groups/{group:path}/drop", self._drop, "POST"),
                ("/health", self._show_health, "GET"),
            )
        ]
        handlers: Any = {
            ApiError: self._answered_error,
            SyncdError: _answered_failure,
            **dict.fromkeys(_PLAIN_ERRORS, _answered_plainly),
        }
        return Starlette(routes=[*agents, *drivers], exception_handlers=handlers)

    # --- agents -----------------------------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Response:
        asked, done, _ = await self._turn(request, read_request)
        return _reply(done.chunks(usage=asked.usage)) if asked.stream else JSONResponse(done.document)

    async def _responses(self, request: Request) -> Response:
        asked, done, body = await self._turn(request, read_responses_request)
        answer = ResponseAnswer(done, body)
        return _reply(answer.events()) if asked.stream else JSONResponse(answer.document)

    async def _turn(self, request: Request, read: Reader) -> tuple[ChatRequest, Completion, Any]:
        session = self._session_of(request)
        with self._gateway.admitted(session):  # before the body is read: anybody may send megabytes
            body = await _body(request)
            asked = read(body, tolerates=self._gateway.limits.tolerates)
            idempotency = request.headers.get(_KEY, "")
            is_retry = bool(idempotency) or request.headers.get(_RETRY, "0") not in ("", "0")
            key = f"{asked.key}/{idempotency[:100]}" if idempotency else asked.key
            return asked, await self._gateway.turn(session, asked, key, is_retry=is_retry), body

    async def _models(self, request: Request) -> Response:
        self._gateway.session(self._session_of(request))
        return JSONResponse({"object": "list", "data": [self._model]})

    async def _one_model(self, request: Request) -> Response:
        self._gateway.session(self._session_of(request))
        name = request.path_params["model"]
        if name != self._gateway.model:
            text = f"there is no model {name[:_SHOWN]!r}; the gateway serves {self._gateway.model!r}"
            raise ApiError(NOT_FOUND, text, code="model_not_found", param="model")
        return JSONResponse(self._model)

    @property
    def _model(self) -> dict[str, object]:
        return {"id": self._gateway.model, "object": "model", "created": 0, "owned_by": "syncd"}

    async def _agent_reward(self, request: Request) -> Response:
        if not self._gateway.limits.agents_reward:
            raise refused("the agent gives no reward here: its driver does, or [explorer.reward]", "reward")
        return JSONResponse(await self._gateway.reward(self._session_of(request), await _body(request)))

    def _session_of(self, request: Request) -> str:
        """Return the session that the path names, else the API key, else the header."""
        named = str(request.path_params.get("session") or _bearer(request))
        header, knows = request.headers.get(_SESSION, ""), self._gateway.sessions.knows
        if header and not knows(named):
            named = header
        if "session" not in request.path_params and not knows(named):
            text = "the API key names no session" if named else "no API key is given"
            raise ApiError(UNAUTHORISED, f"{text}: a session's key is its id", code="invalid_api_key")
        return named

    # --- drivers ----------------------------------------------------------------------------------------------

    async def _open(self, request: Request) -> Response:
        self._check_driver(request)
        asked = SessionRequest.read(await _body(request), self._gateway.limits.group_size)
        opened = await self._gateway.open(asked)
        base = str(request.base_url).rstrip("/")
        return JSONResponse(
            {**opened, "base_url": f"{base}/s/{opened['session']}/v1", "api_key": opened["session"]}
        )

    async def _session(self, request: Request) -> Response:
        self._check_driver(request)
        return JSONResponse(self._gateway.session(request.path_params["session"]))

    async def _reward(self, request: Request) -> Response:
        self._check_driver(request)
        body = await _body(request)
        return JSONResponse(await self._gateway.reward(request.path_params["session"], body))

    async def _abandon(self, request: Request) -> Response:
        self._check_driver(request)
        return JSONResponse(await self._gateway.abandon(request.path_params["session"]))

    async def _drop(self, request: Request) -> Response:
        self._check_driver(request)
        group = request.path_params["group"]
        await self._gateway.drop(group, "driver")
        return JSONResponse({"group": group, "state": self._gateway.sessions.over.get(group, "unknown")})

    async def _show_health(self, _request: Request) -> Response:
        is_ready, health = self._health()
        failure = self._gateway.failure
        if failure is not None:
            is_ready, health = False, {**health, "ready": False, "reason": str(failure)}
        document = {**health, **self._gateway.sessions.counts}
        return JSONResponse(document, 200 if is_ready else UNAVAILABLE)

    async def _answered_error(self, _request: Request, error: ApiError) -> Response:
        self._gateway.refused[error.code] += 1
        headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
        if error.closes:
            headers["Connection"] = "close"
        return JSONResponse(error.document, error.status, headers)

    def _check_driver(self, request: Request) -> None:
        if not hmac.compare_digest(_bearer(request).encode(), self._token.encode()):
            raise ApiError(UNAUTHORISED, "the bearer token is not the gateway's", code="unauthorised")


def _guarded(handler: Handler) -> Handler:
    """Return a handler that answers in JSON whatever happens."""

    async def answered(request: Request) -> Response:
        try:
            return await handler(request)
        except ApiError as error:
            error.closes = not await _is_read(request)
            raise
        except SyncdError:
            raise
        except ClientDisconnect:
            return Response(status_code=BAD_REQUEST)  # nobody reads it
        except Exception as error:  # noqa: BLE001 - a request must not leave a traceback
            _LOG.error("request_failed", path=request.url.path, problem=repr(error)[:_SHOWN])
            return JSONResponse(ApiError(_BROKEN, "an error of the gateway", code="bug").document, _BROKEN)

    return answered


def _reply(lines: Iterable[str]) -> Response:
    """Return a stream in one piece: clients do not send a request again whose stream has begun."""
    headers = {"Cache-Control": "no-store"}
    return Response("".join(lines), media_type="text/event-stream", headers=headers)


def _bearer(request: Request) -> str:
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    return value.strip() if kind.lower() == "bearer" else ""


async def _body(request: Request) -> Any:
    whole = bytearray()
    async for part in _parts(request):
        whole += part
        if len(whole) > MOST_BODY:
            raise ApiError(_TOO_LARGE, f"the body is longer than {MOST_BODY} bytes", code="too_large")
    try:
        return json.loads(whole)
    except (ValueError, RecursionError):
        raise refused("the body is not JSON", code="invalid_body") from None


async def _is_read(request: Request) -> bool:
    """Read what is left of a body that nobody needs, and return whether that was all: some never end."""
    size = 0
    with contextlib.suppress(ClientDisconnect):
        async for part in _parts(request):
            size += len(part)
            if size > MOST_BODY:
                return False
    return True


async def _parts(request: Request) -> AsyncIterator[bytes]:
    """Yield what was not read yet of a body."""
    while not getattr(request.state, "is_read", False):
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        request.state.is_read = not message.get("more_body", False)
        yield message.get("body", b"")


async def _answered_failure(_request: Request, error: SyncdError) -> Response:
    return JSONResponse(ApiError(_BROKEN, str(error), code=error.code).document, _BROKEN)


async def _answered_plainly(_request: Request, error: Any) -> Response:
    failure = ApiError(error.status_code, _PLAIN_ERRORS[error.status_code], code="not_found")
    return JSONResponse(failure.document, error.status_code)
