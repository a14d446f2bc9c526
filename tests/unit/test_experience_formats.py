"""The format of a batch: later ones harm themselves only, and rollouts are whole."""

import re

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batch_formats import changed
from support.experiences import make, segmented, whole_group, write
from support.jobs import ManualClock

from syncd.errors import CorruptDataError, ProtocolTooNewError, UsageError
from syncd.experience import batch_paths, formats
from syncd.experience.table import decode_batch, encode_batch
from syncd.extras import upgrade_command
from syncd.protocol import documents
from syncd.protocol.layout import Job
from trainer.experience.store import ExperienceReader

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def read(path):
    with open(path, "rb") as file:
        return file.read()


def two():
    """Return a batch of two rollouts, with nothing that is optional."""
    return encode_batch(whole_group("g", step=3))


# A number of its own.


def test_the_batch_format_is_independent_of_the_protocol_version(monkeypatch, tmp_path):
    monkeypatch.setattr(documents, "PROTOCOL", 7)
    path = tmp_path / "1.parquet"
    path.write_bytes(two())
    assert pq.read_schema(path).metadata[b"format"] == b"2"
    assert decode_batch(two(), "x") == tuple(whole_group("g", step=3))


@pytest.mark.parametrize("metadata", [{"format": "3"}, {"format": "3", "protocol": "1"}, {"protocol": "9"}])
def test_a_later_format_is_refused_with_an_upgrade_hint(metadata):
    with pytest.raises(ProtocolTooNewError, match="upgrade syncd") as caught:
        decode_batch(changed(two(), metadata=metadata), "x")
    assert caught.value.hint == upgrade_command()


@pytest.mark.parametrize(
    "metadata",
    [{}, {"protocol": "1"}, *({"format": number} for number in ("", "0", "1", "two", "-2"))],
)
def test_metadata_without_a_format_is_refused(metadata):
    with pytest.raises(CorruptDataError, match="no format of a batch"):
        decode_batch(changed(two(), metadata=metadata), "x")


def test_a_batch_of_a_later_format_is_rejected_alone(tmp_path):
    job = Job.at(tmp_path)
    paths = write(job, "e0", *[whole_group(name) for name in "abc"])
    later = changed(read(paths[1]), metadata={"format": "3"})
    with open(paths[1], "wb") as file:
        file.write(later)
    reader = ExperienceReader(job, ManualClock())
    assert [loaded.file.seq for loaded in reader.poll()] == [1, 3]
    assert reader.counts["rejected"] == 1
    reason = read(f"{batch_paths.rejected(job, 'e0')}/2.parquet.reason.json")
    assert b"format 3" in reason
    assert b"upgrade syncd" in reason
    assert read(f"{batch_paths.rejected(job, 'e0')}/2.parquet") == later


# Values that contradict each other.


def _spans(*spans):
    return [{"start": start, "generation": generation, "step": step} for start, generation, step in spans]


def _turns(*turns):
    return [{"end": end, "reward": reward} for end, reward in turns]


RIGHT = {"spans": _spans((0, 1, 3)), "turn_rewards": None, "teacher_logprobs": None, "unproven": None}
HOSTILE = {
    "a span with a negative start": {"spans": _spans((-1, 1, 3))},
    "spans that overlap": {"spans": _spans((0, 1, 3), (2, 1, 4), (1, 1, 5))},
    "two spans at one token": {"spans": _spans((0, 1, 3), (0, 1, 4))},
    "a first span after the first token": {"spans": _spans((1, 1, 3))},
    "a span behind the response": {"spans": _spans((0, 1, 3), (3, 1, 4))},
    "a span of a negative step": {"spans": _spans((0, 1, 3), (1, 1, -4))},
    "a span of a negative generation": {"spans": _spans((0, 1, 3), (1, -1, 4))},
    "a span of a step beyond all": {"spans": _spans((0, 1, 3), (1, 1, 2**60))},
    "a span older than the row": {"spans": _spans((0, 1, 2))},
    "log-probs of another length": {"teacher_logprobs": [0.0]},
    "log-probs that are no number": {"teacher_logprobs": [0.0, float("nan"), 0.0]},
    "log-probs without end": {"teacher_logprobs": [0.0, float("-inf"), 0.0]},
    "a mask of another length": {"unproven": [True]},
    "rewards that add up to another one": {"turn_rewards": _turns((1, 0.25), (3, 0.5))},
    "rewards that are no number": {"turn_rewards": _turns((1, float("nan")))},
    "a turn without a token": {"turn_rewards": _turns((0, 0.5))},
    "a turn behind the response": {"turn_rewards": _turns((4, 0.5))},
    "turns that overlap": {"turn_rewards": _turns((2, 0.25), (1, 0.25))},
    "no turn for a reward": {"turn_rewards": []},
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_an_invalid_field_is_refused_with_file_row_and_field(what):
    ((name, value),) = HOSTILE[what].items()
    assert decode_batch(changed(two(), {name: [RIGHT[name]] * 2}), "x") == tuple(whole_group("g", step=3))
    with pytest.raises(CorruptDataError) as caught:
        decode_batch(changed(two(), {name: [RIGHT[name], value]}), "e0/7.parquet")
    assert re.search(rf"row 1 is not an experience: {name}\b", caught.value.message)
    assert caught.value.path == "e0/7.parquet"


def test_a_row_without_spans_has_the_version_of_the_row():
    found = decode_batch(changed(two(), {"spans": [[], RIGHT["spans"]]}), "x")
    assert found == tuple(whole_group("g", step=3))


def test_the_number_of_spans_in_a_batch_is_limited(monkeypatch):
    long = [make("g", 0, spans=[(place, 1, place) for place in range(3)])]
    data = encode_batch(long)
    monkeypatch.setattr(formats, "MAX_ITEMS", 2)
    with pytest.raises(UsageError, match="spans: 3 in one batch where at most 2"):
        encode_batch(long)
    with pytest.raises(CorruptDataError, match="spans: 3 in one batch where at most 2"):
        decode_batch(data, "x")


# Rollouts of several segments.


def test_segments_round_trip_in_order():
    batch = [*segmented("g", 0, steps=[3, 4, 5]), make("g", 1)]
    assert decode_batch(encode_batch(batch), "x") == tuple(batch)


def _wrong(*rows):
    return [make("g", segment=segment, segments=segments, **more) for segment, segments, more in rows]


PARTS = {
    "the last one is missing": (_wrong((0, 3, {}), (1, 3, {})), "row 0: segments"),
    "the first one is missing": (_wrong((1, 2, {})), "row 0: segment is 1"),
    "the middle one is missing": (_wrong((0, 3, {}), (2, 3, {})), "row 1: segment is 2"),
    "one comes twice": (_wrong((0, 2, {}), (0, 2, {})), "row 1: segment is 0"),
    "in another order": (_wrong((1, 2, {}), (0, 2, {})), "row 0: segment is 1"),
    "other counts": (_wrong((0, 2, {}), (1, 3, {})), "row 1: segments"),
    "other rewards": (_wrong((0, 2, {}), (1, 2, {"reward": 1.0})), "row 1: reward"),
    "other tasks": (_wrong((0, 2, {}), (1, 2, {"tag": 1})), "row 1: task"),
    "another rollout": (_wrong((0, 2, {}), (1, 2, {"rollout": 1})), "row 1: rollout"),
    "turns in one alone": (
        _wrong((0, 2, {"turn_rewards": [(1, 0.5)]}), (1, 2, {})),
        "row 0 is .* turn_rewards",
    ),
    "turns that add up to more": (
        _wrong(*[(number, 2, {"turn_rewards": [(1, 0.5)]}) for number in range(2)]),
        "row 0 is .* turn_rewards add up to 1 where the reward is 0.5",
    ),
}


@pytest.mark.parametrize("what", PARTS)
def test_an_incomplete_rollout_is_refused_on_write_and_on_read(what, monkeypatch):
    batch, why = PARTS[what]
    with pytest.raises(UsageError, match=why):
        encode_batch(batch)
    with monkeypatch.context() as patch:
        patch.setattr("syncd.experience.table.check_rollouts", lambda _: None)
        data = encode_batch(batch)
    with pytest.raises(CorruptDataError, match=why) as caught:
        decode_batch(data, "e0/7.parquet")
    assert caught.value.path == "e0/7.parquet"


def test_turn_rewards_are_summed_over_all_segments():
    turns = [[(1, 0.25), (3, 0.5)], [], [(2, -0.25)]]
    batch = [
        make("g", segment=number, segments=3, turn_rewards=its, reward=0.5)
        for number, its in enumerate(turns)
    ]
    assert [one.turn_rewards for one in decode_batch(encode_batch(batch), "x")] == [
        ((1, 0.25), (3, 0.5)), (), ((2, -0.25),)
    ]  # fmt: skip


def test_turn_rewards_may_differ_from_the_reward_by_rounding_only():
    turns = [(place + 1, 0.1) for place in range(1000)]
    assert make(length=1000, reward=100.0, turn_rewards=turns).reward == 100.0
    with pytest.raises(UsageError, match="add up"):
        make(length=1000, reward=100.1, turn_rewards=turns)


SMALL = st.tuples(st.integers(-1, 4), st.integers(-1, 2), st.integers(1, 5))


@given(
    st.just([])
    | st.lists(SMALL, min_size=1, max_size=4).flatmap(lambda spans: st.sampled_from([spans, sorted(spans)]))
)
@settings(max_examples=150, deadline=None)
def test_spans_are_accepted_only_if_they_cover_the_response(spans):
    """Whoever can write can seal: what is read keeps every rule, whatever was written."""
    starts = [start for start, _, _ in spans]
    right = starts == sorted(set(starts)) and all(
        version >= (1, 3) for _, *pair in spans for version in [tuple(pair)]
    )
    right = right and (not spans or (starts[0] == 0 and starts[-1] < 3))
    data = changed(two(), {"spans": [RIGHT["spans"], _spans(*spans)]})
    if right:
        assert decode_batch(data, "x")[1].spans == tuple(spans or [(0, 1, 3)])
    else:
        with pytest.raises(CorruptDataError, match="row 1 is not an experience: spans"):
            decode_batch(data, "x")
