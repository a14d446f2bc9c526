"""Generation by a server: several groups at a time, each with the versions that chose its tokens.

The versions are those that the server itself names for each token, or those that ran before and after the group.
"""

import os
import random
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from collections.abc import Generator as Iterated
from dataclasses import replace

import structlog

from explorer_hooks.finding import open_hook, shown
from explorer_hooks.hook import PendingProof, Running
from explorer_hooks.hooks.adapter_server import AdapterServerHook
from explorer_hooks.hooks.http_engine import UNTOLD
from explorer_hooks.hooks.sglang_lora import SGLangLoraHook
from explorer_hooks.hooks.vllm_lora import LoraHook
from explorer_hooks.http_client import HttpClient, Reply
from explorer_hooks.run.asking import TICK, AskingThreads
from explorer_hooks.run.generation import (
    BEFORE_THE_FIRST,
    Generator,
    GeneratorContext,
    GroupRequest,
    GroupResult,
    InferenceEngine,
    version_after,
    version_of,
)
from explorer_hooks.run.server_apis import (
    ApiChoice,
    CompletionsApi,
    MalformedError,
    ServerAnswer,
    ServerApi,
    SGLangGenerateApi,
    UnsupportedServerError,
)
from explorer_hooks.run.token_versions import TokenVersions, parse_spans, versions_of
from syncd.client.sync_policy import SyncStyle
from syncd.errors import ConfigError, EngineUnreachableError
from syncd.jobfile.model import JobFile
from syncd.protocol.version import Pair

ASK = 10.0  # seconds that a question may take

MAX_ANSWER = 512 << 20
"""Bytes of the longest answer: all responses of a group, with about a hundred bytes a token."""

_SETTLE = 2.0  # seconds that a group waits for an engine on no applied version if nobody loads one meanwhile

_BACKOFF, _LONGEST = 0.5, 15.0
_RANDOM = random.Random()  # noqa: S311 - spreads load, hides nothing
_PAUSE = 0.1  # seconds between two questions to an engine that loads a version

_CONFIRM = 2.0
"""Seconds between an engine's new version and its confirmation, at most; a longer difference is a restart."""

_TRANSIENT, _SERVER_ERROR = frozenset({408, 429}), 500
"""Statuses of answers after which a retry may succeed: timed out, too many requests, and errors of the server."""

_ADAPTER_HOOKS = {"vllm": LoraHook.name, "sglang": SGLangLoraHook.name}
"""The hook for adapters by the engine's kind."""

_LOG = structlog.get_logger()


class ServerGenerator(Generator):
    """Generates by a server.

    Args:
        settle: Seconds that a group waits for an engine that loads a version.
        adapter_api: If versions are adapters, returns how the one with a label is asked, without a label the model
            below them: a request names its version, which answers it to its end. None if requests name no version.
    """

    def __init__(
        self,
        server: HttpClient,
        choice: ApiChoice,
        context: GeneratorContext,
        *,
        concurrency: int,
        retries: int,
        settle: float,
        adapter_api: Callable[[str | None], ServerApi] | None = None,
    ) -> None:
        self._server, self._choice, self._context = server, choice, context
        self._concurrency, self._retries, self._settle = concurrency, retries, settle
        self._adapter_api = adapter_api
        self._most_samples: int | None = None

    def check(self) -> None:
        if self._adapter_api is None:
            self._choice.api()

    def generate(self, requests: Sequence[GroupRequest]) -> "Iterated[GroupResult | None]":
        threads = min(self._concurrency, len(requests))
        with AskingThreads(self._result, threads, "the engine") as asking:
            for numbered in enumerate(requests):
                asking.put(numbered)
            while asking.is_pending and not self._context.stop():
                yield asking.next(TICK)

    def _result(self, numbered: tuple[int, GroupRequest], given_up: threading.Event) -> GroupResult:
        index, asked = numbered
        try:
            before = self._await_usable(given_up)
            if before is None:
                return GroupResult(index, problem="the engine runs no applied version", retry=True)
            first, began = before
            answers = self._answers(asked, began, given_up)
            if self._adapter_api is not None:
                return GroupResult(index, tuple(answer.response for answer in answers), first, first)
            after = self._context.running()
            last = version_after(after, first)
        except EngineUnreachableError as error:
            return GroupResult(index, problem=str(error), retry=True)
        except MalformedError as error:
            return GroupResult(index, problem=str(error))
        if last is None:
            return GroupResult(index, problem="the engine was restarted meanwhile", retry=True)
        return self._labelled(index, answers, first, last, began, after)

    def _labelled(
        self,
        index: int,
        answers: Sequence[ServerAnswer],
        first: Pair,
        last: Pair,
        began: Running,
        ended: Running,
    ) -> GroupResult:
        """Return a group, each response with the versions that the server names for its tokens if it does.

        Before the group `first` ran and the engine said `began`, after it `last` and `ended`.
        """
        unproven, pending = ended.unproven_since(began), ended.pending_since(began)
        labelled = [self._versions(answer, first, last, unproven, pending) for answer in answers]
        problems = [versions for versions in labelled if isinstance(versions, str)]
        if problems:
            _LOG.warning("token_versions_unreadable", responses=len(problems), reason=problems[0])
        responses = tuple(
            replace(answer.response, versions=None if isinstance(versions, str) else versions)
            for answer, versions in zip(answers, labelled, strict=True)
        )
        return GroupResult(
            index,
            responses,
            first,
            last,
            unproven=bool(unproven),
            pending=pending if len(unproven) == 1 else None,
            unreadable_versions=len(problems),
        )

    def _versions(
        self,
        answer: ServerAnswer,
        first: Pair,
        last: Pair,
        unproven: frozenset[str],
        pending: PendingProof | None,
    ) -> TokenVersions | str | None:
        """Return the versions of a response's tokens, None if the server names none, or why they cannot be read."""
        try:
            labelled = parse_spans(answer.versions, len(answer.response.tokens))
        except ValueError as error:
            return str(error)
        if not labelled:
            return None

        def named(label: str) -> Pair | None:
            is_start = label == UNTOLD and first == BEFORE_THE_FIRST
            return BEFORE_THE_FIRST if is_start else self._context.named(label)

        return versions_of(labelled, named, min(first, last), unproven, pending)

    def _await_usable(self, given_up: threading.Event) -> tuple[Pair, Running] | None:
        """Return the version with which work begins, and what the engine says then; wait for a load."""
        begin = time.monotonic()
        while True:
            running = self._context.running()
            pair = version_of(running, self._context.permitted())
            patience = self._settle if running.paused else min(self._settle, _CONFIRM)
            if pair is not None:
                return pair, running
            if time.monotonic() - begin > patience or given_up.wait(_PAUSE):
                return None

    def _answers(
        self, asked: GroupRequest, began: Running, given_up: threading.Event
    ) -> tuple[ServerAnswer, ...]:
        for attempt in range(self._retries + 1):
            if attempt and given_up.wait(backoff(attempt)):
                raise EngineUnreachableError("given up")
            try:
                named = self._adapter_api
                return self._answered(named(began.label) if named else self._choice.api(), asked)
            except (EngineUnreachableError, MalformedError) as error:
                if attempt == self._retries or isinstance(error, RefusedRequestError):
                    raise
            except UnsupportedServerError as error:
                raise ConfigError(str(error), path=self._server.address) from error
        raise AssertionError("the loop returns or raises")

    def _answered(self, api: ServerApi, asked: GroupRequest) -> tuple[ServerAnswer, ...]:
        answers: list[ServerAnswer] = []
        while missing := asked.samples - len(answers):
            part = replace(asked, samples=min(missing, self._most_samples or missing))
            reply = self._server.post_any(api.path, api.body(part))
            most = api.most_samples(reply)
            if most and most < part.samples:
                self._most_samples = most
                _LOG.info(
                    "groups_split", samples=asked.samples, most=most, reason="--max-num-seqs of the server"
                )
                continue
            answers += self._parsed(api, reply, part)
        return tuple(answers)

    def _parsed(self, api: ServerApi, reply: Reply, asked: GroupRequest) -> tuple[ServerAnswer, ...]:
        # A server that was restarted has no adapters until the follower has loaded one.
        is_gone = self._adapter_api is not None and api.lacks_adapter(reply)
        if is_gone or reply.status in _TRANSIENT or reply.status >= _SERVER_ERROR:
            raise EngineUnreachableError(self._server.complaint(reply))
        if reply.is_error:
            raise RefusedRequestError(self._server.complaint(reply))
        answers = api.parse(reply.json, asked)
        if (
            self._adapter_api is None
            and self._choice.requires_spans
            and any(answer.versions is None for answer in answers)
        ):
            raise UnsupportedServerError("the server does not report which version chose which token")
        return answers


class RefusedRequestError(MalformedError):
    """The server will never accept this request; its prompt is too long, for example."""


def backoff(attempt: int) -> float:
    """Return the seconds before a retry, spread so that explorers do not retry together."""
    return min(_BACKOFF * 2.0 ** (attempt - 1), _LONGEST) * _RANDOM.uniform(0.8, 1.2)


def served_model(server: HttpClient, key: str = "explorer.engine.model") -> str:
    """Return the name of a server's first model; `key` names one if the server does not."""
    models = server.get_json("/v1/models").get("data")
    first = models[0] if isinstance(models, list) and models else None
    name = first.get("id") if isinstance(first, dict) else None
    if not isinstance(name, str) or not name:
        raise ConfigError("the server names no model", path=server.address, hint=f"set {key}")
    return name


class ServerEngine(InferenceEngine):
    def __init__(self, file: JobFile) -> None:
        self._file, section = file, file.explorer.engine
        kind = _ADAPTER_HOOKS[section.kind] if file.model.publishes_adapters else section.kind
        self._token = api_key(section.token_env, "explorer.engine.token_env")
        address = f"{kind}={section.address}"
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
        section = self._file.explorer.engine
        server = HttpClient(
            section.address,
            token=self._token,
            timeout=section.timeout,
            ask_timeout=ASK,
            missing="explorer.engine.address is that of the server itself, without /v1",
            max_answer=MAX_ANSWER,
        )
        # In the fully asynchronous style versions are loaded while groups wait.
        settle = section.timeout if self._file.sync.style is SyncStyle.FULLY_ASYNC else _SETTLE
        model = section.model or served_model(server)
        return ServerGenerator(
            server,
            ApiChoice(server, section.kind, model, section.spans),
            context,
            concurrency=section.concurrency,
            retries=section.retries,
            settle=settle,
            adapter_api=_adapter_api(self.hook, model) if isinstance(self.hook, AdapterServerHook) else None,
        )


def _adapter_api(hook: AdapterServerHook, model: str) -> Callable[[str | None], ServerApi]:
    """Return what tells how the adapter with a label is asked: by its name; without a label, the model itself."""
    if isinstance(hook, SGLangLoraHook):
        return lambda label: SGLangGenerateApi(None if label is None else hook.name_of(label))
    return lambda label: CompletionsApi(model if label is None else hook.name_of(label))


def api_key(variable: str, key: str) -> str | None:
    """Return the API key in the environment variable that a key of the file names, None if it names none."""
    if not variable:
        return None
    secret = os.environ.get(variable, "").strip()
    if not secret:
        raise ConfigError(f"{key} names {variable}, which is not set", hint=f"export {variable}=...")
    return secret
