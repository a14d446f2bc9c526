"""Which version chose each token of a response, as the engine itself tells it.

vLLM and SGLang give a response the list `weight_versions` of `{"version": LABEL, "start": N, "end": N}`: the weights
with this label chose the tokens from `start` up to, without, `end`.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from explorer_hooks.hook import PendingProof, Unproven
from explorer_hooks.strict_json import member, typed
from syncd.experience.model import Span
from syncd.protocol.version import Pair


class LabelSpan(NamedTuple):
    start: int
    end: int
    label: str


@dataclass(frozen=True, slots=True)
class TokenVersions:
    spans: tuple[Span, ...]  # the versions, as an experience has them
    # For each token, whether its version is not known or was not proven; None if that holds for none.
    unproven: Sequence[bool] | None = None
    # The probe that had no answer yet when the response ended; None if there was none.
    pending: PendingProof | None = None
    unproven_if_passed: Sequence[bool] | None = None  # `unproven` if that probe passes

    @property
    def oldest(self) -> Pair:
        return min((span.generation, span.step) for span in self.spans)

    def settled(self, loads: Mapping[str, Unproven]) -> "TokenVersions":
        """Return the versions once a pending proof has passed; else, and while it has not, they stay doubted."""
        if self.pending is None or not self.pending.has_passed(loads):
            return self
        return TokenVersions(self.spans, self.unproven_if_passed)

    def first(self, count: int) -> "TokenVersions":
        masks = (self.unproven, self.unproven_if_passed)
        unproven, if_passed = (None if mask is None else mask[:count] for mask in masks)
        spans = tuple(span for span in self.spans if span.start < count)
        return TokenVersions(spans, unproven, self.pending, if_passed)


def parse_spans(value: object, length: int) -> tuple[LabelSpan, ...]:
    """Return what an engine says of a response's tokens, nothing if it says nothing."""
    if value is None:
        return ()
    spans, covered = [], 0
    for entry in typed(value, list):
        span = LabelSpan(
            member(entry, "start", int), member(entry, "end", int), member(entry, "version", str)
        )
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
    pending: PendingProof | None = None,
) -> TokenVersions:
    """Return the versions that labels name.

    Args:
        named: Returns the version of this job that a label names, None if it names none.
        oldest: The oldest version that the engine may have run, which stands for labels that name none.
        pending: The probe by which one of them may yet be.
    """
    spans: list[Span] = []
    mask: list[bool] = []
    if_passed: list[bool] = []
    for start, end, label in labelled:
        pair = named(label)
        is_doubted = pair is None or label in unproven
        mask += [is_doubted] * (end - start)
        waits = pair is not None and pending is not None and label == pending.label
        if_passed += [is_doubted and not waits] * (end - start)
        span = Span(start, *(oldest if pair is None else pair))
        if not spans or spans[-1][1:] != span[1:]:
            spans.append(span)
    versions = TokenVersions(tuple(spans), mask if any(mask) else None)
    if mask == if_passed:
        return versions
    return replace(versions, pending=pending, unproven_if_passed=if_passed if any(if_passed) else None)
