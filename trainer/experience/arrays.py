"""Batches as numpy arrays: padded rectangles, or jagged values with offsets."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from syncd.experience.model import Experience
from trainer.experience.batch import Batch
from trainer.experience.sft import Example

Arrays = dict[str, NDArray[Any]]


def padded(batch: Batch, pad: int = 0) -> Arrays:
    """Return a batch's experiences in rectangles, all aligned with the tokens and padded on the right.

    `input_ids`, `attention_mask`, `response_mask` (what is learnt: the model chose it, and its version is not
    unproven), `logprobs`, `teacher_logprobs` and `turn_rewards` (at the last token of each turn), both 0 where
    there is none, and by row what `rows` returns.
    """
    experiences = batch.experiences
    return {
        "input_ids": _rectangle([_tokens(e) for e in experiences], np.int32, pad),
        "attention_mask": _rectangle([np.ones(len(e.tokens), bool) for e in experiences], bool, 0),
        "response_mask": _rectangle([_aligned(e, _mask(e)) for e in experiences], bool, 0),
        "logprobs": _rectangle([_aligned(e, _logprobs(e)) for e in experiences], np.float32, 0),
        "teacher_logprobs": _rectangle([_aligned(e, _teacher(e)) for e in experiences], np.float32, 0),
        "turn_rewards": _rectangle([_aligned(e, _turn_rewards(e)) for e in experiences], np.float32, 0),
        **rows(batch),
    }


def jagged(batch: Batch) -> Arrays:
    """Return a batch's experiences end to end: `offsets` bound the rows of `tokens`, `response_offsets` the rest."""
    experiences = batch.experiences
    return {
        "tokens": _joined([_tokens(e) for e in experiences], np.int32),
        "offsets": _offsets([len(e.tokens) for e in experiences]),
        "response_mask": _joined([_mask(e) for e in experiences], bool),
        "logprobs": _joined([_logprobs(e) for e in experiences], np.float32),
        "teacher_logprobs": _joined([_teacher(e) for e in experiences], np.float32),
        "turn_rewards": _joined([_turn_rewards(e) for e in experiences], np.float32),
        "response_offsets": _offsets([len(e.logprobs) for e in experiences]),
        **rows(batch),
    }


def rows(batch: Batch) -> Arrays:
    """Return what a batch has once a row.

    `group` and `rollout` number the groups and rollouts from 0; rows of one rollout are its segments and repeat its
    `reward`. `age` is -1 where there is none. `has_teacher` and `has_turns` say which rows have log-probs of a
    teacher and rewards of turns.
    """
    experiences = batch.experiences
    return {
        "prompt_length": np.array([e.prompt_length for e in experiences], np.int32),
        "reward": np.array([e.reward for e in experiences], np.float32),
        "weight": np.array(batch.weights, np.float32),
        "age": np.array([-1 if age is None else age for age in batch.ages], np.int64),
        "group": np.array(batch.groups, np.int64),
        "rollout": np.array(batch.rollouts, np.int64),
        "has_teacher": np.array([e.teacher_logprobs is not None for e in experiences], bool),
        "has_turns": np.array([e.turn_rewards is not None for e in experiences], bool),
    }


def padded_examples(examples: Sequence[Example], pad: int = 0) -> Arrays:
    """Return SFT examples in rectangles padded on the right; `loss_mask` is what is learnt."""
    tokens = [_tokens(example) for example in examples]
    learnt = [np.arange(len(e.tokens)) >= e.prompt_length for e in examples]
    return {
        "input_ids": _rectangle(tokens, np.int32, pad),
        "attention_mask": _rectangle([np.ones(len(row), bool) for row in tokens], bool, 0),
        "loss_mask": _rectangle(learnt, bool, 0),
    }


def _tokens(item: Experience | Example) -> NDArray[Any]:
    return np.asarray(item.tokens, np.int32)


def _mask(experience: Experience) -> NDArray[Any]:
    return np.array(list(experience.learnt), bool)


def _logprobs(experience: Experience) -> NDArray[Any]:
    return np.asarray(experience.logprobs, np.float32)


def _teacher(experience: Experience) -> NDArray[Any]:
    if experience.teacher_logprobs is None:
        return np.zeros(len(experience.logprobs), np.float32)
    return np.asarray(experience.teacher_logprobs, np.float32)


def _turn_rewards(experience: Experience) -> NDArray[Any]:
    rewards = np.zeros(len(experience.logprobs), np.float32)
    for end, reward in experience.turn_rewards or ():
        rewards[end - 1] = reward
    return rewards


def _aligned(experience: Experience, values: NDArray[Any]) -> NDArray[Any]:
    """Return values of a response with zeros for its prompt."""
    return np.concatenate([np.zeros(experience.prompt_length, values.dtype), values])


def _rectangle(values: Sequence[NDArray[Any]], kind: Any, fill: int) -> NDArray[Any]:
    width = max(map(len, values), default=0)
    filled: NDArray[Any] = np.full((len(values), width), fill, kind)
    for row, value in zip(filled, values, strict=True):
        row[: len(value)] = value
    return filled


def _joined(values: Sequence[NDArray[Any]], kind: Any) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, kind), *values])


def _offsets(lengths: Sequence[int]) -> NDArray[Any]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
