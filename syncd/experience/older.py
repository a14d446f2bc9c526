"""Rows of format 1 as the present model has them."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from syncd.errors import UsageError
from syncd.experience.model import Span


def from_format_1(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row of format 1: a whole rollout, of which nothing was to be proven.

    Its `token_steps` say no generation. The row's own is taken for all of them: of a rollout that a rewind
    interrupted, nobody recorded which tokens are of the later generation.

    Raises:
        UsageError: Its `token_steps` are not as long as the response.
    """
    fields = dict(fields)
    steps = fields.pop("token_steps")
    if steps is None:
        return fields
    if len(steps) != len(fields["logprobs"]):
        raise UsageError("not an experience: token_steps is not as long as the response")
    fields["spans"] = spans_of(steps, fields["generation"])
    fields["step"] = min([fields["step"], *steps])
    return fields


def spans_of(steps: Sequence[int], generation: int) -> tuple[Span, ...]:
    """Return the spans of response tokens whose steps are known one by one."""
    runs = groupby(enumerate(steps), key=lambda numbered: numbered[1])
    return tuple(Span(next(run)[0], generation, step) for step, run in runs)
