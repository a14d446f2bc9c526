"""How a server is asked for a group of responses, and how its answer is read.

Token ids in, token ids and their log-probs out. Every sampling setting is sent: a server takes a missing one from the
model directory, and the log-probs would be of another distribution.

`CompletionsApi` works with vLLM and SGLang and does not say which version chose which token. `VllmGenerateApi` and
`SGLangGenerateApi` do.
"""

import math
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import structlog

from explorer_hooks.http_client import HttpClient, Reply
from explorer_hooks.run.generation import GroupRequest, Response
from syncd.errors import ConfigError

SCALE_OUT = "start vLLM with --enable-scale-out"

_ASK = 10.0  # seconds that a question may take

_NOT_FOUND = 404
_CUT_OFF = "length"
_FINISHED = frozenset({"stop", _CUT_OFF})
_REFUSED_BODY = frozenset({400, 422})
"""What a server answers to a request without a prompt, on a path that it serves."""

_MOST_SAMPLES = re.compile(r"\bn must be at most the server's max_num_seqs \((\d+)\)")
"""What vLLM 0.32.0 says of a request for more responses than it takes."""

_WHOLE: Mapping[str, object] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""The settings with which tokens are drawn from the whole distribution."""

_LOG = structlog.get_logger()


class MalformedError(Exception):
    """An answer is not what a working server returns; a retry may succeed."""


class UnsupportedServerError(Exception):
    """The server does not return what is needed, and never will."""


class ServerAnswer(NamedTuple):
    """A response, and what the server says of the versions that chose its tokens; None if it says nothing."""

    response: Response
    versions: object = None


class ServerApi(ABC):
    path: ClassVar[str]

    @abstractmethod
    def body(self, asked: GroupRequest) -> dict[str, object]:
        """Return the body of a request for one group."""

    def lacks_adapter(self, reply: Reply) -> bool:
        """Return whether the server says that it has not the adapter that the request named."""
        return reply.status == _NOT_FOUND

    def most_samples(self, _reply: Reply) -> int | None:
        """Return how many responses one request may ask for, if the server refuses a request for asking for more."""
        return None

    def parse(self, document: object, asked: GroupRequest) -> tuple[ServerAnswer, ...]:
        """Return the responses of an answer; `document` is None if it is no JSON."""
        return tuple(self._answer(choice, asked) for choice in self._choices(document, asked))

    @abstractmethod
    def _choices(self, document: object, asked: GroupRequest) -> Sequence[object]:
        """Return the responses as the server has them."""

    @abstractmethod
    def _answer(self, choice: object, asked: GroupRequest) -> ServerAnswer:
        """Return one response."""


class CompletionsApi(ServerApi):
    """The completions API of vLLM 0.32.0 and of SGLang 0.5.23."""

    path: ClassVar[str] = "/v1/completions"

    def __init__(self, model: str) -> None:
        self._model = model

    def body(self, asked: GroupRequest) -> dict[str, object]:
        return {
            "model": self._model,
            "prompt": list(asked.prompt),
            "n": asked.samples,
            "max_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            **_WHOLE,
            "logprobs": 0,
            "return_token_ids": True,
            "stream": False,
        }

    def _choices(self, document: object, asked: GroupRequest) -> Sequence[object]:
        return _listed_choices(document, asked)

    def _answer(self, choice: object, asked: GroupRequest) -> ServerAnswer:
        _require_prompt(_optional(choice, "prompt_token_ids"), list(asked.prompt))
        values = _optional(_optional(choice, "logprobs"), "token_logprobs")
        return ServerAnswer(_response(choice, "token_ids", values, _optional(choice, "finish_reason"), asked))


class VllmGenerateApi(ServerApi):
    """vLLM's `/inference/v1/generate`, which a server has that was started with `--enable-scale-out`."""

    path: ClassVar[str] = "/inference/v1/generate"

    def __init__(self, model: str) -> None:
        self._model = model

    def body(self, asked: GroupRequest) -> dict[str, object]:
        drawn = {"n": asked.samples, "max_tokens": asked.max_tokens, "temperature": asked.temperature}
        return {
            "model": self._model,
            "token_ids": list(asked.prompt),
            "sampling_params": {**drawn, **_WHOLE, "logprobs": 0},
            "output_mode": "text",
            "return_token_ids": True,
            "stream": False,
        }

    def most_samples(self, reply: Reply) -> int | None:
        """Return `--max-num-seqs` of the server if its error names it; the other API of vLLM has no such bound."""
        match = _MOST_SAMPLES.search(str(reply.json)) if reply.is_error else None
        return int(match[1]) if match else None

    def _choices(self, document: object, asked: GroupRequest) -> Sequence[object]:
        _require_prompt(_optional(document, "prompt_token_ids"), list(asked.prompt))
        return _listed_choices(document, asked)

    def _answer(self, choice: object, asked: GroupRequest) -> ServerAnswer:
        content = _optional(_optional(choice, "logprobs"), "content")
        values = [_optional(entry, "logprob") for entry in content] if isinstance(content, list) else None
        response = _response(choice, "token_ids", values, _optional(choice, "finish_reason"), asked)
        return ServerAnswer(response, _optional(choice, "weight_versions"))


class SGLangGenerateApi(ServerApi):
    """SGLang's `/generate`, for an adapter; None stands for the model itself."""

    path: ClassVar[str] = "/generate"

    def __init__(self, adapter: str | None = None) -> None:
        self._adapter = adapter

    def body(self, asked: GroupRequest) -> dict[str, object]:
        drawn = {"n": asked.samples, "max_new_tokens": asked.max_tokens, "temperature": asked.temperature}
        return {
            **({} if self._adapter is None else {"lora_path": self._adapter}),
            "input_ids": list(asked.prompt),
            "sampling_params": {**drawn, **_WHOLE},
            "return_logprob": True,
            "stream": False,
        }

    def lacks_adapter(self, reply: Reply) -> bool:
        """Return whether the error names the adapter; other errors of SGLang are of the request itself."""
        return reply.is_error and self._adapter is not None and self._adapter in str(reply.json)

    def _choices(self, document: object, asked: GroupRequest) -> Sequence[object]:
        # One response comes as an object, several as a list.
        return _counted([document] if isinstance(document, dict) else document, asked)

    def _answer(self, choice: object, asked: GroupRequest) -> ServerAnswer:
        meta = _optional(choice, "meta_info")
        _require_prompt(_optional(meta, "prompt_tokens"), len(asked.prompt))
        pairs, reason = _optional(meta, "output_token_logprobs"), _optional(meta, "finish_reason")
        values = [_first(pair) for pair in pairs] if isinstance(pairs, list) else None
        response = _response(choice, "output_ids", values, _optional(reason, "type"), asked)
        return ServerAnswer(response, _optional(meta, "weight_versions"))


class ApiChoice:
    """Chooses how one server is asked, when it is asked for the first time. Any thread may use it.

    Args:
        spans: `auto`: the server is asked for the version of each token if it can name it; `required`: it is an error
            if it does not; `off`: it is not asked.
    """

    def __init__(
        self, server: HttpClient, kind: str, model: str, spans: Literal["auto", "required", "off"]
    ) -> None:
        self._server, self._kind, self._model, self._spans = server, kind, model, spans
        self._chosen: ServerApi | None = None
        self._lock = threading.Lock()

    @property
    def requires_spans(self) -> bool:
        return self._spans == "required"

    def api(self) -> ServerApi:
        with self._lock:
            self._chosen = self._chosen or self._choose()
            return self._chosen

    def _choose(self) -> ServerApi:
        if self._spans == "off":
            return CompletionsApi(self._model)
        if self._kind == "sglang":
            return SGLangGenerateApi()
        reason = self._why_not_generate()
        if not reason:
            return VllmGenerateApi(self._model)
        if self.requires_spans:
            raise ConfigError(
                f"the engine does not report which version chose which token: {reason}",
                path=self._server.address,
                hint=SCALE_OUT,
            )
        _LOG.info("token_versions_unavailable", reason=reason, hint=SCALE_OUT)
        return CompletionsApi(self._model)

    def _why_not_generate(self) -> str:
        """Return why vLLM cannot be asked by its own API, empty if it can."""
        try:
            reply = self._server.post_raw(VllmGenerateApi.path, {}, _ASK)
        except ConfigError as error:  # without the flag it answers 403
            return error.message
        return "" if reply.status in _REFUSED_BODY else self._server.complaint(reply)


def _listed_choices(document: object, asked: GroupRequest) -> Sequence[object]:
    if not isinstance(document, dict) or not isinstance(document.get("choices"), list):
        raise MalformedError("the answer has no choices")
    return _counted(document["choices"], asked)


def _counted(choices: object, asked: GroupRequest) -> Sequence[object]:
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise MalformedError("the answer has no choices")
    if len(choices) != asked.samples:
        raise MalformedError(f"{len(choices)} choices where {asked.samples} were asked for")
    return choices


def _response(choice: object, ids: str, values: object, reason: object, asked: GroupRequest) -> Response:
    if not isinstance(reason, str) or reason not in _FINISHED:
        raise MalformedError(f"a response ended with {reason!r}")
    tokens = _optional(choice, ids)
    if tokens is None:
        raise UnsupportedServerError("the server does not return token ids: vLLM 0.16 and SGLang 0.5.23 do")
    if not isinstance(values, list) or not all(_is_logprob(value) for value in values):
        raise MalformedError("token_logprobs is not a list of log-probs")
    if not (
        isinstance(tokens, list) and tokens and all(type(token) is int and token >= 0 for token in tokens)
    ):
        raise MalformedError(f"{ids} is not a list of token ids")
    if len(values) != len(tokens) or len(tokens) > asked.max_tokens:
        raise MalformedError(
            f"{len(values)} log-probs for {len(tokens)} tokens, of {asked.max_tokens} at most"
        )
    return Response(tokens, values, str(_optional(choice, "text") or ""), truncated=reason == _CUT_OFF)


def _require_prompt(echoed: object, prompt: object) -> None:
    if echoed is not None and echoed != prompt:
        raise UnsupportedServerError("the server has changed the prompt")


def _optional(holder: object, key: str) -> Any:
    return holder.get(key) if isinstance(holder, dict) else None


def _first(pair: object) -> object:
    return pair[0] if isinstance(pair, list) and pair else None


def _is_logprob(value: object) -> bool:
    # Kernels round: the log of a probability of one may come out a little above zero.
    return type(value) in (int, float) and math.isfinite(value) and value < 1.0  # type: ignore[arg-type, operator]
