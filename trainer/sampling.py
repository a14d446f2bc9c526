"""Makes the sample strategy that the configuration asks for, and turns texts into tokens. Rank 0 samples for all."""

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from syncd.errors import ConfigError
from syncd.jobfile.model import JobFile
from syncd.protocol.documents import parse_json
from syncd.protocol.layout import Job
from trainer.experience.batch import SampleStrategy
from trainer.experience.fifo import Fifo
from trainer.experience.sft import Examples, read_examples, stored_tokens
from trainer.experience.staleness import Staleness
from trainer.experience.store import ExperienceReader
from trainer.experience.strategies import Mix, Replay, Supervised
from trainer.plugins import SAMPLE_STRATEGY

SFT = "sft"
REPLAY = "replay"
MIX = "mix"
FIFO = "fifo"


def make_strategy(config: JobFile, job: Job) -> SampleStrategy:
    name = config.data.strategy or strategy_name(config)
    strategy = SAMPLE_STRATEGY.get(name)(config, job)
    if not isinstance(strategy, SampleStrategy):
        raise ConfigError(f"entry point {name!r} of {SAMPLE_STRATEGY.group} makes no SampleStrategy")
    return strategy


def strategy_name(config: JobFile) -> str:
    if config.algorithm.name == SFT:
        return SFT
    if config.data.sft_ratio:
        return MIX
    return REPLAY if config.data.replay.capacity else FIFO


def fifo(config: JobFile, job: Job) -> Fifo:
    data, interval = config.data, config.sync.interval
    staleness = Staleness(bound=data.max_age, beyond=data.beyond, decay=data.decay, interval=interval)
    return Fifo(ExperienceReader(job, consumed=data.consumed), data, staleness)


def replay(config: JobFile, job: Job) -> Replay:
    section = config.data.replay
    return Replay(fifo(config, job), capacity=section.capacity, share=section.share, seed=config.job.seed)


def mix(config: JobFile, job: Job) -> Mix:
    experiences = (replay if config.data.replay.capacity else fifo)(config, job)
    return Mix(experiences, _examples(config), ratio=config.data.sft_ratio)


def sft(config: JobFile, _job: Job) -> Supervised:
    data = config.data
    return Supervised(_examples(config), data.groups * data.group_size, data.epochs)


def _examples(config: JobFile) -> Examples:
    encode = Encoder(config.model.path, trust=config.model.trust_remote_code)
    data = config.data
    return Examples(read_examples(data.sft_path, encode, max_length=data.max_length), config.job.seed)


class Encoder:
    """Makes rows of a data set into tokens and prompt length; with `trust`, code that comes with the model may run.

    A row has `tokens` and `prompt_length`, or `prompt` and `response` as texts, or `messages`, of which the
    last one is learnt, with `tools` if the chat template shall name some. The end-of-sequence token follows a
    response that is text. A response of messages ends with the end-of-turn token of the chat template: what the
    template writes after it is left out, because no model generates it.
    """

    def __init__(self, model: str, *, trust: bool) -> None:
        self._model, self._trust = model, trust

    def __call__(self, row: Mapping[str, Any]) -> tuple[Sequence[int], int]:
        if "tokens" in row:
            return stored_tokens(row)
        prompt, response = self._messages(row) if "messages" in row else self._texts(row)
        return [*prompt, *response], len(prompt)

    def _texts(self, row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        prompt, response, tokenizer = row["prompt"], row["response"], self._tokenizer
        if tokenizer.eos_token_id is None:
            hint = 'write "eos_token" into its tokenizer_config.json, or give rows tokens and prompt_length'
            text = "the tokenizer has no end-of-sequence token, with which a response that is text ends"
            raise ConfigError(text, path=self._model, hint=hint)
        learnt = tokenizer.encode(response, add_special_tokens=False)
        return tokenizer.encode(prompt), [*learnt, tokenizer.eos_token_id]

    def _messages(self, row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        messages, tokenizer = [_as_templates_take(message) for message in row["messages"]], self._tokenizer
        options = {"tokenize": True, "return_dict": False, "tools": _parsed(row.get("tools"), list) or None}
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, **options)
        whole = tokenizer.apply_chat_template(messages, **options)
        if whole[: len(prompt)] != prompt:
            raise TypeError("the chat template changes the prompt when a response follows")
        return prompt, _turn(tokenizer, whole[len(prompt) :])

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._model, trust=self._trust)


def _as_templates_take(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its calls as objects: OpenAI's format has them as JSON text."""
    made = {name: value for name, value in message.items() if value is not None}
    if "tool_calls" in made:
        made["tool_calls"] = [
            {**call, "function": _with_object(call["function"])} for call in made["tool_calls"]
        ]
        made.setdefault("content", "")
    return made


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": _parsed(function.get("arguments"), dict)}


def _parsed(value: Any, kind: type) -> Any:
    try:
        parsed = parse_json(value) if isinstance(value, str) else value
    except ValueError:
        return value
    return parsed if isinstance(parsed, kind) else value


def _turn(tokenizer: Any, response: list[int]) -> list[int]:
    """Return a response up to its end-of-turn token: the first special token of those that only blanks follow."""
    added = tokenizer.added_tokens_decoder.items()
    special = {*tokenizer.all_special_ids, *(number for number, token in added if token.special)}
    end = len(response)
    for index in reversed(range(len(response))):
        if response[index] in special:
            end = index + 1
        elif tokenizer.decode([response[index]]).strip():
            break
    return response[:end]


def load_tokenizer(model: str, *, trust: bool = False) -> Any:
    if not os.path.isdir(model):
        raise ConfigError("not a model directory", path=model)
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds, and only texts need it

    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=trust)
    except Exception as error:  # whatever transformers makes of damaged files, and code of the model's own
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"no tokenizer could be loaded: {reason}", path=model) from error
