"""The layout of a broadcast: every byte in its place, the same on all sides."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncd.errors import CorruptDataError
from syncd.protocol.buckets import ALIGNMENT, plan_buckets

SHAPES = st.lists(
    st.tuples(st.sampled_from(["BF16", "F32", "U8"]), st.integers(0, 70)), min_size=1, max_size=9
)


def metas(shapes):
    return [(f"t{number}", dtype, (length,)) for number, (dtype, length) in enumerate(shapes)]


@given(SHAPES, st.integers(1, 100))
def test_tensors_do_not_overlap_and_buckets_cover_them_all(shapes, bucket):
    tensors = [*metas(shapes), ("last", "U8", (1,))]
    plan = plan_buckets(tensors, bucket)
    ends = 0
    for place in plan.slots:
        assert place.start >= ends
        assert place.start % ALIGNMENT == 0
        ends = place.end
    assert ends == plan.total
    cuts = list(plan.buckets())
    assert all(0 < end - start <= plan.bucket < bucket + ALIGNMENT for start, end in cuts)
    sent = [at for start, end in cuts for at in range(start, end)]
    assert sent == sorted(set(sent)), "no byte is sent twice"
    assert {at for place in plan.slots for at in range(place.start, place.end)} <= set(sent)


def test_different_bucket_plans_have_different_digests():
    base = [("a", "F32", (2, 3)), ("b", "F32", (4,))]
    others = [
        ([("a", "F32", (3, 2)), base[1]], 64),
        ([("c", "F32", (2, 3)), base[1]], 64),
        ([("a", "I32", (2, 3)), base[1]], 64),
        (base[::-1], 64),
        (base, 65),
    ]
    digests = {plan_buckets(*one).digest for one in [(base, 64), *others]}
    assert len(digests) == 6
    assert plan_buckets(list(base), 64).digest == plan_buckets(base, 64).digest


@pytest.mark.parametrize(
    ("tensors", "bucket"),
    [
        ([], 1),
        ([("a", "F32", (0,))], 1),
        ([("a", "F99", (1,))], 1),
        ([("a", "F32", (1,)), ("a", "F32", (1,))], 1),
        ([("a", "F32", (1,))], 0),
        ([("a", "F32", (1 << 60,))], 1),
    ],
)
def test_tensors_that_cannot_be_sent_are_refused(tensors, bucket):
    with pytest.raises(CorruptDataError):
        plan_buckets(tensors, bucket)
