"""One event type, and a fan-out that never raises."""

import dataclasses
import re
from pathlib import Path

import pytest
from support.jobs import Recorder

from syncd.observe import event_names
from syncd.observe.events import AGAIN_AFTER, GIVE_UP_AFTER, Event, Observers

DOCS = Path(__file__).parents[2] / "docs"


class Broken:
    def __init__(self, times: int = 10**9) -> None:
        self.asked = 0
        self.times = times
        self.closed = False

    def observe(self, event: Event) -> None:
        self.asked += 1
        if self.asked <= self.times:
            raise OSError(28, "No space left on device")

    def close(self) -> None:
        self.closed = True
        raise RuntimeError("closing fails too")


def event(name: str = event_names.LEADERSHIP_ACQUIRED, **fields) -> Event:
    return Event(name, "info", 1.0, fields)


def test_an_event_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        event().name = "other"  # type: ignore[misc]


def test_every_observer_receives_every_event_in_order():
    first, second = Recorder(), Recorder()
    observers = Observers(first, second)
    for name in (event_names.LEADERSHIP_ACQUIRED, event_names.STEP_FOUND):
        observers.observe(event(name))
    assert first.names() == second.names() == [event_names.LEADERSHIP_ACQUIRED, event_names.STEP_FOUND]


def test_a_failing_observer_is_reported_once_and_dropped_for_a_while():
    broken, heard = Broken(), Recorder()
    observers = Observers(broken, heard)
    for _ in range(GIVE_UP_AFTER + 5):
        observers.observe(event())
    assert broken.asked == GIVE_UP_AFTER
    told = heard.of(event_names.OPERATION_FAILED)
    assert [item["code"] for item in told] == ["observer"]
    assert "Broken failed: OSError" in told[0]["detail"]
    assert heard.names().count(event_names.LEADERSHIP_ACQUIRED) == GIVE_UP_AFTER + 5


def test_an_observer_that_recovers_is_not_dropped():
    broken = Broken(times=GIVE_UP_AFTER - 1)
    observers = Observers(broken)
    for _ in range(50):
        observers.observe(event())
    assert broken.asked == 50


def test_an_observer_that_was_dropped_is_asked_again_after_a_minute():
    broken = Broken(times=GIVE_UP_AFTER + 1)
    observers = Observers(broken)
    for _ in range(GIVE_UP_AFTER + 5):
        observers.observe(event())
    for minute in (1, 2, 3):
        for _ in range(5):
            observers.observe(dataclasses.replace(event(), at=1.0 + minute * AGAIN_AFTER))
    assert broken.asked == GIVE_UP_AFTER + 1 + 2 * 5, "once after a minute, and always since it works"


def test_two_failing_observers_do_not_trigger_each_other_endlessly():
    one, two = Broken(), Broken()
    observers = Observers(one, two)
    for _ in range(100):
        observers.observe(event())
    assert one.asked <= GIVE_UP_AFTER
    assert two.asked <= GIVE_UP_AFTER


def test_closing_a_failing_observer_does_not_raise():
    broken = Broken()
    with Observers(broken, Recorder()):
        pass
    assert broken.closed


def test_the_documented_events_are_exactly_the_existing_ones():
    text = (DOCS / "events.md").read_text()
    table = text.split("## Names")[1].split("| field |")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == event_names.EVENTS


def test_every_event_name_has_a_constant():
    constants = {
        value for key, value in vars(event_names).items() if key.isupper() and isinstance(value, str)
    }
    assert constants >= event_names.EVENTS
