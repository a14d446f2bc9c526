"""What sessions and groups have come to, as records say it: the same code reads them live and from the journal.

    run       the journal begins; nothing that concerns sessions
    session   an attempt at a rollout begins; an earlier attempt that is open is abandoned
    turn      an answer of the model, with its exact tokens
    reward    the session is over and has its reward; the first one counts
    abandon   the session is over and is not trained
    drop      the whole group is not trained
    batch     groups are about to be written as the batch of a number
    written   groups are in a batch; only their names are left
    over      what is known of groups and sessions that are over, when the journal is rewritten

Records are plain JSON. `Sessions.apply` takes them in order and checks nothing: who makes a record checks first.
"""

import re
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from explorer_hooks.parts.agents.answers import ModelAnswer
from syncd.experience.model import Span

Record = Mapping[str, Any]  # what the journal holds: a JSON object with its `kind`

SessionState = Literal["open", "rewarded", "abandoned"]

SegmentChoice = Literal["all", "last"]
"""Which segments of a session are trained; last: the one that ends in its last turn."""

MOST_TOOLS = 16  # names of tools whose times are kept, of a turn and of a rollout

_TOOL = re.compile(r"[A-Za-z0-9_.-]{1,64}")

WRITTEN = "written"  # what became of a group that is in a batch
EQUAL = "equal"  # what became of a whole group that is in none because its rewards are all the same

MOST_ENDED = 10_000
"""Sessions of groups that are over of which is known how they ended: for requests that come twice."""

MOST_OVER = 100_000  # groups that are over whose names are known


@dataclass(slots=True)
class Turn:
    number: int  # its number in the session, from 0
    parent: "Turn | None"  # the turn that it continues token by token; None if it begins a segment
    prompt: Sequence[int]  # the tokens before the answer: behind those of the parent, or all of them
    tokens: Sequence[int]  # the tokens of the answer
    logprobs: Sequence[float]  # their log-probs
    spans: Sequence[Span]  # their versions
    unproven: Sequence[bool] | None  # for each, whether its version is doubted; None if none is
    answer: ModelAnswer
    length: int  # tokens up to the end of the answer
    # Seconds from the answer that called tools to the request that this turn answers, by the tool's name.
    tools: Mapping[str, float] = field(default_factory=dict)
    most: int | None = None  # how many tokens it might have had; None if an older journal does not say so
    stop: Sequence[str] = ()  # the strings at which it was to stop
    # When the answer was given, on the monotonic clock; 0 if another process gave it, or if a request has
    # come already that continues it.
    answered_at: float = 0.0

    @property
    def path(self) -> "list[Turn]":
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    @property
    def whole(self) -> list[int]:
        return [token for turn in self.path for part in (turn.prompt, turn.tokens) for token in part]

    def answers(self, prompt: Sequence[int], most: int, stop: Sequence[str]) -> bool:
        """Return whether this is what an engine may answer to a prompt with so many tokens at most, and these stops.

        What was cut at its most tokens would have gone on with more. What was cut before has come to the end of the
        model's positions, where every answer ends.
        """
        size = len(self.tokens)
        is_at_most = self.answer.finish == "length" and size == (self.most or size)
        fits = size == most if is_at_most else size <= most
        is_as_long = self.length - size == len(prompt)
        return self.stop == stop and fits and is_as_long and self.whole[: len(prompt)] == list(prompt)


@dataclass(slots=True)
class Session:
    """An attempt at a rollout."""

    id: str  # its name, which only its agent and its driver know
    group: str  # the group of the rollout
    task: str
    rollout: int  # which rollout of the group it is
    attempt: int
    state: SessionState = "open"
    reward: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)
    turn_rewards: Sequence[float] | None = None
    """The reward of each turn, None if only the session's is known."""
    turns: list[Turn] = field(default_factory=list)
    by_history: dict[str, Turn] = field(default_factory=dict)
    """The turn whose answer ends a history, by the key of the history."""
    by_request: dict[str, Turn] = field(default_factory=dict)
    """The last turn that answers a request, by the key of the request."""
    earlier: Sequence[Turn] = ()
    """What was drawn for the rollout in abandoned attempts."""
    taken: set[int] = field(default_factory=set)
    """Which of them are turns of this session too, by their indices."""
    reserved: set[int] = field(default_factory=set)
    """Which of them are, or are about to be: what this process alone knows."""
    limit: str = ""
    """What its last request has met: `turns`, `context`, or nothing; what this process alone knows."""

    @property
    def drawn(self) -> list[Turn]:
        left = [turn for at, turn in enumerate(self.earlier) if at not in self.taken]
        return [*left, *self.turns]

    def drawn_before(self, prompt: Sequence[int], most: int, stop: Sequence[str]) -> int | None:
        """Return the index of an earlier turn, neither taken nor reserved, that answers a whole prompt; else None."""
        left = (at for at in range(len(self.earlier)) if at not in self.taken | self.reserved)
        return next((at for at in left if self.earlier[at].answers(prompt, most, stop)), None)

    @property
    def leaves(self) -> list[Turn]:
        continued = {id(turn.parent) for turn in self.turns}
        return [turn for turn in self.turns if id(turn) not in continued]

    def answer_id(self, turn: Turn) -> str:
        return f"chatcmpl-{self.id[:12]}-{turn.number}"

    def continued(self, keys: Sequence[str]) -> tuple[int, Turn] | None:
        """Return the longest recorded history at the beginning of another: the index of its answer, and the turn."""
        places = range(len(keys) - 1, -1, -1)
        return next(((at, self.by_history[keys[at]]) for at in places if keys[at] in self.by_history), None)

    def tool_seconds(self, keys: Sequence[str], offered: Collection[str], now: float) -> dict[str, float]:
        """Return how long tools took: the time since the answer that called them and that a request continues.

        The first request that continues an answer says it, and only of tools that it offers; it came at `now`, on the
        monotonic clock.
        """
        continued = self.continued(keys)
        if continued is None:
            return {}
        turn = continued[1]
        answered_at, turn.answered_at = turn.answered_at, 0.0
        called = [name for name, _ in turn.answer.calls.values() if name in offered and _TOOL.fullmatch(name)]
        return dict.fromkeys(called[:MOST_TOOLS], round(now - answered_at, 6)) if answered_at else {}


@dataclass(slots=True)
class SessionGroup:
    """The rollouts that are compared with each other: of each the last attempt."""

    name: str
    task: str
    rollouts: dict[int, Session] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)
    """The sessions of attempts before, whose turns the last one may take."""
    touched_at: float = 0.0

    def is_whole(self, size: int) -> bool:
        return len(self.rollouts) == size and all(
            session.state == "rewarded" for session in self.rollouts.values()
        )

    @property
    def rewards(self) -> list[float]:
        return [session.reward for session in self.rollouts.values()]


class Sessions:
    """All sessions and groups that are not written yet, and the names of groups that are."""

    def __init__(self) -> None:
        self.by_id: dict[str, Session] = {}
        self.groups: dict[str, SessionGroup] = {}
        self.replaced: set[str] = set()  # sessions that another attempt has replaced, of groups that are open
        self.over: dict[str, str] = {}
        """What became of groups: `written`, or why they were dropped; of the last `MOST_OVER`."""
        self.forgotten: Counter[str] = Counter()
        """Groups that are not among these any more, by what became of them."""
        self.ended: dict[str, SessionState] = {}
        """How sessions ended whose group is over or that another attempt has replaced; the last `MOST_ENDED`."""
        self.pending: dict[int, tuple[str, ...]] = {}
        """Groups that were about to be written, by the number of the batch."""
        self.run = ""  # the name of the run that the journal is of
        self.dropped: Counter[str] = Counter()  # groups that were dropped since the last batch, by reason
        self._takers: Mapping[str, Callable[[Record], None]] = {
            "session": self._begin,
            "turn": self._turn,
            "reward": self._reward,
            "abandon": self._abandon,
            "drop": self._drop,
            "batch": self._batch,
            "written": self._written,
            "over": self._over,
        }

    def apply(self, record: Record, now: float = 0.0) -> None:
        """Take the next record; `now` is when its group was last heard of.

        A record of a session that is over says nothing: it may come behind the record that tells how it ended, if the
        journal was rewritten meanwhile.
        """
        is_over = record["kind"] in ("turn", "reward", "abandon") and record["session"] not in self.by_id
        if not is_over:
            self._takers[record["kind"]](record)
        group = self.groups.get(record.get("group", ""))
        session = self.by_id.get(record.get("session", ""))
        if session is not None:
            group = self.groups.get(session.group)
        if group is not None:
            group.touched_at = now

    @property
    def counts(self) -> dict[str, int]:
        return {"groups": len(self.groups), "sessions": len(self.by_id)}

    def knows(self, name: str) -> bool:
        return name in self.by_id or name in self.ended

    def whole_groups(self, size: int) -> list[SessionGroup]:
        """Return the groups whose rollouts all have a reward, in the order in which they began."""
        return [group for group in self.groups.values() if group.is_whole(size)]

    def all_dropped(self) -> Counter[str]:
        dropped = self.forgotten + Counter(self.over.values())
        del dropped[WRITTEN]
        return dropped

    def settled(self, upcoming: int) -> dict[str, Any]:
        """Return the record of what became of groups that were about to be written when the process ended.

        Batches below `upcoming`, the next one, were written, each as it was last recorded.
        """
        written = [name for number, names in self.pending.items() if number < upcoming for name in names]
        return {"kind": "written", "groups": [name for name in written if name in self.groups]}

    def needs(self, record: Record) -> bool:
        """Return whether a record of the journal still says something."""
        if record["kind"] in ("run", "batch"):
            return record["kind"] == "run" or record["number"] in self.pending
        name = record.get("session")
        return name in self.by_id or name in self.replaced

    def rest(self) -> dict[str, Any]:
        return {
            "kind": "over",
            "run": self.run,
            "forgotten": dict(self.forgotten),
            "groups": dict(self.over),
            "ended": dict(self.ended),
            "dropped": dict(self.dropped),
        }

    def _begin(self, record: Record) -> None:
        group = self.groups.setdefault(record["group"], SessionGroup(record["group"], record["task"]))
        earlier = group.rollouts.get(record["rollout"])
        session = Session(
            record["session"], record["group"], record["task"], record["rollout"], record["attempt"]
        )
        if earlier is not None:
            session.earlier = earlier.drawn
            group.replaced.add(earlier.id)
            self.replaced.add(earlier.id)
            self._end(earlier, "abandoned")
        group.rollouts[session.rollout] = self.by_id[session.id] = session

    def _turn(self, record: Record) -> None:
        session = self.by_id[record["session"]]
        parent = None if record["parent"] is None else session.turns[record["parent"]]
        said = record["answer"]
        before = 0 if parent is None else parent.length
        turn = Turn(
            len(session.turns),
            parent,
            array("i", record["prompt"]),
            array("i", record["tokens"]),
            array("f", record["logprobs"]),
            tuple(Span(*span) for span in record["spans"]),
            None if record["unproven"] is None else list(map(bool, record["unproven"])),
            ModelAnswer(
                said["content"],
                said["reasoning"],
                {name: (call[0], call[1]) for name, call in said["calls"].items()},
                said["finish"],
            ),
            before + len(record["prompt"]) + len(record["tokens"]),
            record.get("tools", {}),
            record.get("most"),
            tuple(record.get("stop", ())),
        )
        session.turns.append(turn)
        if record.get("earlier") is not None:
            session.taken.add(record["earlier"])
        session.by_history[record["history"]] = session.by_request[record["request"]] = turn

    def _reward(self, record: Record) -> None:
        session = self.by_id[record["session"]]
        session.state, session.reward, session.info = "rewarded", record["reward"], record["info"]
        session.turn_rewards = record.get("turn_rewards")

    def _abandon(self, record: Record) -> None:
        session = self.by_id[record["session"]]
        session.state = "abandoned"
        session.by_history.clear()
        session.by_request.clear()

    def _drop(self, record: Record) -> None:
        self.dropped[record["why"]] += record["group"] not in self.over
        self._forget(record["group"], record["why"])

    def _batch(self, record: Record) -> None:
        # A batch of a lower number was written; the record that says so may be damaged.
        for name in self.settled(record["number"])["groups"]:
            self._forget(name, WRITTEN)
        self.pending[record["number"]] = tuple(record["groups"])

    def _written(self, record: Record) -> None:
        self.pending.clear()
        if record.get("reported"):
            self.dropped.clear()
        for name in record["groups"]:
            self._forget(name, WRITTEN)

    def _over(self, record: Record) -> None:
        self.ended.update(record["ended"])
        self.dropped.update(record.get("dropped", {}))
        self.forgotten.update(record.get("forgotten", {}))
        for name, why in record["groups"].items():
            self._forget(name, why)

    def _forget(self, name: str, why: str) -> None:
        group = self.groups.pop(name, None)
        self.over[name] = why
        if len(self.over) > MOST_OVER:
            self.forgotten[self.over.pop(next(iter(self.over)))] += 1
        self.replaced -= group.replaced if group is not None else set()
        for session in group.rollouts.values() if group is not None else ():
            self._end(session, session.state if session.state != "open" else "abandoned")

    def _end(self, session: Session, state: SessionState) -> None:
        self.by_id.pop(session.id, None)
        self.ended[session.id] = state
        if len(self.ended) > MOST_ENDED:
            del self.ended[next(iter(self.ended))]
