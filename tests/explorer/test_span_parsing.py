"""What a server says of the versions of tokens is read whole or refused, whatever it is."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer_hooks.run.token_versions import LabelSpan, parse_spans, versions_of

OLD, NEW, OTHER = "1.4.0f1e2d3c4b5a6978", "1.5.ffffffffffffffff", "1.5.0000000000000000"
LABELS = st.sampled_from(["default", OLD, NEW, OTHER, "", "unknown"])
HOSTILE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | LABELS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["version", "start", "end", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@st.composite
def covers(draw):
    """Return the label of each token of a response, and the spans that a server would give of them."""
    sizes = draw(st.lists(st.tuples(LABELS, st.integers(1, 5)), min_size=1, max_size=6))
    labels, found = [], []
    for label, size in sizes:
        found.append({"version": label, "start": len(labels), "end": len(labels) + size})
        labels += [label] * size
    return labels, found


@settings(deadline=None)
@given(covers(), st.sets(LABELS))
def test_every_token_gets_the_version_that_its_label_names_and_no_other(cover, unproven):
    labels, found = cover
    named = {OLD: (1, 4), NEW: (1, 5)}
    versions = versions_of(parse_spans(found, len(labels)), named.get, (1, 3), unproven)
    ends = [span.start for span in versions.spans[1:]] + [len(labels)]
    pairs = []
    for span, end in zip(versions.spans, ends, strict=True):
        pairs += [(span.generation, span.step)] * (end - span.start)
    assert pairs == [named.get(label, (1, 3)) for label in labels]
    doubted = [label not in named or label in unproven for label in labels]
    assert versions.unproven == (doubted if any(doubted) else None)
    assert versions.oldest == min(pairs)
    assert all(one[1:] != other[1:] for one, other in zip(versions.spans, versions.spans[1:], strict=False))


@settings(deadline=None)
@given(covers(), st.randoms(use_true_random=False), HOSTILE)
def test_spans_that_do_not_have_each_token_once_and_in_order_are_refused(cover, chance, junk):
    labels, found = cover
    at, by = chance.randrange(len(found)), chance.choice([-2, -1, 1, 2, 1 << 70])
    changed = [dict(one) for one in found]
    how = chance.randrange(5)
    if how == 0:
        changed[at]["start"] += by
    elif how == 1:
        changed[at]["end"] += by
    elif how == 2:
        del changed[at]
    elif how == 3:
        changed.insert(at, changed[at])
    else:
        changed[at] = junk
    if not _covers(changed, len(labels)) and changed is not None:
        with pytest.raises(ValueError, match=r"[a-z]"):
            parse_spans(changed, len(labels))


@settings(deadline=None)
@given(HOSTILE, st.integers(1, 8))
def test_whatever_a_server_says_is_read_whole_or_refused(found, length):
    if found is None:
        assert parse_spans(found, length) == ()
    elif _covers(found, length):
        assert len(parse_spans(found, length)) == len(found)
    else:
        with pytest.raises(ValueError, match=r"^(?=.*[a-z]).{1,400}$"):
            parse_spans(found, length)


def _covers(found, length):
    """Return whether spans have each token once and in order, found in another way than the product does."""
    try:
        ends = [(one["start"], one["end"]) for one in found]
        texts = all(isinstance(one["version"], str) for one in found)
    except (TypeError, KeyError):
        return False
    if not texts or any(type(part) is not int or not 0 <= part <= length for pair in ends for part in pair):
        return False
    tokens = [token for start, end in ends for token in range(start, end)]
    return tokens == list(range(length)) and all(start < end for start, end in ends)


def test_a_long_response_of_many_versions_is_read_in_linear_time():
    found = [{"version": OLD if at % 2 else NEW, "start": at, "end": at + 1} for at in range(1 << 16)]
    random.Random(1).shuffle(found)
    with pytest.raises(ValueError, match="a span starts at token"):
        parse_spans(found, 1 << 16)
    found.sort(key=lambda one: one["start"])
    assert parse_spans(found, 1 << 16)[-1] == LabelSpan(65535, 65536, OLD)
