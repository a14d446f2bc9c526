"""A served model as the teacher of distillation: its log-prob of each token of each response.

The teacher reads the policy's token ids, so both must mean the same tokens by them; that is checked at the start.
"""

import threading
from collections.abc import Callable, Sequence
from collections.abc import Generator as Iterated
from contextlib import closing
from dataclasses import replace
from typing import TypeVar

import structlog

from explorer_hooks.http_client import HttpClient
from explorer_hooks.parts.evaluation.tables import TeacherSection
from explorer_hooks.proof.server_probes import CompletionsProbe, GenerateProbe, ServerProbe
from explorer_hooks.run.asking import TICK, AskingThreads
from explorer_hooks.run.generation import Generator, GroupRequest, GroupResult, Sampling
from explorer_hooks.run.served import ASK, MAX_ANSWER, api_key, backoff, served_model
from explorer_hooks.run.tokens import Tokens
from syncd.errors import ConfigError, EngineUnreachableError, LoadFailedError
from syncd.jobfile.model import JobFile

_LOG = structlog.get_logger()

T = TypeVar("T")


class Teacher:
    def __init__(self, section: TeacherSection, tokens: Tokens) -> None:
        self._section, self._vocabulary, at_start = section, tokens.size, threading.Event()
        self._server = server = HttpClient(
            section.address,
            token=api_key(section.token_env, "explorer.teacher.token_env"),
            timeout=section.timeout,
            ask_timeout=ASK,
            missing="explorer.teacher.address is that of the server itself, without /v1",
            max_answer=MAX_ANSWER,
        )
        key = "explorer.teacher.model"
        self.name = section.model or self._patiently(lambda: served_model(server, key), at_start)
        self._patiently(lambda: _require_same_tokens(server, self.name, tokens), at_start)
        is_vllm = section.kind == "vllm"
        if is_vllm:
            self._patiently(lambda: _require_no_adapters(server), at_start)
        self._probe: ServerProbe = CompletionsProbe(server, self.name) if is_vllm else GenerateProbe(server)

    @property
    def concurrency(self) -> int:
        return self._section.concurrency

    def taught(self, result: GroupResult, prompt: Sequence[int], given_up: threading.Event) -> GroupResult:
        """Return a group with the teacher's log-probs of its responses, or with why they are missing."""
        try:
            log_probs = self._log_probs(prompt, [response.tokens for response in result.responses], given_up)
        except (EngineUnreachableError, LoadFailedError) as error:
            _LOG.warning("teacher_failed", teacher=self.name, reason=error.message)
            return replace(
                result,
                untaught=f"the teacher gives no log-probs: {error.message}",
                needs_teacher=self._section.required,
            )
        pairs = zip(result.responses, log_probs, strict=True)
        responses = tuple(replace(response, teacher_logprobs=values) for response, values in pairs)
        return replace(result, responses=responses, teacher=self.name)

    def _log_probs(
        self, prompt: Sequence[int], responses: Sequence[Sequence[int]], given_up: threading.Event
    ) -> list[tuple[float, ...]]:
        """Return the log-prob of each token of each response to a prompt, at temperature 1."""
        rows = [[*prompt, *tokens] for tokens in responses]
        largest = max(map(max, rows))
        if largest >= self._vocabulary:  # SGLang 0.5.23 ends at a token beyond its embedding
            raise LoadFailedError(f"the tokenizer has no token {largest}")
        answers = self._patiently(lambda: self._probe.log_probs(rows), given_up)
        return [values[len(prompt) - 1 :] for values in answers]

    def _patiently(self, ask: Callable[[], T], given_up: threading.Event) -> T:
        """Return an answer; what failed is asked again, a bounded number of times."""
        for attempt in range(self._section.retries + 1):
            if attempt and given_up.wait(backoff(attempt)):
                raise EngineUnreachableError("given up", path=self._server.address)
            try:
                return ask()
            except (EngineUnreachableError, LoadFailedError):
                if attempt == self._section.retries:
                    raise
        raise AssertionError("the loop returns or raises")


def open_teacher(file: JobFile, tokens: Tokens) -> Callable[[Sampling], Sampling] | None:
    """Return what has the teacher of a file read all that is sampled; None if the file has none."""
    section = file.explorer.part(TeacherSection)
    if not section.address:
        return None
    teacher = Teacher(section, tokens)

    def taught(sampling: Sampling) -> Sampling:
        generator = TaughtGenerator(sampling.generator, teacher, sampling.stop)
        return replace(sampling, generator=generator)

    return taught


class TaughtGenerator(Generator):
    """Gives each group of another generator to the teacher; unread ones are given up once `stop` returns true."""

    def __init__(self, inner: Generator, teacher: Teacher, stop: Callable[[], bool]) -> None:
        self._inner, self._teacher, self._stop = inner, teacher, stop

    def generate(self, requests: Sequence[GroupRequest]) -> "Iterated[GroupResult | None]":
        """Yield each result once, as soon as the teacher has read it, and None every so often."""
        threads = min(self._teacher.concurrency, len(requests))
        with (
            AskingThreads(self._taught, threads, "the teacher") as reading,
            closing(self._inner.generate(requests)) as results,
        ):
            for result in results:
                if result is None or result.problem:
                    yield result
                else:
                    reading.put((result, requests[result.index].prompt))
                yield from iter(reading.next, None)
            while reading.is_pending and not self._stop():
                yield reading.next(TICK)

    def _taught(self, asked: tuple[GroupResult, Sequence[int]], given_up: threading.Event) -> GroupResult:
        return self._teacher.taught(*asked, given_up)


def _require_no_adapters(server: HttpClient) -> None:
    """Return if a vLLM lists no adapters: one that serves some may end at a request for log-probs of a prompt."""
    cards = server.get_json("/v1/models").get("data")
    if isinstance(cards, list) and any(isinstance(card, dict) and card.get("parent") for card in cards):
        raise ConfigError(
            "the teacher serves adapters, and vLLM may end at a request for the log-probs of a prompt then",
            path=server.address,
            hint="start it without --enable-lora, on a model into which the adapter was merged",
        )


def _require_same_tokens(server: HttpClient, model: str, tokens: Tokens) -> None:
    """Return if a server's tokenizer gives the ids that the policy's does, for a text of all its tokens."""
    text = "\n".join(tokens.raw_text([token]) for token in range(tokens.size))
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    hint = "a teacher reads token ids: it must have the tokenizer of model.path"
    reply = server.post_any("/tokenize", body)
    ids = (reply.document or {}).get("tokens")
    if reply.is_error or not isinstance(ids, list):
        raise ConfigError(
            f"the teacher does not return its tokens: {server.complaint(reply)}",
            path=server.address,
            hint=hint,
        )
    own = tokens.ids_of(text)
    if ids != own:
        pairs = zip(ids, own, strict=False)
        where = next(
            (f"token {theirs} where the policy has {ours}" for theirs, ours in pairs if theirs != ours),
            f"{len(ids)} tokens where the policy has {len(own)}",
        )
        raise ConfigError(
            f'the tokenizer of the teacher "{model}" differs: {where}', path=server.address, hint=hint
        )
