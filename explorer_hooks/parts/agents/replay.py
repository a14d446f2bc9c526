"""Sessions as a journal has them. What is damaged costs its group, which is dropped, and nothing else.

Damage may hide what a group needs: a turn, a reward, that it was written. A group whose records have a gap is dropped
too. So are, where a line does not say what it is of, the groups that may have been over by then, and where it is more
than a line, all that had begun.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from explorer_hooks.parts.agents.records import DamagedLine
from explorer_hooks.parts.agents.sessions import Record, Sessions

WHY = "damaged"  # why groups were dropped of which a record is damaged

_SESSION = re.compile(rb'"session":"([0-9a-f]{32})"')
_SCOPED = re.compile(rb'"session":"|"kind":"(?:session|turn|reward|abandon)"')
_KIND = b'{"kind":'
_OVER = re.compile(rb'"forgotten":|"ended":|"kind":"over"')
_RUN = re.compile(rb'"kind":"run"|"run":"')
_FOREIGN = re.compile(rb"[^ -~]")
"""What no line has; more than a few of them are a hole, which may hide several lines."""

_FEW = 2
_NAMES = re.compile(r'"(?:group|groups)":(?=["\[])')


@dataclass(slots=True)
class JournalReplay:
    sessions: Sessions  # what its records come to
    lines: int = 0  # how many lines are damaged
    gaps: set[str] = field(default_factory=set)  # groups of which a record is missing
    # Groups that damaged lines may be of; names that were damaged too are among them.
    suspects: set[str] = field(default_factory=set)

    def read(self, records: "Iterable[dict[str, Any] | DamagedLine]", now: float = 0.0) -> None:
        for is_damaged, run in groupby(records, lambda record: isinstance(record, DamagedLine)):
            if is_damaged:
                self._skip([record for record in run if isinstance(record, DamagedLine)])
                continue
            for record in run:
                self._take(record, now)

    def drop(self) -> list[str]:
        """Drop the groups of what is damaged, and return their names; what is in a batch stays there."""
        lost = sorted(self.gaps | (self.suspects & self.sessions.groups.keys()))
        for name in lost:
            self.sessions.apply({"kind": "drop", "group": name, "why": WHY})
        return lost

    def _take(self, record: Any, now: float) -> None:
        if gap := _gap(self.sessions, record):
            self.gaps.add(gap)
        elif record["kind"] == "run":
            self.sessions.run = record["run"]
        else:
            self.sessions.apply(record, now)

    def _skip(self, lines: list[DamagedLine]) -> None:
        self.lines += len(lines)
        self.suspects |= _suspects(self.sessions, b"\n".join(lines))


def _gap(sessions: Sessions, record: Record) -> str:
    """Return the group of a record before which another one is missing, nothing if none is."""
    kind, group = record["kind"], record.get("group", "")
    if kind not in ("turn", "reward"):
        return ""
    session = sessions.by_id.get(record["session"])
    if session is None:
        is_over = record["session"] in sessions.ended or group in sessions.over
        return "" if is_over else str(group)
    count = len(session.turns)
    if kind == "reward":
        rewards = record.get("turn_rewards")
        is_whole = record.get("turns", count) == count and (rewards is None or len(rewards) == count)
    else:
        parent, spans = record["parent"], record["spans"]
        is_whole = record.get("number", count) == count and (parent is None or parent < count)
        tokens, doubts = len(record["tokens"]), record["unproven"]
        sizes = {tokens, len(record["logprobs"]), tokens if doubts is None else len(doubts)}
        is_whole = is_whole and len(sizes) == 1 and bool(tokens) and bool(spans) and spans[0][0] == 0
    return "" if is_whole else session.group


def _suspects(sessions: Sessions, damage: bytes) -> set[str]:
    """Return the groups that lines may be of which are damaged."""
    if len(_FOREIGN.findall(damage)) > _FEW or damage.count(_KIND) > 1:
        return set(sessions.groups)
    is_scoped = bool(_SCOPED.search(damage))
    if not is_scoped and (_OVER.search(damage) or _RUN.search(damage)):
        return set()  # both are in the journal twice
    ids = [name.decode() for name in _SESSION.findall(damage)]
    names = set(_names(damage.decode("utf-8", "replace")))
    names |= {sessions.by_id[name].group for name in ids if name in sessions.by_id}
    is_known = bool(names) and names <= sessions.groups.keys()
    if is_scoped or is_known:
        return names
    return names | {
        group.name
        for group in sessions.groups.values()
        if all(session.state == "rewarded" for session in group.rollouts.values())
    }


def _names(text: str) -> Iterator[str]:
    for key in _NAMES.finditer(text):
        try:
            value, _ = json.JSONDecoder().raw_decode(text, key.end())
        except (ValueError, RecursionError):
            continue
        yield from filter(lambda entry: isinstance(entry, str), value if isinstance(value, list) else [value])
