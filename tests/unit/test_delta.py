"""Deltas: their header."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncd.errors import CorruptDataError
from syncd.protocol.delta_header import DeltaHeader
from syncd.protocol.documents import Fields


@given(
    st.builds(DeltaHeader, st.integers(0, 99), st.text(), st.text(), st.integers(0, 9), st.integers(9, 99))
)
def test_a_delta_header_round_trips(header):
    assert DeltaHeader.from_fields(Fields(header.document(), "/a")) == header


def test_a_delta_header_with_more_changes_than_elements_is_refused():
    with pytest.raises(CorruptDataError, match="changed"):
        DeltaHeader.from_fields(Fields(DeltaHeader(1, "", "", 10, 9).document(), "/a"))
