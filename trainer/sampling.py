"""Samples as the configuration asks for them. Rank 0 samples; the other ranks get what it found."""

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from syncd.errors import ConfigError
from syncd.jobfile.sections import DataSection
from syncd.protocol.layout import Job
from trainer.config.model import JobConfig
from trainer.experience.batch import Batch, Strategy
from trainer.experience.cursor import fields_of
from trainer.experience.fifo import Fifo, Sampling
from trainer.experience.mix import Mix
from trainer.experience.replay import Replay
from trainer.experience.sft import Examples, read_examples, stored_tokens
from trainer.experience.staleness import Staleness
from trainer.experience.store import ExperienceReader


class Supervised:
    """The strategy of supervised training: examples only, for so many epochs.

    Args:
        examples: The data set.
        count: Examples of one step.
        epochs: Passes over the data set; 0 for no end.
    """

    KIND = "sft"

    def __init__(self, examples: Examples, count: int, epochs: int) -> None:
        self._examples, self._count, self._epochs = examples, count, epochs

    @property
    def over(self) -> bool:
        """Say whether all epochs are done."""
        return 0 < self._epochs * len(self._examples) <= self._examples.taken

    def sample(self, step: int, *, generation: int) -> Batch | None:  # noqa: ARG002 - examples have no age
        """Return the next examples, None once all epochs are done."""
        return None if self.over else Batch((), (), (), (), (), self._examples.take(self._count))

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data set."""
        return {"kind": self.KIND, "examples": self._examples.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a place."""
        self._examples.load_state_dict(fields_of(state, self.KIND).record("examples").document)

    def commit(self, state: Mapping[str, Any]) -> int:  # noqa: ARG002 - a data set is nobody's to let go
        """Let go of nothing."""
        return 0

    def metrics(self) -> dict[str, float]:
        """Return how many epochs are done."""
        return {"data/epoch": self._examples.taken / len(self._examples)}


def make_strategy(config: JobConfig, job: Job) -> Strategy:
    """Return the strategy that a configuration asks for.

    Raises:
        ConfigError: The data set is not one.
    """
    data, seed = config.data, config.job.seed
    rows = data.groups * data.group_size
    if config.algorithm.name == "sft":
        return Supervised(_examples(config), rows, data.epochs)
    fresh = Fifo(ExperienceReader(job, consumed=data.consumed), _sampling(data, config.sync.interval))
    strategy: Strategy = fresh
    if data.replay.capacity:
        strategy = Replay(fresh, capacity=data.replay.capacity, share=data.replay.share, seed=seed)
    if data.sft_ratio:
        strategy = Mix(strategy, _examples(config), ratio=data.sft_ratio)
    return strategy


def _sampling(data: DataSection, interval: int) -> Sampling:
    staleness = Staleness(bound=data.max_age, beyond=data.beyond, decay=data.decay, interval=interval)
    return Sampling(
        group_size=data.group_size,
        groups=data.groups,
        staleness=staleness,
        group_timeout=data.group_timeout,
        max_waiting=data.max_waiting,
    )


def _examples(config: JobConfig) -> Examples:
    encode = Encoder(config.model.path, trust=config.model.trust_remote_code)
    data = config.data
    return Examples(read_examples(data.sft_path, encode, max_length=data.max_length), config.job.seed)


class Encoder:
    """Makes rows of a data set into tokens and prompt length.

    A row has `tokens` and `prompt_length`, or `prompt` and `response` as texts, or `messages`, of which the
    last one is learnt. The end-of-sequence token follows a response that is text. A response of messages ends with
    the end-of-turn token of the chat template: what the template writes after it is left out, because no model
    generates it.

    Args:
        model: The model directory, whose tokenizer is used.
        trust: Whether code that comes with the model may run.
    """

    def __init__(self, model: str, *, trust: bool) -> None:
        self._model, self._trust = model, trust
        self._tokenizer: Any = None

    def __call__(self, row: Mapping[str, Any]) -> tuple[Sequence[int], int]:
        """Return the tokens of a row and how many of them are the prompt."""
        if "tokens" in row:
            return stored_tokens(row)
        prompt, response = self._messages(row) if "messages" in row else self._texts(row)
        return [*prompt, *response], len(prompt)

    def _texts(self, row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        prompt, response, tokenizer = row["prompt"], row["response"], self._loaded()
        learnt = tokenizer.encode(response, add_special_tokens=False)
        return tokenizer.encode(prompt), [*learnt, tokenizer.eos_token_id]

    def _messages(self, row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        messages, tokenizer = row["messages"], self._loaded()
        options = {"tokenize": True, "return_dict": False}
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, **options)
        whole = tokenizer.apply_chat_template(messages, **options)
        if whole[: len(prompt)] != prompt:
            raise TypeError("the chat template changes the prompt when a response follows")
        return prompt, _turn(tokenizer, whole[len(prompt) :])

    def _loaded(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._model, trust=self._trust)
        return self._tokenizer


def _turn(tokenizer: Any, response: list[int]) -> list[int]:
    """Return a response up to its end-of-turn token: the first special token of those that only blanks follow."""
    special, end = _special(tokenizer), len(response)
    for place in reversed(range(len(response))):
        if response[place] in special:
            end = place + 1
        elif tokenizer.decode([response[place]]).strip():
            break
    return response[:end]


def _special(tokenizer: Any) -> Collection[int]:
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(number for number, token in added if token.special)}


def load_tokenizer(model: str, *, trust: bool = False) -> Any:
    """Return the tokenizer of a model directory.

    Raises:
        ConfigError: It has none.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds, and only texts need it

    if not os.path.isdir(model):
        raise ConfigError("not a model directory", path=model)
    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer could be loaded: {error}", path=model) from error
