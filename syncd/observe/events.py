"""The one event type, and the fan-out to whatever hears it. Adapters never raise into the daemon."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

from syncd.observe import event_names

Level = Literal["debug", "info", "warning", "error"]

GIVE_UP_AFTER = 10  # failures in a row after which an adapter is called seldom
AGAIN_AFTER = 60.0  # seconds after which it is called again: a disk may have been full for a while


@dataclass(frozen=True, slots=True)
class Event:
    name: str  # one of `event_names.EVENTS`
    level: Level  # debug, info, warning or error
    at: float  # seconds since the epoch on the clock of whoever reports it
    # What is worth knowing of it; values that JSON has.
    fields: Mapping[str, Any] = field(default_factory=dict)


class Observer(Protocol):
    def observe(self, event: Event) -> None:
        """Handle one event."""


class Observers:
    """Several observers as one, which never raises. Each event goes to them in the order given.

    The failure of one is reported once, to the others; after `GIVE_UP_AFTER` failures in a row it is left out for
    `AGAIN_AFTER` seconds at a time. One that has a `close` is closed at the end.
    """

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers
        self._one_at_a_time = threading.Lock()
        self._failures = [0] * len(observers)
        self._failed_at = [0.0] * len(observers)
        self._reported = [False] * len(observers)

    def observe(self, event: Event) -> None:
        """Hand an event to every observer that still works."""
        with self._one_at_a_time:
            self._observe(event)

    def _observe(self, event: Event) -> None:
        for number, observer in enumerate(self._observers):
            error = self._hand(number, observer, event)
            if error is not None and not self._reported[number]:
                self._reported[number] = True
                self._report_to_others(number, _failure(observer, error, event.at))

    def close(self) -> None:
        for observer in self._observers:
            close = getattr(observer, "close", None)
            if close is not None:
                _quietly(close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hand(self, number: int, observer: Observer, event: Event) -> Exception | None:
        is_recent = abs(event.at - self._failed_at[number]) < AGAIN_AFTER  # the clock may step either way
        if self._failures[number] >= GIVE_UP_AFTER and is_recent:
            return None
        error = _quietly(observer.observe, event)
        self._failures[number] = 0 if error is None else self._failures[number] + 1
        self._failed_at[number] = event.at
        return error

    def _report_to_others(self, failed: int, event: Event) -> None:
        for number, observer in enumerate(self._observers):
            if number != failed:
                self._hand(number, observer, event)


def _quietly(call: Any, *arguments: Any) -> Exception | None:
    try:
        call(*arguments)
    except Exception as error:  # noqa: BLE001 - whatever an adapter raises, the daemon continues
        return error
    return None


def _failure(observer: Observer, error: Exception, at: float) -> Event:
    detail = f"{type(observer).__name__} failed: {type(error).__name__}: {error}"
    return Event(event_names.OPERATION_FAILED, "error", at, {"code": "observer", "detail": detail})
