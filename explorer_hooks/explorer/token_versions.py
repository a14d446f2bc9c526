"""Which version chose each token of a response, as the engine itself tells it.

vLLM and SGLang give a response the list `weight_versions` of `{"version": LABEL, "start": N, "end": N}`: the weights
with this label chose the tokens from `start` up to, without, `end`.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from explorer_hooks.hooks.answers import member, typed
from syncd.experience.model import Span
from syncd.protocol.version import Pair


class LabelSpan(NamedTuple):
    """The weights with this label chose the tokens from `start` up to, without, `end`."""

    start: int
    end: int
    label: str


@dataclass(frozen=True, slots=True)
class TokenVersions:
    """The version of each token of a response.

    Args:
        spans: The versions, as an experience has them.
        unproven: For each token, whether its version is not known or was not proven; None if that holds for none.
    """

    spans: tuple[Span, ...]
    unproven: Sequence[bool] | None = None

    @property
    def oldest(self) -> Pair:
        """Return the oldest version that chose a token."""
        return min((span.generation, span.step) for span in self.spans)

    def first(self, count: int) -> "TokenVersions":
        """Return the versions of the first tokens alone."""
        unproven = None if self.unproven is None else self.unproven[:count]
        return TokenVersions(tuple(span for span in self.spans if span.start < count), unproven)


def parse_spans(found: object, length: int) -> tuple[LabelSpan, ...]:
    """Return what an engine says of a response's tokens, nothing if it says nothing.

    Args:
        found: Its `weight_versions`; None if there is none.
        length: The tokens of the response.

    Raises:
        ValueError: They are no spans that have each token once, in order.
    """
    if found is None:
        return ()
    spans, covered = [], 0
    for one in typed(found, list):
        span = LabelSpan(member(one, "start", int), member(one, "end", int), member(one, "version", str))
        if span.start != covered:
            raise ValueError(f"a span starts at token {span.start}, and those before it end at {covered}")
        if not span.start < span.end <= length:
            raise ValueError(f"a span from {span.start} to {span.end} in a response of {length} tokens")
        spans.append(span)
        covered = span.end
    if covered != length:
        raise ValueError(f"the spans end at token {covered}, and the response at {length}")
    return tuple(spans)


def versions_of(
    labelled: Sequence[LabelSpan],
    named: Callable[[str], Pair | None],
    oldest: Pair,
    unproven: Container[str],
) -> TokenVersions:
    """Return the versions that labels name.

    Args:
        labelled: The labels of all tokens of a response.
        named: Returns the version of this job that a label names, None if it names none.
        oldest: The oldest version that the engine may have run, which stands for labels that name none.
        unproven: The labels of weights that were not proven.
    """
    spans: list[Span] = []
    mask: list[bool] = []
    for start, end, label in labelled:
        pair = named(label)
        is_doubted = pair is None or label in unproven
        mask += [is_doubted] * (end - start)
        span = Span(start, *(oldest if pair is None else pair))
        if not spans or spans[-1][1:] != span[1:]:
            spans.append(span)
    return TokenVersions(tuple(spans), mask if any(mask) else None)
