"""Deltas: their header, and the chain to a keyframe."""

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncd.errors import CorruptDataError
from syncd.protocol.documents import Fields
from syncd.protocol.manifest import MAX_CHAIN, DeltaHeader, chain


@given(
    st.builds(DeltaHeader, st.integers(0, 99), st.text(), st.text(), st.integers(0, 9), st.integers(9, 99))
)
def test_a_delta_header_round_trips(header):
    assert DeltaHeader.from_fields(Fields(asdict(header), "/a")) == header


def test_a_delta_header_with_more_changes_than_elements_is_refused():
    with pytest.raises(CorruptDataError, match="changed"):
        DeltaHeader.from_fields(Fields(asdict(DeltaHeader(1, "", "", 10, 9)), "/a"))


def test_the_chain_of_a_full_step_is_the_step_itself():
    assert chain(5, {5: None}) == (5,)


def test_a_chain_ends_in_its_keyframe():
    assert chain(9, {9: 7, 7: 3, 3: None, 8: 7}) == (9, 7, 3)


@pytest.mark.parametrize("parents", [{}, {5: 3}, {5: 3, 3: 1}])
def test_a_chain_with_a_missing_link_is_refused(parents):
    with pytest.raises(CorruptDataError, match="not there"):
        chain(5, parents)


@pytest.mark.parametrize("parents", [{5: 5}, {5: 6, 6: None}, {5: 3, 3: 5}, {5: 4, 4: 4}])
def test_a_chain_whose_parent_is_not_earlier_is_refused(parents):
    with pytest.raises(CorruptDataError, match="keyframe"):
        chain(5, parents)


def test_a_chain_longer_than_the_limit_is_refused():
    parents = {step: step - 1 or None for step in range(1, MAX_CHAIN + 2)}
    assert len(chain(MAX_CHAIN, parents)) == MAX_CHAIN
    with pytest.raises(CorruptDataError, match="keyframe"):
        chain(MAX_CHAIN + 1, parents)


@given(st.dictionaries(st.integers(0, 12), st.none() | st.integers(-1, 13)), st.integers(0, 12))
def test_a_chain_decreases_strictly_to_a_keyframe_or_is_refused(parents, step):
    try:
        links = chain(step, parents)
    except CorruptDataError:
        return
    assert links[0] == step
    assert list(links) == sorted(set(links), reverse=True)
    assert [parents[link] for link in links] == [*links[1:], None]
