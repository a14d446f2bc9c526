"""Logging: structlog, JSON lines when nobody reads along, colours where somebody does.

Trainer and explorers set their logging up here too, so that one job's logs look alike. Importing structlog
takes about 0.1 s, half of it for rich, which it looks for: what only prints help or tables never imports it.
"""

import contextlib
import logging
from collections.abc import MutableMapping
from datetime import UTC, datetime
from typing import Any, TextIO, cast

import structlog

from syncd.errors import plain
from syncd.observe.events import Event

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_TIMESTAMP = "timestamp"
_RESERVED = frozenset({"self", "level", "event"})  # names of arguments of a logger, which fields cannot have


def configure(level: str, stream: TextIO, *, json: bool | None = None) -> None:
    """Set structlog up for this process; `json` None means JSON lines unless the stream is a terminal."""
    terminal = stream.isatty()
    as_json = not terminal if json is None else json
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            _dated,
            *(_json() if as_json else _text(colours=terminal)),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", LossyStream(stream))),
        cache_logger_on_first_use=False,
    )


class LossyStream:
    """Loses what a stream does not take: a full disk of the log ends no program."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


class LogObserver:
    """Writes each event to the log, by its own level and with its own date."""

    def __init__(self) -> None:
        self._log = structlog.get_logger()

    def observe(self, event: Event) -> None:
        fields = {key: value for key, value in event.fields.items() if key not in _RESERVED}
        self._log.log(LEVELS[event.level], event.name, **{**fields, _TIMESTAMP: _iso(event.at)})


def _json() -> list[Any]:
    return [structlog.processors.format_exc_info, _framed, structlog.processors.JSONRenderer(default=str)]


def _text(*, colours: bool) -> list[Any]:
    shown = structlog.dev.plain_traceback
    renderer = structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=shown, pad_event_to=20)
    return [_printable, renderer]


def _printable(_logger: Any, _method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Spell out what could steer the terminal of whoever reads along: texts of others are among the fields."""
    exempt = ("exception", "stack")  # of several lines, and our own
    return {
        plain(key): plain(value, "\n\t" if key in exempt else "") if isinstance(value, str) else value
        for key, value in fields.items()
    }


def _dated(_logger: Any, _method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    if _TIMESTAMP not in fields:
        fields[_TIMESTAMP] = _iso(datetime.now(UTC).timestamp())
    return fields


def _framed(_logger: Any, _method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Put first what every line has, for those who read JSON with their eyes."""
    return {key: fields.pop(key, None) for key in (_TIMESTAMP, "level", "event")} | dict(fields)


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
