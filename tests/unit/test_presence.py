"""Presence: what a module publishes of itself, and who counts as alive."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.memory import HandClock, MemoryDisk

from syncd.errors import CorruptDataError
from syncd.protocol.documents import encode
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.presence import (
    HEARTBEAT,
    TTL,
    Liveness,
    Presence,
    Publisher,
    RunningStatus,
    path_of,
    read_presence,
    read_presences,
    write_presence,
)
from syncd.protocol.version import MAX_GENERATION

EXPLORERS = "/job/.syncd/explorers"
NUMBERS = st.integers(0, 1 << 53)
PAIRS = st.none() | st.tuples(st.integers(0, MAX_GENERATION), NUMBERS)
JSON = (
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.text(max_size=5)
    | st.lists(st.text(max_size=5), max_size=2)
)
PRESENCES = st.builds(
    Presence,
    st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,9}", fullmatch=True),
    st.sampled_from(RunningStatus),
    NUMBERS,
    st.text(),
    PAIRS,
    PAIRS,
    st.lists(NUMBERS, max_size=3).map(tuple),
    NUMBERS,
    st.dictionaries(st.text(), NUMBERS, max_size=2),
    st.none() | NUMBERS,
    st.text(),
    NUMBERS,
    st.floats(0, 2e9),
    st.dictionaries(st.text(), JSON, max_size=2),
    reads=st.lists(st.from_regex(r"[a-z][a-z0-9_-]{0,31}", fullmatch=True), max_size=16).map(tuple),
)


@given(PRESENCES)
def test_a_presence_round_trips(presence):
    disk = MemoryDisk()
    write_presence(disk, EXPLORERS, presence)
    assert read_presence(disk, path_of(EXPLORERS, presence.identity)) == presence
    assert read_presences(disk, EXPLORERS) == ({presence.identity: presence}, {})


def document(**changes) -> bytes:
    disk = MemoryDisk()
    write_presence(disk, EXPLORERS, Presence("e1"))
    return encode({**json.loads(disk.files[f"{EXPLORERS}/e1.json"]), **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"identity": "e2"},
        {"identity": "../e1"},
        {"identity": ""},
        {"status": "sleeping"},
        {"status": None},
        {"beat": -1},
        {"leases": [-1]},
        {"leases": ["7"]},
        {"leases": 7},
        {"applied": [1, 2]},
        {"answered": {"e": -1}},
        {"answered": []},
        {"updated_at": None},
        {"info": []},
        {"pid": "1"},
        {"reads": "delta"},
        {"reads": ["Delta"]},
        {"reads": ["d" * 33]},
        {"reads": ["delta"] * 17},
    ],
)
def test_an_invalid_presence_is_refused_and_does_not_hide_others(changes):
    disk = MemoryDisk({f"{EXPLORERS}/e1.json": document(**changes)})
    with pytest.raises(CorruptDataError):
        read_presence(disk, f"{EXPLORERS}/e1.json")
    write_presence(disk, EXPLORERS, Presence("e2"))
    found, problems = read_presences(disk, EXPLORERS)
    assert list(found) == ["e2"]
    assert list(problems) == ["e1"]


def test_a_presence_that_reads_only_whole_steps_has_the_bytes_of_earlier_releases():
    assert "reads" not in json.loads(document())
    assert json.loads(document(reads=["delta"]))["reads"] == ["delta"]


def test_a_status_may_be_written_in_upper_case():
    disk = MemoryDisk({f"{EXPLORERS}/e1.json": document(status="REQUIRE_SYNC")})
    assert read_presence(disk, f"{EXPLORERS}/e1.json").status is RunningStatus.REQUIRE_SYNC


def test_other_files_in_the_presence_directory_are_ignored():
    files = {f"{EXPLORERS}/{name}": b"" for name in ("notes", ".e1.json.0.tmp", "a b.json", "-x.json")}
    assert read_presences(MemoryDisk(files), EXPLORERS) == ({}, {})
    assert read_presences(MemoryDisk(), EXPLORERS) == ({}, {})


def test_a_presence_that_vanishes_during_the_read_is_omitted():
    class Vanishing(MemoryDisk):
        def read(self, path, limit=0):
            raise FileNotFoundError(path)

    disk = Vanishing({f"{EXPLORERS}/e1.json": document()})
    assert read_presences(disk, EXPLORERS) == ({}, {})


@pytest.fixture
def publisher():
    return Publisher(MemoryDisk(), HandClock(), EXPLORERS, Presence("e1", incarnation="run"))


def written(publisher) -> Presence:
    return read_presence(publisher._disk, f"{EXPLORERS}/e1.json")


def test_every_update_increases_the_beat(publisher):
    publisher.update(leases=(7,))
    assert (written(publisher).beat, written(publisher).leases) == (1, (7,))
    publisher.update(leases=())
    assert written(publisher) == publisher.presence
    assert (publisher.presence.beat, publisher.presence.updated_at) == (2, publisher._clock.time())


def test_a_failed_update_keeps_the_last_written_presence(publisher, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    publisher.update(leases=(7,))
    monkeypatch.setattr(publisher._disk, "replace", fail)
    publisher._clock.sleep(HEARTBEAT)
    with pytest.raises(OSError, match="No space"):
        publisher.update(leases=(7, 8))
    assert publisher.presence.leases == (7,)
    monkeypatch.undo()
    publisher.update()
    # The write that failed may have happened for all that its writer knows: beat 2 is used up.
    assert (written(publisher).beat, written(publisher).leases) == (3, (7,))


def test_a_new_process_removes_only_its_predecessors_temporary_files(tmp_path):
    for name in (".e1.json.0.tmp", ".e10.json.0.tmp", ".e1.json.keep", "e1.json"):
        (tmp_path / name).write_bytes(b"")
    Publisher(LocalDisk(), HandClock(), str(tmp_path), Presence("e1")).prepare()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".e1.json.keep", ".e10.json.0.tmp", "e1.json"]


def test_a_module_is_dead_a_ttl_after_its_last_change():
    liveness = Liveness()
    liveness.observe(0.0, [("e", 1)])
    assert liveness.is_alive("e", TTL - 1)
    liveness.observe(TTL - 1, [("e", 1)])
    assert not liveness.is_alive("e", TTL)
    liveness.observe(TTL + 5, [("e", 2)])
    assert liveness.is_alive("e", TTL + 5)
    assert liveness.silent_for("e", TTL + 7) == 2


def test_an_unknown_or_vanished_module_is_not_alive():
    liveness = Liveness()
    assert not liveness.is_alive("e", 0.0)
    assert liveness.silent_for("e", 0.0) == float("inf")
    liveness.observe(0.0, [("e", 1)])
    liveness.observe(50.0, [])
    assert not liveness.is_alive("e", 50.0)
    liveness.observe(100.0, [("e", 1)])
    assert liveness.is_alive("e", 100.0 + TTL - 1)


@given(
    st.floats(0.5, 20),
    st.lists(st.tuples(st.floats(0, 10), st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1))))),
)
def test_a_module_is_alive_if_it_changed_within_the_ttl(ttl, looks):
    """An independent reckoning: for each name, the time at which its present content was first seen."""
    liveness, now = Liveness(ttl), 0.0
    since: dict[str, tuple[int, float]] = {}
    for pause, contents in looks:
        now += pause
        present = dict(contents)
        liveness.observe(now, present.items())
        since = {
            name: since[name] if name in since and since[name][0] == content else (content, now)
            for name, content in present.items()
        }
        for name in "abc":
            expected = name in since and now - since[name][1] < ttl
            assert liveness.is_alive(name, now) == expected
