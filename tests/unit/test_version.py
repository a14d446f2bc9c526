"""The version: what comes back, what is refused, and how pairs are ordered."""

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.memory import memory_job

from syncd.errors import CorruptDataError, ProtocolTooNewError
from syncd.protocol.documents import decode, encode
from syncd.protocol.version import (
    MAX_GENERATION,
    GoodVersion,
    Quarantined,
    Version,
    encode_version,
    pair_document,
    pair_from,
    read_version,
    read_version_or_none,
    version_from,
)

NUMBERS = st.integers(0, 1 << 53)
GENERATIONS = st.integers(0, MAX_GENERATION)
PAIRS = st.tuples(GENERATIONS, NUMBERS)
VERSIONS = st.builds(
    Version,
    GENERATIONS,
    NUMBERS,
    st.sampled_from(["weights", "delta", "lora"]),
    st.sampled_from(["global_step_7/actor", "a"]),
    st.text(),
    layout=st.text(),
    parent=st.none() | NUMBERS,
    published_at=st.floats(0, 2e9),
    previous=st.none() | PAIRS,
    held_marker=st.none() | st.text(),
    held_tracker=st.none() | NUMBERS,
    request=st.none() | st.text(),
    carried_out=st.lists(st.text(), max_size=3).map(tuple),
    abandoned=st.lists(st.tuples(NUMBERS, st.text()), max_size=3).map(tuple),
    quarantine=st.lists(st.builds(Quarantined, NUMBERS, st.text(), st.text()), max_size=3).map(tuple),
    released=st.lists(st.tuples(NUMBERS, st.text()), max_size=3).map(tuple),
    last_good=st.none()
    | st.builds(
        GoodVersion,
        GENERATIONS,
        NUMBERS,
        st.just("weights"),
        st.just("global_step_6/actor"),
        st.text(),
        st.text(),
        st.none() | NUMBERS,
    ),
    term=NUMBERS,
)
GOOD = GoodVersion(1, 6, "delta", "global_step_6/actor", "sha256:01", parent=5)
VERSION = Version(
    1,
    7,
    "weights",
    "global_step_7/actor",
    "sha256:00",
    previous=(1, 6),
    abandoned=((9, "x"),),
    quarantine=(Quarantined(7, "sha256:00", "damaged"),),
    released=((5, "y"),),
    last_good=GOOD,
)
DOCUMENT = json.loads(encode_version(VERSION))


def read(**changes) -> Version | None:
    job = memory_job()
    job.disk.files[job.version] = encode({**DOCUMENT, **changes})
    return read_version(job)


@given(VERSIONS)
def test_a_version_round_trips(version):
    assert version_from(decode(encode_version(version), "/a")) == version


@given(VERSIONS, st.text())
def test_a_remote_version_may_have_any_uri(version, uri):
    remote = replace(version, kind="remote", path=uri)
    assert version_from(decode(encode_version(remote), "/a")) == remote


@pytest.mark.parametrize("path", ["", "/abs", "../up", "a/../b", "a//b", ".", "a\n", "x" * 300])
def test_a_version_path_outside_the_job_is_refused(path):
    with pytest.raises(CorruptDataError, match="path"):
        read(path=path)


@pytest.mark.parametrize(
    "changes",
    [
        {"generation": -1},
        {"generation": None},
        {"generation": MAX_GENERATION + 1},
        {"step": 7.0},
        {"kind": None},
        {"digest": 1},
        {"layout": 1},
        {"parent": "6"},
        {"published_at": None},
        {"previous": [1, 6]},
        {"previous": {"generation": 1}},
        {"held_marker": 7},
        {"request": 7},
        {"abandoned": {}},
        {"abandoned": [[1]]},
        {"abandoned": [["x", 1]]},
        {"abandoned": [[True, "x"]]},
        {"quarantine": [[7, "sha256:00"]]},
        {"quarantine": [["7", "sha256:00", ""]]},
        {"quarantine": "none"},
        {"released": [[7, "sha256:00", ""]]},
        {"last_good": [1, 6]},
        {"last_good": {**asdict(GOOD), "path": "../up"}},
        {"last_good": {**asdict(GOOD), "step": "6"}},
        {"last_good": {**asdict(GOOD), "generation": MAX_GENERATION + 1}},
        {"last_good": {"generation": 1, "step": 6}},
        {"term": "1"},
    ],
)
def test_a_version_with_invalid_fields_is_refused(changes):
    with pytest.raises(CorruptDataError):
        read(**changes)


def test_before_the_first_publish_the_version_is_none():
    assert read_version(memory_job()) is None


def test_read_version_or_none_is_none_if_damaged_and_refuses_later_protocols():
    job = memory_job()
    assert read_version_or_none(job) is None
    job.disk.files[job.version] = b"{"
    assert read_version_or_none(job) is None
    job.disk.files[job.version] = encode_version(VERSION)
    assert read_version_or_none(job) == VERSION
    job.disk.files[job.version] = json.dumps({**DOCUMENT, "protocol": 99}).encode()
    with pytest.raises(ProtocolTooNewError):
        read_version_or_none(job)


def test_optional_version_fields_may_be_missing():
    job = memory_job()
    needed = ("generation", "step", "kind", "path", "digest", "published_at")
    job.disk.files[job.version] = encode({key: DOCUMENT[key] for key in needed})
    assert read_version(job) == replace(
        VERSION, previous=None, abandoned=(), quarantine=(), released=(), last_good=None
    )


def test_the_last_good_version_can_be_leased_like_the_published_one():
    assert GOOD.version() == Version(1, 6, "delta", "global_step_6/actor", "sha256:01", parent=5)
    assert VERSION.quarantined == {(7, "sha256:00")}


@given(PAIRS, PAIRS)
def test_pairs_are_ordered_by_generation_then_step(one, other):
    first, second = (Version(*pair, "weights", "a", "").pair for pair in (one, other))
    older = one[0] < other[0] or (one[0] == other[0] and one[1] < other[1])
    assert (first < second) == older
    assert (first == second) == (one == other)


@given(PAIRS, PAIRS, PAIRS)
def test_pairs_are_totally_ordered(one, two, three):
    low, middle, high = sorted([one, two, three])
    assert low <= middle <= high
    assert low <= high


@given(st.none() | PAIRS)
def test_a_pair_round_trips(pair):
    fields = decode(encode({"pair": pair_document(pair)}), "/a")
    assert pair_from(fields.optional_record("pair")) == pair
