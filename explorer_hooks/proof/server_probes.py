"""How hooks ask an engine for the log-probs of a probe, and read its answer strictly.

Two requests make one answer. The first is an ordinary one: a long prompt and one token to generate, for which the
engine uses what its prefix cache has of this prompt, since that was asked with the version before as well. The second
asks for the log-probs of the prompts themselves, for which vLLM and SGLang compute every key and value again; the
long prompt with the generated token is one of them. If that token has another log-prob there, the cache holds keys
and values of other weights. Where nobody asks about the cache, the second request alone is made, without the long
prompt.
"""

import itertools
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from explorer_hooks.hook import ProbeAnswer
from explorer_hooks.http_client import HttpClient
from explorer_hooks.strict_json import listed, log_prob, member, typed
from syncd.errors import LoadFailedError

Rows = Sequence[Sequence[int]]
"""Sequences of token ids."""

SWITCH_OFF = "an engine that cannot answer probes: --hook-option probe=false"

_GREEDY: Mapping[str, object] = {"temperature": 0, "repetition_penalty": 1.0}
_RANK = "X-data-parallel-rank"
"""The header by which a request to vLLM names the replica that answers."""
_BLOCK = 128
"""The tokens of the largest usual block of a prefix cache, which holds no part of a block."""
_BEYOND = 16
_SHORTEST = 80
"""Tokens of the prompt that checks the cache: so many behind a block, and so many at least."""
_RESERVED = 16
"""Tokens of a model's longest sequence that engines keep for themselves and for what is generated."""
_DTYPES = {
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
}
_MOST_IDS = 128
"""The most tokens whose log-probs vLLM gives at one position."""


class NextToken(NamedTuple):
    token: int
    logprob: float


class ServerProbe(ABC):
    """Asks one server for log-probs; a block of its cache has at most `block_size` tokens."""

    def __init__(self, server: HttpClient, block_size: int = _BLOCK) -> None:
        self._server, self._block_size = server, block_size

    @abstractmethod
    def log_probs(self, rows: Rows) -> tuple[tuple[float, ...], ...]:
        """Return the log-prob of each token after the first of each row, computed without the prefix cache."""

    @abstractmethod
    def next_token(self, prompt: Sequence[int]) -> NextToken:
        """Return the likeliest token after a prompt, computed with the prefix cache."""

    def answer(self, tokens: Rows, *, with_cache: bool = True) -> ProbeAnswer:
        """Return the answer to a probe; `with_cache`: the prefix cache is checked too, if the model can read so much.

        With a block of 128 tokens the check takes 288 tokens beside the probe's 64.
        """
        prompt = self._long_prompt(tokens) if with_cache else []
        if not prompt:
            return ProbeAnswer(self.log_probs(tokens))
        chosen = self.next_token(prompt)
        logprobs, fresh = self._fresh(tokens, prompt, chosen.token)
        return ProbeAnswer(logprobs, fresh, chosen.logprob)

    def _fresh(
        self, tokens: Rows, prompt: Sequence[int], token: int
    ) -> tuple[tuple[tuple[float, ...], ...], float]:
        *answers, long = self.log_probs([*tokens, [*prompt, token]])
        return tuple(answers), long[-1]

    def _long_prompt(self, tokens: Rows) -> list[int]:
        """Return a prompt of more than a block, none if the model cannot read one."""
        length, longest = max(self._block_size + _BEYOND, _SHORTEST), longest_sequence(self._server)
        if longest is not None:
            length = min(length, longest - _RESERVED)
        return list(itertools.islice(itertools.cycle(itertools.chain(*tokens)), max(length, 0)))


class CompletionsProbe(ServerProbe):
    """Asks vLLM by its API for completions: the adapter `model`, None for the model itself."""

    _path = "/v1/completions"

    def __init__(self, server: HttpClient, model: str | None = None, block_size: int = 0) -> None:
        super().__init__(server, block_size or _BLOCK)
        self._model: Mapping[str, object] = {} if model is None else {"model": model}

    def log_probs(self, rows: Rows) -> tuple[tuple[float, ...], ...]:
        """Return the log-probs of prompts. vLLM reads no cache for a request that asks for them."""
        answer = self._ask([list(row) for row in rows], prompt_logprobs=0)
        with understood(self._server, self._path):
            pairs = zip(_choices(answer, len(rows)), rows, strict=True)
            return tuple(_row_of_choice(choice, row) for choice, row in pairs)

    def next_token(self, prompt: Sequence[int]) -> NextToken:
        answer = self._ask(list(prompt), logprobs=1, return_token_ids=True, ignore_eos=True)
        with understood(self._server, self._path):
            (choice,) = listed(answer, "choices", 1)
            (token,) = listed(choice, "token_ids", 1)
            (logprob,) = listed(member(choice, "logprobs", dict), "token_logprobs", 1)
            return NextToken(typed(token, int), log_prob(logprob))

    def _ask(self, prompt: list[Any], **more: object) -> dict[str, Any]:
        body = {**self._model, "prompt": prompt, "max_tokens": 1, **_GREEDY, **more}
        return self._server.post(self._path, body, hint=f"see the log of the vLLM server; {SWITCH_OFF}")


class AdapterCompletionsProbe(CompletionsProbe):
    """Asks a vLLM that was started with `--enable-lora`, for the model itself or for an adapter.

    Where its model's head can have an adapter (Llama, Mistral, Qwen3 and others), vLLM 0.32.0 ends at a request for
    the log-probs of a prompt: it applies the head's adapter, which may be none, to one row for each request, and gets
    one for each token. So each token is asked for as the next one of the tokens before it.
    """

    def log_probs(self, rows: Rows) -> tuple[tuple[float, ...], ...]:
        asked = [(row[:at], row[at]) for row in rows for at in range(1, len(row))]
        parts = [asked[at : at + _MOST_IDS] for at in range(0, len(asked), _MOST_IDS)]
        values = itertools.chain.from_iterable(map(self._following, parts))
        return tuple(tuple(itertools.islice(values, len(row) - 1)) for row in rows)

    def _fresh(
        self, tokens: Rows, prompt: Sequence[int], token: int
    ) -> tuple[tuple[tuple[float, ...], ...], float]:
        return self.log_probs(tokens), self._following([(prompt, token)])[0]

    def _following(self, asked: Sequence[tuple[Sequence[int], int]]) -> list[float]:
        """Return the log-prob of each token after the tokens before it, computed without what the cache has."""
        answer = self._ask(
            [list(before) for before, _ in asked],
            logprobs=1,
            logprob_token_ids=sorted({token for _, token in asked}),
            return_tokens_as_token_ids=True,
            cache_salt=uuid.uuid4().hex,
        )
        with understood(self._server, self._path):
            pairs = zip(_choices(answer, len(asked)), asked, strict=True)
            return [_following(choice, token) for choice, (_, token) in pairs]


class GenerateProbe(ServerProbe):
    """Asks SGLang by its own API; `replica` is None if there is one alone, `adapter` for the model itself."""

    _path = "/generate"

    def __init__(self, server: HttpClient, replica: int | None = None, adapter: str | None = None) -> None:
        super().__init__(server)
        self._replica = replica
        self._adapter: Mapping[str, object] = {} if adapter is None else {"lora_path": adapter}

    def log_probs(self, rows: Rows) -> tuple[tuple[float, ...], ...]:
        """Return the log-probs of prompts from their start. SGLang reads no cache behind where these begin."""
        answers = self._ask([list(row) for row in rows], logprob_start_len=0)
        with understood(self._server, self._path):
            if len(typed(answers, list)) != len(rows):
                raise ValueError(f"{len(answers)} answers to {len(rows)} prompts")
            for answer in answers:
                self._require_replica(answer)
            return tuple(_row_of_answer(*pair) for pair in zip(answers, rows, strict=True))

    def next_token(self, prompt: Sequence[int]) -> NextToken:
        answer = self._ask(list(prompt))
        with understood(self._server, self._path):
            self._require_replica(answer)
            (pair,) = listed(member(answer, "meta_info", dict), "output_token_logprobs", 1)
            return NextToken(member(pair, 1, int), log_prob(member(pair, 0, object)))

    def _require_replica(self, answer: object) -> None:
        """Return if the replica that was asked has answered: what does not know the request's field ignores it."""
        if self._replica is None:
            return
        replica = member(member(answer, "meta_info", dict), "dp_rank", int)
        if replica != self._replica:
            raise ValueError(f"replica {self._replica} was asked, and {replica} has answered")

    def _ask(self, prompt: list[Any], **more: object) -> Any:
        if self._replica is not None:
            more["routed_dp_rank"] = self._replica
        sampling = {**_GREEDY, "max_new_tokens": 1, "ignore_eos": True}
        asked = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        body = {**self._adapter, **asked, **more}
        reply = self._server.post_any(self._path, body)
        if reply.is_error:
            hint = f"see the log of the SGLang server; {SWITCH_OFF}"
            raise LoadFailedError(self._server.complaint(reply), path=self._server.address, hint=hint)
        return reply.json


def longest_sequence(server: HttpClient) -> int | None:
    """Return how many tokens a server's model can read, None if it does not say."""
    reply = server.get_any("/v1/models")
    cards = (reply.document or {}).get("data") if not reply.is_error else None
    lengths = (
        [card.get("max_model_len") for card in cards if isinstance(card, dict)]
        if isinstance(cards, list)
        else []
    )
    return min((length for length in lengths if type(length) is int), default=None)


def each_replica(server: HttpClient, replicas: int) -> list[HttpClient]:
    """Return a client of each data-parallel replica behind a vLLM server."""
    if replicas == 1:
        return [server]
    return [server.sending({_RANK: str(rank)}) for rank in range(replicas)]


def dtype_word(dtype: object) -> str | None:
    """Return the dtype that an engine names, by its name in torch; None if it is none."""
    return _DTYPES.get(str(dtype).removeprefix("torch."))


def rounding_flags(dtype: object, quantization: object, cache: object) -> str:
    """Return the flags by which an engine rounds further than its dtype does, empty if there are none.

    Args:
        quantization: How its weights are quantised, None if they are not.
        cache: The dtype of its keys and values as it names it; None, or `auto`: that of the model.
    """
    flags = [f"--quantization {quantization}"] if quantization else []
    if cache not in (None, "auto") and dtype_word(cache) != dtype_word(dtype):
        flags.append(f"--kv-cache-dtype {cache}")
    return " ".join(flags)


def require_known_tokens(tokens: Rows, vocabulary: int | None) -> None:
    """Return if a model has an embedding of each token of a probe: a token beyond it ends SGLang 0.5.23's server."""
    largest = max(itertools.chain(*tokens), default=0)
    if vocabulary is not None and largest >= vocabulary:
        raise LoadFailedError(
            f"the probe has token {largest}, and the model has {vocabulary} tokens",
            hint="the probe is of another model: make it from the model that is trained",
        )


@contextmanager
def understood(server: HttpClient, path: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise LoadFailedError(
            f"{path} is not answered with the log-probs of the probe: {error}",
            path=server.address,
            hint=SWITCH_OFF,
        ) from error


def _choices(answer: object, count: int) -> list[object]:
    choices = listed(answer, "choices", count)
    indices = [member(choice, "index", int) for choice in choices]
    if sorted(indices) != list(range(count)):
        raise ValueError(f"choices {indices}")
    return [choices[indices.index(at)] for at in range(count)]


def _following(choice: object, token: int) -> float:
    (position,) = listed(member(choice, "logprobs", dict), "top_logprobs", 1)
    return log_prob(member(position, f"token_id:{token}", object))


def _row_of_choice(choice: object, row: Sequence[int]) -> tuple[float, ...]:
    """Return the log-probs in what vLLM says of a prompt: of each position those of some tokens."""
    positions = listed(choice, "prompt_logprobs", len(row))
    entries = [
        member(position, str(token), dict) for position, token in zip(positions[1:], row[1:], strict=True)
    ]
    return tuple(log_prob(member(entry, "logprob", object)) for entry in entries)


def _row_of_answer(answer: object, row: Sequence[int]) -> tuple[float, ...]:
    """Return the log-probs in what SGLang says of a prompt: of each position log-prob, token and text."""
    pairs = listed(member(answer, "meta_info", dict), "input_token_logprobs", len(row))
    if [member(pair, 1, int) for pair in pairs] != list(row):
        raise ValueError("the log-probs are of other tokens")
    return tuple(log_prob(member(pair, 0, object)) for pair in pairs[1:])
