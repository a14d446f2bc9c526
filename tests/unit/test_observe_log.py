"""The log: JSON where nobody reads along, text where somebody does."""

import io
import json

import pytest
import structlog

from syncd.observe import event_names
from syncd.observe.events import Event
from syncd.observe.log import LogObserver, configure


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _restored():
    yield
    structlog.reset_defaults()


def told(stream, level="info", *, event_level="info", json=None, **fields):
    configure(level, stream, json=json)
    LogObserver().observe(Event(event_names.VERSION_PUBLISHED, event_level, 1.5, fields))
    return stream.getvalue()


def test_the_log_is_json_if_the_stream_is_not_a_terminal():
    line = json.loads(told(io.StringIO(), step=3))
    assert line == {
        "event": "version_published",
        "level": "info",
        "step": 3,
        "timestamp": "1970-01-01T00:00:01.500Z",
    }


def test_the_log_is_text_on_a_terminal():
    text = told(Terminal(), step=3)
    assert "version_published" in text
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(text)


def test_the_log_format_can_be_chosen():
    assert json.loads(told(Terminal(), json=True, step=3))["step"] == 3
    assert "\x1b" not in told(io.StringIO(), json=False, step=3)


@pytest.mark.parametrize(("level", "seen"), [("debug", True), ("info", False), ("warning", False)])
def test_events_below_the_log_level_are_hidden(level, seen):
    assert bool(told(io.StringIO(), level, event_level="debug")) is seen


def test_event_fields_named_like_log_arguments_are_logged():
    stream = io.StringIO()
    configure("info", stream)
    fields = {"event": "other", "level": "loud", "self": 1, "value": object()}
    LogObserver().observe(Event(event_names.VERSION_PUBLISHED, "info", 1.5, fields))
    line = json.loads(stream.getvalue())
    assert line["level"] == "info"
    assert line["event"] == "version_published"
    assert "object" in line["value"]


def test_lines_of_other_loggers_have_a_timestamp():
    stream = io.StringIO()
    configure("info", stream)
    structlog.get_logger().warning("hello", step=1)
    line = json.loads(stream.getvalue())
    assert line["timestamp"].endswith("Z")
    assert line["level"] == "warning"


def test_control_characters_in_events_are_escaped():
    said = told(io.StringIO(), json=False, detail="a\x1b[2Jb\nc", **{"host\x07": "\udcff", "step": 3})
    assert said.count("\n") == 1
    assert said.rstrip("\n").isprintable()
    assert "a\\x1b[2Jb\\nc" in said
    assert "step=3" in said
