"""Names and places: what is a step, an identity, a name inside a directory."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncd.errors import UsageError
from syncd.protocol.layout import (
    MAX_STEP,
    Job,
    check_identity,
    is_identity,
    is_relative_name,
    parse_step_name,
    receipt_name,
    shard_name,
    step_name,
)


@given(st.integers(0, MAX_STEP))
def test_step_names_round_trip(step):
    assert parse_step_name(step_name(step)) == step


@pytest.mark.parametrize(
    "name",
    [
        "",
        "global_step_",
        "global_step_-1",
        "global_step_+1",
        "global_step_01",
        "global_step_1 ",
        " global_step_1",
        "global_step_1\n",
        "global_step_1.tmp",
        "Global_step_1",
        "global_step_1_2",
        "step_1",
        "global_step_1e3",
        "global_step_٣",
        "global_step_²",
        f"global_step_{MAX_STEP + 1}",
        "global_step_" + "9" * 5000,
        ".global_step_1",
        "global_step_1/x",
        "global_step_0x1",
        "global_step_1_000",
    ],
)
def test_other_names_are_not_steps(name):
    assert parse_step_name(name) is None


@given(st.text() | st.from_regex(r"global_step_[0-9٣ _+-]{0,20}"))
def test_each_step_has_exactly_one_name(name):
    step = parse_step_name(name)
    assert step is None or (step_name(step) == name and 0 <= step <= MAX_STEP)


def test_shard_and_receipt_names_are_zero_padded():
    assert shard_name(1, 4) == "model-00001-of-00004.safetensors"
    assert receipt_name(12, 100_000) == "00012-of-100000.json"


@pytest.mark.parametrize("name", ["a", "_", "0", "explorer-1.example_2", "x" * 100])
def test_valid_identities_are_accepted(name):
    assert check_identity(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".a", "-a", "a/b", "a b", "a\n", "a\0", "ä", "x" * 101, "a\\b", "٣", "*"]
)
def test_invalid_identities_are_rejected(name):
    assert not is_identity(name)
    with pytest.raises(UsageError) as raised:
        check_identity(name)
    assert raised.value.hint


@given(st.text(max_size=120))
def test_an_identity_is_a_plain_file_name(name):
    if is_identity(name):
        assert os.path.basename(name) == name
        assert name.isascii()
        assert not name.startswith((".", "-"))


@pytest.mark.parametrize("name", ["a", "a/b.c", "...", "a b", "ä/ö", ".a", "x" * 255, "a\\b", "-"])
def test_relative_names_inside_a_directory_are_accepted(name):
    assert is_relative_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/",
        "/a",
        "a/",
        "a//b",
        ".",
        "..",
        "a/..",
        "../a",
        "a/./b",
        "a\x00b",
        "a\nb",
        "\x1b[2J",
        chr(0xD800),
        "x" * 256,
        "ä" * 128,
        "a/" * 600 + "a",
        "\u202e",
    ],
)
def test_relative_names_that_leave_the_directory_are_rejected(name):
    assert not is_relative_name(name)


@given(st.text(alphabet=st.sampled_from("ab./\\\0 ä\n") | st.characters(), max_size=20))
def test_an_accepted_relative_name_stays_inside_its_directory(tmp_path_factory, name):
    if is_relative_name(name):
        assert os.path.normpath(f"/base/{name}") == f"/base/{name}"
        with pytest.raises((FileNotFoundError, NotADirectoryError)):
            os.lstat(f"{os.path.dirname(__file__)}/none/{name}")


def test_accepted_long_names_can_be_looked_up(tmp_path):
    for name in ("x" * 255, "/".join(["d" * 100] * 10), "ä" * 127):
        assert is_relative_name(name)
        with pytest.raises(FileNotFoundError):
            os.lstat(tmp_path / name)


def test_a_job_resolves_its_paths(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    job = Job.at(tmp_path / "link")
    root = os.path.realpath(tmp_path / "real")
    assert (job.root, job.state) == (root, f"{root}/.syncd")
    assert job.step(3) == f"{root}/global_step_3"
    assert job.marker == f"{root}/latest_state_dict_iteration.txt"
    assert job.tracker == f"{root}/latest_checkpointed_iteration.txt"
    assert Job.at(tmp_path / "real") == job


def test_the_trash_is_in_the_job_even_if_the_state_is_elsewhere(tmp_path):
    job = Job.at(tmp_path / "job", tmp_path / "state")
    assert job.version == f"{job.state}/version.json"
    places = (job.lock, job.explorers, job.trainers, job.pins, job.requests, job.rendezvous, job.events)
    assert all(place.startswith(f"{job.state}/") for place in places)
    assert len(set(places)) == len(places)
    assert job.trash.startswith(f"{job.root}/")
