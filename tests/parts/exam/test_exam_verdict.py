"""The verdict of an exam: whatever the numbers, a whole load passes and a kind that stayed is named if it is seen."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer_hooks.hook import ProbeAnswer
from explorer_hooks.parts.exam.exam import SEEN, Exam, noise_of
from syncd.protocol.probe import Probe

TOKENS = ((1, 2, 3, 4, 5),)
LONG = 1000.0
VALUES = st.lists(st.floats(-20, 0), min_size=4, max_size=4)
SHARES = st.lists(st.floats(-1, 1), min_size=4, max_size=4)


def exam_of(copied, kinds):
    return Exam(Probe(TOKENS, ((-LONG,) * 4,), "float32", "keep"), tuple(copied), kinds, 1, 0.0)


def answer(values):
    return ProbeAnswer((tuple(values),))


def near(values, shares, noise):
    """Return values that are off by at most the noise."""
    return [value + share * noise for value, share in zip(values, shares, strict=True)]


@given(VALUES, st.lists(VALUES, max_size=4), SHARES, st.floats(1e-5, 0.1))
def test_a_whole_load_passes_and_a_kind_that_stayed_fails_unless_it_is_listed(copied, others, shares, noise):
    exam = exam_of(copied, {f"kind {at}": tuple(values) for at, values in enumerate(others)})
    unseen = exam.unseen(noise)
    assert set(unseen) == {kind for kind, by in exam.distances().items() if by < SEEN * noise}
    if len(unseen) < len(others):
        assert exam.problem(answer(near(copied, shares, noise)), noise) == ""
    for kind in exam.kinds.keys() - set(unseen):
        assert exam.problem(answer(near(exam.kinds[kind], shares, noise)), noise) != ""


@given(VALUES, SHARES, st.floats(1e-5, 0.1), st.floats(0.5, 10), st.integers(0, 3))
def test_a_kind_that_stayed_is_named(copied, shares, noise, by, at):
    kinds = {f"kind {number}": [*copied] for number in range(4)}
    for number, values in enumerate(kinds.values()):
        values[number] -= 4 * max(by, SEEN * noise) + 1e-9
    exam = exam_of(copied, {kind: tuple(values) for kind, values in kinds.items()})
    stale = near(kinds[f"kind {at}"], shares, noise)
    assert exam.problem(answer(stale), noise).startswith(f"kind {at} stayed as it was")


@given(VALUES, st.floats(1e-5, 0.1))
def test_an_engine_that_has_loaded_nothing_is_told_from_one_that_has_loaded_a_part(copied, noise):
    exam = exam_of(copied, {"kind": tuple(value - 5 for value in copied)})
    assert "it has loaded nothing" in exam.problem(answer((-LONG,) * 4), noise)


@pytest.mark.parametrize("answered", [(), (math.nan,) * 4, (-math.inf,) * 4, (-1.0,) * 3])
def test_what_is_no_answer_fails(answered):
    exam = exam_of([-1.0] * 4, {"kind": (-2.0,) * 4})
    assert exam.problem(answer(answered), 1e-5) != ""


def test_a_stale_prefix_cache_fails_and_the_noise_of_one_token_does_not():
    exam = exam_of([-1.0] * 4, {"kind": (-2.0,) * 4})
    for off, fails in ((0.04, False), (0.2, True)):
        found = answer([-1.0] * 4)._replace(fresh=-1.0, cached=-1.0 - off)
        assert bool(exam.problem(found, 5e-3)) is fails


@pytest.mark.parametrize(
    ("mean", "dtype", "noise"),
    [(0.0, "float32", 1e-5), (0.0, "bfloat16", 5e-3), (0.02, "bfloat16", 0.02), (0.0, None, 5e-3)],
)
def test_the_noise_is_never_taken_for_less_than_that_of_the_dtype(mean, dtype, noise):
    assert noise_of(mean, dtype) == noise
