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
def test_a_header_comes_back(header):
    assert DeltaHeader.from_fields(Fields(asdict(header), "/a")) == header


def test_more_changes_than_elements_are_refused():
    with pytest.raises(CorruptDataError, match="changed"):
        DeltaHeader.from_fields(Fields(asdict(DeltaHeader(1, "", "", 10, 9)), "/a"))


def test_a_whole_step_is_its_own_chain():
    assert chain(5, {5: None}) == (5,)


def test_a_chain_ends_in_its_keyframe():
    assert chain(9, {9: 7, 7: 3, 3: None, 8: 7}) == (9, 7, 3)


@pytest.mark.parametrize("parents", [{}, {5: 3}, {5: 3, 3: 1}])
def test_a_missing_link(parents):
    with pytest.raises(CorruptDataError, match="not there"):
        chain(5, parents)


@pytest.mark.parametrize("parents", [{5: 5}, {5: 6, 6: None}, {5: 3, 3: 5}, {5: 4, 4: 4}])
def test_a_link_that_does_not_go_back(parents):
    with pytest.raises(CorruptDataError, match="keyframe"):
        chain(5, parents)


def test_the_longest_chain():
    parents = {step: step - 1 or None for step in range(1, MAX_CHAIN + 2)}
    assert len(chain(MAX_CHAIN, parents)) == MAX_CHAIN
    with pytest.raises(CorruptDataError, match="keyframe"):
        chain(MAX_CHAIN + 1, parents)


@given(st.dictionaries(st.integers(0, 12), st.none() | st.integers(-1, 13)), st.integers(0, 12))
def test_a_chain_goes_strictly_back_to_a_keyframe_or_is_refused(parents, step):
    try:
        links = chain(step, parents)
    except CorruptDataError:
        return
    assert links[0] == step
    assert list(links) == sorted(set(links), reverse=True)
    assert [parents[link] for link in links] == [*links[1:], None]
