"""Finds a second host through the directory, and exchanges messages with it through files.

Each host has its own directory below `.syncd-doctor-peer/`, prepared elsewhere and renamed into place. A host writes
only below its own directory and polls that of the other: on NFSv3 a host that writes into the directory it polls
misses what others do there. It polls as the daemon does: it opens and closes the parent directory, then opens, reads
and closes the file (docs/protocol.md, "Reading on a network mount").
"""

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Self

from syncd.errors import CorruptDataError, TimedOutError
from syncd.parts.doctor.probe import sweep
from syncd.protocol.disk import list_if_there
from syncd.protocol.documents import Fields, decode, encode
from syncd.protocol.local_disk import LocalDisk

MEETING = ".syncd-doctor-peer"  # the directory in which two hosts meet, below the one that is examined

SUBDIRECTORIES = ("say", "stat", "names", "events", "locks")
"""The directories of each host: one for messages, the others are measured."""

END = "end"  # the topic of the last question

TICK = 0.005
_BEAT = 0.25
_SETTLE = 0.05
_FAREWELL = 5.0

Accept = Callable[[Fields], bool]


class PeerLink:
    """One host's end of the exchange."""

    def __init__(self, meeting: str, identity: str | None = None) -> None:
        self.meeting = meeting
        self.identity = identity or uuid.uuid4().hex[:12]
        self.partner = ""
        self.disk = LocalDisk()
        self.number = 0
        self.wrote = 0.0

    @property
    def own(self) -> str:
        return f"{self.meeting}/{self.identity}"

    @property
    def other(self) -> str:
        return f"{self.meeting}/{self.partner}"

    @property
    def leads(self) -> bool:
        """Return whether this host asks first."""
        return self.identity < self.partner

    def say(self, topic: str, number: int, value: dict[str, Any] | None = None) -> None:
        """Replace the message of this host, and note how long that took."""
        began = time.monotonic()
        document = {"partner": self.partner, "topic": topic, "number": number, "value": value or {}}
        self.disk.replace(f"{self.own}/say/word", encode(document))
        self.wrote = time.monotonic() - began

    def listen(self, identity: str) -> Fields | None:
        """Return the message of a host, read as the daemon reads a marker; None if it cannot be read."""
        words = f"{self.meeting}/{identity}/say"
        try:
            self.disk.refresh(words)
            return _checked(decode(self.disk.read(f"{words}/word"), words))
        except (OSError, CorruptDataError):
            return None

    def hear(self, accept: Accept, seconds: float) -> Fields:
        """Wait for a message of the partner that is accepted, and return it."""
        heard_last = began = time.monotonic()
        while True:
            heard, now = self.listen(self.partner), time.monotonic()
            if heard is not None and accept(heard):
                return heard
            heard_last = heard_last if heard is None else now
            if now > began + seconds or now > heard_last + _FAREWELL:
                raise TimedOutError("the peer no longer answers", path=self.meeting)
            time.sleep(TICK)

    def ask(self, topic: str, seconds: float, value: dict[str, Any] | None = None) -> Fields:
        self.number += 1
        number = self.number
        self.say(topic, number, value)
        return self.hear(lambda word: _is(word, number, "answer"), seconds).record("value")

    def finish(self, seconds: float, value: dict[str, Any]) -> None:
        """Send the last question, and wait until the partner has answered it or asks its own."""
        self.number += 1
        number = self.number
        self.say(END, number, value)
        self.hear(lambda word: _is(word, number, "answer") or _is(word, number + 1), seconds)

    def asked(self, seconds: float) -> Fields:
        number = self.number + 1
        question = self.hear(lambda word: _is(word, number), seconds)
        self.number = number
        return question

    def answer(self, value: dict[str, Any]) -> None:
        self.say("answer", self.number, value)

    def find(self, seconds: float) -> Self:
        end, numbers, beat, due = time.monotonic() + seconds, dict[str, int](), 0, 0.0
        # From here on this host changes nothing in the directory that it polls.
        time.sleep(_SETTLE)
        while True:
            met = self._meet(numbers)
            now = time.monotonic()
            if met or now > due:
                beat, due = beat + 1, now + _BEAT
                self.say("hello", beat)
            if met:
                return self
            if now > end:
                late = f"timed out after {seconds:g} s waiting for a second host"
                raise TimedOutError(late, path=self.meeting)
            time.sleep(_SETTLE)

    def _meet(self, numbers: dict[str, int]) -> bool:
        """Return whether another host names this one as its partner; one whose number grows is a candidate."""
        living = ""
        for identity in sorted(self._present() - {self.identity}):
            word = self.listen(identity)
            if word is None:
                continue
            if word.text("partner") == self.identity:
                self.partner = identity
                return True
            number = word.integer("number")
            # The number of a directory that an earlier run left does not grow.
            if numbers.setdefault(identity, number) != number:
                living = living or identity
        self.partner = living
        return False

    def leave(self) -> None:
        """Wait until the partner has read the last message: its directory is gone then."""
        end = time.monotonic() + _FAREWELL
        while time.monotonic() < end and self.partner in self._present():
            time.sleep(_SETTLE)

    def _present(self) -> set[str]:
        return {entry.name for entry in list_if_there(self.disk, self.meeting)}


def _checked(word: Fields) -> Fields:
    word.text("partner"), word.text("topic"), word.integer("number")
    return word


def _is(word: Fields, number: int, topic: str | None = None) -> bool:
    """Return whether a message has a number and a topic; without a topic, whether it is the question of a number."""
    said = word.text("topic")
    wanted = said == topic if topic else said not in ("answer", "hello")
    return wanted and word.integer("number") == number


@contextlib.contextmanager
def open_link(directory: str, scratch: str) -> Iterator[PeerLink]:
    """Open this host's end in a directory, and remove everything it wrote at the end."""
    end = PeerLink(f"{directory}/{MEETING}")
    try:
        _settle_in(end, f"{scratch}/peer")
        yield end
    finally:
        sweep(end.own)
        with contextlib.suppress(OSError):
            os.rmdir(end.meeting)


def _settle_in(end: PeerLink, prepared: str) -> None:
    for name in SUBDIRECTORIES:
        os.makedirs(f"{prepared}/{name}")
        with open(f"{prepared}/{name}/word", "wb") as file:
            file.write(encode({"partner": "", "topic": "hello", "number": 0, "host": socket.gethostname()}))
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(end.meeting)
        try:
            os.rename(prepared, end.own)
        except FileNotFoundError:
            # Two other hosts have just left and removed the empty directory.
            continue
        return
