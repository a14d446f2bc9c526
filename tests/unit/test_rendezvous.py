"""Rendezvous: offers and acknowledgements of a broadcast group."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.memory import memory_job

from syncd.errors import CorruptDataError, UsageError
from syncd.protocol.documents import encode
from syncd.protocol.rendezvous import (
    STATES,
    Acknowledgement,
    Offer,
    epoch_path,
    latest_epoch,
    read_acknowledgements,
    read_offer,
    write_acknowledgement,
    write_offer,
)

IDENTITIES = st.from_regex(r"[a-z0-9_][a-z0-9.-]{0,8}", fullmatch=True)
NUMBERS = st.integers(0, 1 << 53)
TENSORS = st.tuples(st.text(), st.text(), st.lists(NUMBERS, max_size=3).map(tuple))
OFFERS = st.builds(
    Offer,
    IDENTITIES,
    NUMBERS,
    st.text(),
    NUMBERS,
    st.text(),
    st.integers(1, 99),
    st.lists(IDENTITIES, max_size=3).map(tuple),
    st.lists(TENSORS, max_size=3).map(tuple),
)
OFFER = Offer("group", 3, "127.0.0.1", 1234, "gloo", 2, ("e1",), (("w", "F32", (2, 3)),))


@given(OFFERS)
def test_an_offer_round_trips(offer):
    job = memory_job()
    assert read_offer(job, offer.group, offer.epoch) is None
    write_offer(job, offer)
    assert read_offer(job, offer.group, offer.epoch) == offer
    assert latest_epoch(job, offer.group) == offer.epoch


@pytest.mark.parametrize(
    "changes",
    [
        {"members": ["../x"]},
        {"members": [1]},
        {"members": "e1"},
        {"world_size": 0},
        {"port": -1},
        {"tensors": [["w", "F32"]]},
        {"tensors": [["w", "F32", [-1]]]},
        {"tensors": [["w", "F32", [True]]]},
        {"tensors": [["w", "F32", 3]]},
        {"tensors": [{"w": 1}]},
        {"epoch": None},
    ],
)
def test_an_invalid_offer_is_refused(changes):
    job = memory_job()
    write_offer(job, OFFER)
    path = f"{epoch_path(job, 'group', 3)}/offer.json"
    job.disk.files[path] = encode({**json.loads(job.disk.files[path]), **changes})
    with pytest.raises(CorruptDataError):
        read_offer(job, "group", 3)


@given(
    st.dictionaries(
        IDENTITIES, st.tuples(st.sampled_from(STATES), st.none() | NUMBERS, st.text()), max_size=3
    )
)
def test_acknowledgements_round_trip(posted):
    job = memory_job()
    expected = {
        name: Acknowledgement(name, state, step, text, text) for name, (state, step, text) in posted.items()
    }
    for acknowledgement in expected.values():
        write_acknowledgement(job, "group", 3, acknowledgement)
    assert read_acknowledgements(job, "group", 3) == expected
    assert read_acknowledgements(job, "group", 4) == {}


def test_unreadable_acknowledgements_do_not_count():
    job = memory_job()
    write_acknowledgement(job, "group", 3, Acknowledgement("e1", "joined"))
    members = f"{epoch_path(job, 'group', 3)}/members"
    job.disk.files[f"{members}/e2.json"] = encode({"member": "e2", "state": "elsewhere"})
    job.disk.files[f"{members}/e3.json"] = b"{"
    job.disk.files[f"{members}/e 4.json"] = job.disk.files[f"{members}/e1.json"]
    assert list(read_acknowledgements(job, "group", 3)) == ["e1"]


def test_the_latest_epoch_is_the_highest_number():
    job = memory_job()
    assert latest_epoch(job, "group") is None
    for name in ("9", "10", "x", "-11", "²", "٣", "1_000"):
        job.disk.files[f"{job.rendezvous}/group/{name}/offer.json"] = b""
    assert latest_epoch(job, "group") == 10


@pytest.mark.parametrize("name", ["../x", "a/b", "", "."])
def test_group_and_member_names_that_leave_the_directory_are_refused(name):
    job = memory_job()
    for call in (
        lambda: epoch_path(job, name, 1),
        lambda: latest_epoch(job, name),
        lambda: read_offer(job, name, 1),
        lambda: write_acknowledgement(job, "group", 1, Acknowledgement(name, "joined")),
    ):
        with pytest.raises(UsageError):
            call()
    assert job.disk.files == {}
