"""Examples of an SFT data set, in an order that a resumed run continues."""

import hashlib
import json
import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from syncd.errors import ConfigError, SyncdError, storage_error
from syncd.protocol.documents import parse_json
from trainer.experience.cursor import fields_of
from trainer.experience.limits import Limits

Encode = Callable[[Mapping[str, Any]], tuple[Sequence[int], int]]
"""Makes a row into tokens and prompt length; only the trainer has a tokenizer."""


@dataclass(frozen=True, slots=True)
class Example:
    """One example: the response after `prompt_length` tokens is what is learnt."""

    tokens: Sequence[int]
    prompt_length: int


def stored_tokens(row: Mapping[str, Any]) -> tuple[Sequence[int], int]:
    return row["tokens"], row["prompt_length"]


def read_examples(
    path: str, encode: Encode = stored_tokens, *, max_length: int | None = None
) -> tuple[Example, ...]:
    """Return the examples of a JSONL or Parquet file.

    A row of more than `max_length` tokens is cut at its end. A row whose prompt alone has as many leaves nothing to
    learn: it is skipped, and a warning counts such rows.
    """
    try:
        rows = _parquet(path) if path.endswith(".parquet") else _jsonl(path)
        examples = tuple(_example(row, number, path, encode) for number, row in enumerate(rows, 1))
    except OSError as error:
        raise storage_error(error, path) from error
    except (ValueError, pa.ArrowException) as error:
        raise ConfigError(f"not an SFT data set: {error}", path=path, hint="JSONL or .parquet") from None
    if not examples:
        raise ConfigError("an SFT data set without a row", path=path)
    return examples if max_length is None else _bounded(examples, max_length, path)


def _bounded(examples: Sequence[Example], max_length: int, path: str) -> tuple[Example, ...]:
    kept = tuple(
        Example(example.tokens[:max_length], example.prompt_length)
        for example in examples
        if example.prompt_length < max_length
    )
    longest, shortest = (pick(example.prompt_length for example in examples) for pick in (max, min))
    if not kept:
        raise ConfigError(
            f"no row of the SFT data set has room for a response within data.max_length = {max_length}:"
            f" the shortest prompt has {shortest} tokens",
            path=path,
            hint=f"--data.max_length {2 * longest}",
        )
    if skipped := len(examples) - len(kept):
        structlog.get_logger().warning(
            "sft_rows_skipped", path=path, skipped=skipped, rows=len(examples), max_length=max_length,
            longest_prompt=longest, reason="the prompt alone reaches data.max_length",
        )  # fmt: skip
    return kept


class Examples:
    """Endless examples: each epoch in an order that follows from the seed and its number."""

    KIND = "examples"

    def __init__(self, examples: Sequence[Example], seed: int = 0) -> None:
        self._examples, self._seed = examples, seed
        self._digest = _digest(examples)
        self._epoch, self._at = 0, 0
        self._order = self._shuffled()

    def __len__(self) -> int:
        return len(self._examples)

    @property
    def taken(self) -> int:
        return self._epoch * len(self._examples) + self._at

    def check(self, limits: Limits) -> None:
        for number, example in enumerate(self._examples, 1):
            if problem := limits.problem_of(example.tokens):
                hint = "make the rows with the tokenizer of model.path, or a lower data.max_length"
                raise ConfigError(f"example {number} of the SFT data set: {problem}", hint=hint)

    def draw(self, count: int) -> tuple[Example, ...]:
        return tuple(self._one() for _ in range(count))

    def state_dict(self) -> dict[str, Any]:
        return {"kind": self.KIND, "epoch": self._epoch, "at": self._at, "digest": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        fields = fields_of(state, self.KIND)
        if fields.text("digest") != self._digest:
            raise ConfigError(
                "the SFT data set, or what this release makes of its rows, has changed since the state was saved",
                hint="use the old one, or begin a new job with model.path = the newest full checkpoint of this one",
            )
        self._epoch, self._at = fields.integer("epoch"), fields.integer("at")
        self._order = self._shuffled()

    def _one(self) -> Example:
        if self._at >= len(self._order):
            self._epoch, self._at = self._epoch + 1, 0
            self._order = self._shuffled()
        self._at += 1
        return self._examples[self._order[self._at - 1]]

    def _shuffled(self) -> list[int]:
        order = list(range(len(self._examples)))
        random.Random(f"{self._seed}/{self._epoch}").shuffle(order)  # noqa: S311 -- no secret
        return order


def _jsonl(path: str) -> Iterable[Any]:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _parsed(line, number)


def _parsed(line: str, number: int) -> Any:
    try:
        return parse_json(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from None


def _parquet(path: str) -> Iterable[Any]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches():
            yield from batch.to_pylist()


def _example(row: Any, number: int, path: str, encode: Encode) -> Example:
    try:
        tokens, prompt_length = encode(row)
        packed = array("i", list(tokens))
    except SyncdError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a tokenizer or a chat template makes of a row
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"row {number} of the SFT data set is not an example: {reason}", path=path
        ) from None
    if type(prompt_length) is not int or not 0 < prompt_length < len(packed) or min(packed) < 0:
        raise ConfigError(f"row {number} of the SFT data set has no prompt or no response", path=path)
    return Example(packed, prompt_length)


def _digest(examples: Sequence[Example]) -> str:
    state = hashlib.sha256()
    for example in examples:
        state.update(f"{example.prompt_length}:{list(example.tokens)};".encode())
    return f"sha256:{state.hexdigest()}"
