"""Generation by a server: several groups at a time, each with the versions that ran before and after it.

Requests go to the completions API of vLLM and SGLang: token ids in, token ids and their log-probs out, by
`POST /v1/completions` with `return_token_ids` and `logprobs = 0`. Every sampling setting is sent: a server takes a
missing one from the model directory, and the log-probs would be of another distribution.
"""

import math
import os
import random
import shlex
import threading
import time
from collections.abc import Generator as Iterated
from collections.abc import Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from explorer_hooks.explorer.config import ExplorerFile
from explorer_hooks.explorer.generation import (
    Generator,
    GeneratorContext,
    GroupRequest,
    GroupResult,
    InferenceEngine,
    Response,
    version_after,
    version_of,
)
from explorer_hooks.finding import open_hook, shown
from explorer_hooks.http_client import HttpClient
from syncd.client.sync_policy import SyncStyle
from syncd.errors import ConfigError, EngineUnreachableError, SyncdError
from syncd.protocol.version import Pair

PATH = "/v1/completions"

_ASK = 10.0
"""Seconds that a question may take."""

_MAX_ANSWER = 512 << 20
"""Bytes of the longest answer: all responses of a group, with about a hundred bytes a token."""

_SETTLE = 2.0
"""Seconds that a group waits for an engine on no applied version if nobody loads one meanwhile."""

_TICK = 0.05
"""Seconds between two polls for results."""

_BACKOFF, _LONGEST = 0.5, 15.0
_PAUSE = 0.1
"""Seconds between two questions to an engine that loads a version."""

_CONFIRM = 2.0
"""Seconds between an engine's new version and its confirmation, at most; a longer difference is a restart."""

_TRANSIENT, _SERVER_ERROR = frozenset({408, 429}), 500
"""Statuses of answers after which a retry may succeed: timed out, too many requests, and errors of the server."""

_FINISHED = frozenset({"stop", "length"})


class MalformedError(Exception):
    """An answer is not what a working server returns; a retry may succeed."""


class UnsupportedServerError(Exception):
    """The server does not return what is needed, and never will."""


def request_body(asked: GroupRequest, model: str) -> dict[str, Any]:
    """Return the body of a request for one group."""
    return {
        "model": model,
        "prompt": list(asked.prompt),
        "n": asked.samples,
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
        "stream": False,
    }


def parse_responses(answer: Mapping[str, Any] | None, asked: GroupRequest) -> tuple[Response, ...]:
    """Return the responses of an answer.

    Raises:
        MalformedError: It is not a whole group of finished responses with a log-prob for each token.
        UnsupportedServerError: It has no token ids, or is for another prompt.
    """
    choices = (answer or {}).get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise MalformedError("the answer has no choices")
    if len(choices) != asked.samples:
        raise MalformedError(f"{len(choices)} choices where {asked.samples} were asked for")
    return tuple(_response(choice, asked) for choice in choices)


def _response(choice: Mapping[str, Any], asked: GroupRequest) -> Response:
    reason = choice.get("finish_reason")
    if reason not in _FINISHED:
        raise MalformedError(f"a response ended with {reason!r}")
    tokens, values = choice.get("token_ids"), _logprobs(choice)
    if tokens is None:
        raise UnsupportedServerError("the server does not return token ids: vLLM 0.16 and SGLang 0.5.23 do")
    echoed = choice.get("prompt_token_ids")
    if echoed is not None and echoed != list(asked.prompt):
        raise UnsupportedServerError("the server has changed the prompt")
    if not (isinstance(tokens, list) and tokens and all(type(one) is int and one >= 0 for one in tokens)):
        raise MalformedError("token_ids is not a list of token ids")
    if len(values) != len(tokens) or len(tokens) > asked.max_tokens:
        raise MalformedError(
            f"{len(values)} log-probs for {len(tokens)} tokens, of {asked.max_tokens} at most"
        )
    return Response(tokens, values, str(choice.get("text") or ""))


def _logprobs(choice: Mapping[str, Any]) -> Sequence[float]:
    found = choice.get("logprobs")
    values = found.get("token_logprobs") if isinstance(found, dict) else None
    if not isinstance(values, list) or not all(_is_logprob(value) for value in values):
        raise MalformedError("token_logprobs is not a list of log-probs")
    return values


def _is_logprob(value: object) -> bool:
    # Kernels round: the log of a probability of one may come out a little above zero.
    return type(value) in (int, float) and math.isfinite(value) and value < 1.0  # type: ignore[arg-type, operator]


class ServerGenerator(Generator):
    """Generates by a server.

    Args:
        server: The server.
        model: The name of the model in requests.
        context: What the engine runs, with which version work may be done, and when to stop.
        concurrency: Groups that are requested at a time.
        retries: Retries of one request.
        settle: Seconds that a group waits for an engine that loads a version.
    """

    def __init__(
        self,
        server: HttpClient,
        model: str,
        context: GeneratorContext,
        *,
        concurrency: int,
        retries: int,
        settle: float,
    ) -> None:
        self._server, self._model, self._context = server, model, context
        self._concurrency, self._retries, self._settle = concurrency, retries, settle

    def generate(self, requests: Sequence[GroupRequest]) -> "Iterated[GroupResult | None]":
        """Yield each result once, as it is ready, and None every so often."""
        waiting: SimpleQueue[tuple[int, GroupRequest]] = SimpleQueue()
        done: SimpleQueue[GroupResult | SyncdError] = SimpleQueue()
        for numbered in enumerate(requests):
            waiting.put(numbered)
        given_up = threading.Event()
        for _ in range(min(self._concurrency, len(requests))):
            # Nobody waits for these threads: each may wait as long as a response takes.
            work = threading.Thread(target=self._work, args=(waiting, done, given_up), daemon=True)
            work.start()
        try:
            yield from self._results(done, len(requests))
        finally:
            given_up.set()

    def _results(
        self, done: "SimpleQueue[GroupResult | SyncdError]", count: int
    ) -> Iterator[GroupResult | None]:
        while count and not self._context.stop():
            try:
                one = done.get(timeout=_TICK)
            except Empty:
                yield None
                continue
            if isinstance(one, SyncdError):
                raise one
            count -= 1
            yield one

    def _work(
        self,
        waiting: "SimpleQueue[tuple[int, GroupRequest]]",
        done: "SimpleQueue[GroupResult | SyncdError]",
        given_up: threading.Event,
    ) -> None:
        while not given_up.is_set():
            try:
                index, asked = waiting.get_nowait()
            except Empty:
                return
            try:
                done.put(self._result(index, asked, given_up))
            except SyncdError as error:
                done.put(error)
            except Exception as error:  # noqa: BLE001 - the consumer would wait for ever
                done.put(SyncdError(f"asking the engine failed: {error!r}"))

    def _result(self, index: int, asked: GroupRequest, given_up: threading.Event) -> GroupResult:
        try:
            before = self._await_usable(given_up)
            if before is None:
                return GroupResult(index, problem="the engine runs no applied version", retry=True)
            first, unproven = before
            responses = self._responses(asked, given_up)
            after = self._context.running()
            last = version_after(after, first)
        except EngineUnreachableError as error:
            return GroupResult(index, problem=str(error), retry=True)
        except MalformedError as error:
            return GroupResult(index, problem=str(error))
        if last is None:
            return GroupResult(index, problem="the engine was restarted meanwhile", retry=True)
        return GroupResult(index, responses, first, last, unproven=after.unproven != unproven)

    def _await_usable(self, given_up: threading.Event) -> tuple[Pair, int] | None:
        """Return the version with which work begins, and how many loads were never proven; wait for a load."""
        begin = time.monotonic()
        while True:
            running = self._context.running()
            found = version_of(running, self._context.permitted())
            patience = self._settle if running.paused else min(self._settle, _CONFIRM)
            if found is not None:
                return found, running.unproven
            if time.monotonic() - begin > patience or given_up.wait(_PAUSE):
                return None

    def _responses(self, asked: GroupRequest, given_up: threading.Event) -> tuple[Response, ...]:
        """Send a request until it is answered, a bounded number of times.

        Raises:
            EngineUnreachableError: The server was away each time.
            MalformedError: The last answer could not be used, or the server refused the request.
            ConfigError: The server does not return what is needed.
        """
        body = request_body(asked, self._model)
        for attempt in range(self._retries + 1):
            if attempt and given_up.wait(backoff(attempt)):
                raise EngineUnreachableError("given up")
            try:
                return parse_responses(self._answer(body), asked)
            except (EngineUnreachableError, MalformedError) as error:
                if attempt == self._retries or isinstance(error, RefusedRequestError):
                    raise
            except UnsupportedServerError as error:
                raise ConfigError(str(error), path=self._server.address) from error
        raise AssertionError("the loop returns or raises")

    def _answer(self, body: dict[str, object]) -> "dict[str, object] | None":
        reply = self._server.post_any(PATH, body)
        if reply.status in _TRANSIENT or reply.status >= _SERVER_ERROR:
            raise EngineUnreachableError(self._server.complaint(reply))
        if reply.is_error:
            raise RefusedRequestError(self._server.complaint(reply))
        return reply.document


class RefusedRequestError(MalformedError):
    """The server will never accept this request; its prompt is too long, for example."""


def backoff(attempt: int) -> float:
    """Return the seconds before a retry, spread so that explorers do not retry together."""
    return min(_BACKOFF * 2.0 ** (attempt - 1), _LONGEST) * random.uniform(0.8, 1.2)  # noqa: S311


def served_model(server: HttpClient) -> str:
    """Return the name of a server's first model.

    Raises:
        ConfigError: It names none.
        EngineUnreachableError: It does not answer.
    """
    found = server.get_json("/v1/models").get("data")
    first = found[0] if isinstance(found, list) and found else None
    name = first.get("id") if isinstance(first, dict) else None
    if not isinstance(name, str) or not name:
        raise ConfigError("the server names no model", path=server.address, hint="set explorer.engine.model")
    return name


class ServerEngine(InferenceEngine):
    """A server.

    Args:
        file: The configuration, which names it.

    Raises:
        ConfigError: The options do not fit the engine, or its API key is not set.
    """

    def __init__(self, file: ExplorerFile) -> None:
        self._file, section = file, file.explorer.engine
        self._token, address = _token(section.token_env), f"{section.kind}={section.address}"
        self.name = shown(address)
        self.hook = open_hook(
            address,
            argv=tuple(shlex.split(section.command)),
            settings={"start_model": file.model.path, **section.options, "reload": section.reload}
            if section.command
            else section.options,
            timeout=section.timeout,
            token=self._token,
        )

    def generator(self, context: GeneratorContext) -> ServerGenerator:
        """Return what generates groups by the server's completions API."""
        section = self._file.explorer.engine
        server = HttpClient(
            section.address,
            token=self._token,
            timeout=section.timeout,
            ask_timeout=_ASK,
            missing="explorer.engine.address is that of the server itself, without /v1",
            max_answer=_MAX_ANSWER,
        )
        # In the fully asynchronous style versions are loaded while groups wait.
        settle = section.timeout if self._file.sync.style is SyncStyle.FULLY_ASYNC else _SETTLE
        return ServerGenerator(
            server,
            section.model or served_model(server),
            context,
            concurrency=section.concurrency,
            retries=section.retries,
            settle=settle,
        )


def _token(variable: str) -> str | None:
    if not variable:
        return None
    if not os.environ.get(variable):
        raise ConfigError(
            f"explorer.engine.token_env names {variable}, which is not set", hint=f"export {variable}=..."
        )
    return os.environ[variable]
