"""Two ends of a conversation through files, in one process."""

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest

from syncd.errors import TimedOutError
from syncd.parts.doctor.peer import MEETING, PeerLink, open_link
from syncd.parts.doctor.two_hosts import Direction, PeerObserver, converse
from syncd.protocol.documents import Fields, record_from


@pytest.fixture
def ends(tmp_path: object) -> Iterator[tuple[PeerLink, PeerLink]]:
    with contextlib.ExitStack() as stack:
        one, two = (stack.enter_context(_end(str(tmp_path), name)) for name in ("one", "two"))
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda end: end.find(20), (one, two)))
        yield (one, two) if one.leads else (two, one)


@contextlib.contextmanager
def _end(directory: str, name: str) -> Iterator[PeerLink]:
    os.mkdir(f"{directory}/{name}")
    with open_link(directory, f"{directory}/{name}") as end:
        yield end


def test_two_peers_find_each_other_and_exactly_one_leads(ends: tuple[PeerLink, PeerLink]) -> None:
    first, second = ends
    assert (first.partner, second.partner) == (second.identity, first.identity)
    assert (first.leads, second.leads) == (True, False)


def test_a_peer_answers_a_question(ends: tuple[PeerLink, PeerLink]) -> None:
    first, second = ends
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(first.ask, "ping", 10, {"x": 1})
        question = second.asked(10)
        second.answer({"y": 2})
    assert (question.text("topic"), question.record("value").integer("x")) == ("ping", 1)
    assert answer.result().integer("y") == 2


def test_the_partners_first_question_answers_the_last_one(ends: tuple[PeerLink, PeerLink]) -> None:
    first, second = ends
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(first.finish, 10, {})
        second.asked(10)
        second.number += 1
        second.say("ping", second.number)
        done.result()
    assert first.asked(10).text("topic") == "ping"


def test_files_of_an_earlier_run_are_not_a_partner(tmp_path: object) -> None:
    with _end(str(tmp_path), "left"), _end(str(tmp_path), "here") as here, pytest.raises(TimedOutError):
        here.find(0.7)
    assert here.partner == ""


def test_garbage_in_the_meeting_directory_is_ignored(tmp_path: object) -> None:
    meeting = f"{tmp_path}/{MEETING}"
    for name, word in (
        ("empty", b""),
        ("list", b"[]"),
        ("odd", b'{"protocol":1,"topic":3}'),
        ("huge", b"\0" * 99),
    ):
        os.makedirs(f"{meeting}/{name}/say")
        with open(f"{meeting}/{name}/say/word", "wb") as file:
            file.write(word)
    with _end(str(tmp_path), "here") as here, pytest.raises(TimedOutError):
        here.find(0.2)


def test_peers_remove_their_files_also_after_an_error(tmp_path: object) -> None:
    with _end(str(tmp_path), "one"), pytest.raises(RuntimeError), _end(str(tmp_path), "two"):
        raise RuntimeError
    assert sorted(os.listdir(str(tmp_path))) == ["one", "two"]
    assert os.listdir(f"{tmp_path}/one") == []


def test_a_partner_that_leaves_causes_a_time_out(
    ends: tuple[PeerLink, PeerLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syncd.parts.doctor.peer._FAREWELL", 0.05)
    first, second = ends
    os.rename(second.own, f"{second.meeting}/.gone")
    with pytest.raises(TimedOutError, match="no longer answers"):
        first.ask("ping", 10)
    os.rename(f"{second.meeting}/.gone", second.own)


def test_a_conversation_measures_both_directions(ends: tuple[PeerLink, PeerLink]) -> None:
    first, second = ends
    with ThreadPoolExecutor(2) as pool:
        one, two = (pool.submit(converse, end, 0.5) for end in (first, second))
        # The first one waits until the second has left.
        reports = two.result(60)
        os.rename(second.own, f"{second.meeting}/.gone")
        mirrored = one.result(60)
    os.rename(f"{second.meeting}/.gone", second.own)
    assert (mirrored.outward, mirrored.inward) == (reports.inward, reports.outward)
    assert reports.inward.events
    assert reports.inward.rounds > 1
    assert reports.inward.stat_ms is not None
    assert reports.inward.new_name_ms is not None
    assert reports.inward.flock == "excludes"


def test_an_unknown_question_is_answered_with_not_seen() -> None:
    with contextlib.ExitStack() as stack:
        assert PeerObserver("/nowhere", stack).answer("from the future", Fields({}, "")) == {"seen": False}


def test_waiting_for_a_name_ends_after_its_time_out() -> None:
    with contextlib.ExitStack() as stack:
        assert PeerObserver("/nowhere", stack).answer("name-after", Fields({"seconds": 0}, "")) == {
            "seen": False
        }


def test_peer_measurements_round_trip() -> None:
    found = Direction(5.0, 39, 1.5, 2.5, 3.5, 0.5, None, 29800.0, False, "excludes", "ENOLCK")
    assert record_from(Direction, Fields(asdict(found), "")) == found
