"""What the journal holds: the members of each kind of record, and a line with its checksum.

A line is a JSON object whose last member `xxh3` is the XXH3 of all bytes before that member. Journals of before have
lines without it; an older release ignores it.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NotRequired

import xxhash
from pydantic import Field, InstanceOf, TypeAdapter, ValidationError
from typing_extensions import TypedDict

Natural = Annotated[int, Field(ge=0, lt=1 << 31)]
Text = InstanceOf[str]
"""Any text; what a model or an agent wrote may have a half of a surrogate pair, which pydantic's own refuses."""

_KEY = b',"xxh3":"'
_TAIL = re.compile(re.escape(_KEY) + rb'([0-9a-f]{16})"}')
_ENDS = re.compile(rb'(?<=,"xxh3":"................"})', re.DOTALL)


class RunRecord(TypedDict):
    kind: Literal["run"]
    run: str


class SessionRecord(TypedDict):
    kind: Literal["session"]
    session: str
    group: str
    task: str
    rollout: Natural
    attempt: Natural


class AnswerRecord(TypedDict):
    """What an answer says; calls by their ids, each a name and its arguments."""

    content: Text
    reasoning: Text
    calls: dict[Text, Annotated[list[Text], Field(min_length=2, max_length=2)]]
    finish: Text


class TurnRecord(TypedDict):
    """An answer; `number` and `group` are missing in journals of before."""

    kind: Literal["turn"]
    session: str
    group: NotRequired[str]
    number: NotRequired[Natural]
    request: str
    history: str
    parent: Natural | None
    prompt: list[Natural]
    tokens: list[Natural]
    logprobs: list[float]
    spans: list[Annotated[list[Natural], Field(min_length=3, max_length=3)]]
    unproven: list[bool] | None
    answer: AnswerRecord
    tools: NotRequired[dict[Text, float]]
    most: NotRequired[Natural | None]
    earlier: NotRequired[Natural | None]
    stop: NotRequired[list[Text]]


class RewardRecord(TypedDict):
    """A session has its reward; `turns` and `group` are missing in journals of before."""

    kind: Literal["reward"]
    session: str
    group: NotRequired[str]
    turns: NotRequired[Natural]
    reward: float
    info: dict[Text, Any]
    turn_rewards: NotRequired[list[float] | None]


class AbandonRecord(TypedDict):
    kind: Literal["abandon"]
    session: str


class DropRecord(TypedDict):
    kind: Literal["drop"]
    group: str
    why: str


class BatchRecord(TypedDict):
    kind: Literal["batch"]
    number: Natural
    groups: list[str]


class WrittenRecord(TypedDict):
    kind: Literal["written"]
    groups: list[str]
    reported: NotRequired[bool]


class OverRecord(TypedDict):
    """What is known of groups and sessions that are over; `run` is missing in journals of before."""

    kind: Literal["over"]
    run: NotRequired[str]
    groups: dict[str, str]
    ended: dict[str, Literal["open", "rewarded", "abandoned"]]
    dropped: NotRequired[dict[str, Natural]]
    forgotten: NotRequired[dict[str, Natural]]


_Record = Annotated[
    RunRecord
    | SessionRecord
    | TurnRecord
    | RewardRecord
    | AbandonRecord
    | DropRecord
    | BatchRecord
    | WrittenRecord
    | OverRecord,
    Field(discriminator="kind"),
]
_ADAPTER: TypeAdapter[Any] = TypeAdapter(_Record)


class DamagedLine(bytes):
    """A line of the journal that is no record, or not the one that was written."""


def encoded(record: Mapping[str, Any]) -> bytes:
    body = json.dumps(record, separators=(",", ":"), allow_nan=False).encode()[:-1]
    return body + _KEY + xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n'


def decoded(text: bytes) -> dict[str, Any] | None:
    """Return the record of a line without its end, None if it is damaged or no record."""
    tail = _TAIL.fullmatch(text, max(len(text) - len(_KEY) - 18, 0))
    if tail is not None and xxhash.xxh3_64_hexdigest(text[: tail.start()]).encode() != tail[1]:
        return None
    try:
        record = json.loads(text if tail is None else text[: tail.start()] + b"}")
        _ADAPTER.validate_python(record, strict=True)
    except (ValueError, RecursionError, ValidationError):
        return None
    return dict(record)


def has_checksum(line: bytes) -> bool:
    return _TAIL.search(line) is not None


def read_line(line: bytes, *, needs_checksum: bool) -> Iterator[dict[str, Any] | DamagedLine]:
    """Yield what is in a line: one record, or two whose line feed is damaged; of a torn line nothing.

    `line` has its line feed, a torn one has none. With `needs_checksum`, a record without a checksum is damaged: one
    that has one follows.
    """
    texts = _ENDS.split(line.removesuffix(b"\n"))
    *whole, last = texts if len(texts) == 1 or texts[-1] else texts[:-1]
    is_torn = not line.endswith(b"\n") and not has_checksum(last)
    for piece in whole if is_torn else (*whole, last):
        text = piece if piece.startswith(b"{") else piece[1:]
        record = decoded(text)
        is_whole = record is not None and (has_checksum(text) or not needs_checksum)
        yield record if record is not None and is_whole else DamagedLine(text)
