"""What the trainer gets of a session: a row for each segment, with the tokens, log-probs and versions as recorded.

A segment is a prompt and what follows it token by token: the answers of the model, which are learnt, and between them
what templates and tools wrote, which is not. It ends in a turn that no other continues. Segments that share turns, of
an agent that has branched, all have them; they are learnt in the first one alone, and so their rewards are there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from explorer_hooks.parts.agents.sessions import MOST_TOOLS, SegmentChoice, Session, SessionGroup, Turn
from syncd.experience.model import Experience, Span, TurnReward


def experiences_of(
    group: SessionGroup, name: str, now: float, segments: SegmentChoice = "all"
) -> list[Experience]:
    """Return the rows of a whole group: its rollouts in order, the segments of each one after the other.

    `now` is in seconds since the epoch. If only the last `segments` are trained, no session has rewards of turns.
    """
    sessions = [session for _, session in sorted(group.rollouts.items())]
    return [row for session in sessions for row in _rows(session, name, now, segments)]


def _rows(session: Session, group: str, now: float, segments: SegmentChoice) -> list[Experience]:
    leaves, learnt = session.leaves, set[int]()
    paths = [leaf.path for leaf in (leaves if segments == "all" else leaves[-1:])]
    rows = []
    for segment, path in enumerate(paths):
        response = _Response(session.turn_rewards)
        for turn in path:
            response.add(turn, is_learnt=turn.number not in learnt)
        learnt.update(turn.number for turn in path)
        info = _info(session, path, is_first=segment == 0, is_last=segment == len(paths) - 1)
        if segment == len(paths) - 1 and len(learnt) < len(session.turns):
            info["untrained_turns"] = len(session.turns) - len(learnt)
        rows.append(_row(session, response, group, now, (segment, len(paths)), info))
    return rows


@dataclass(slots=True)
class _Response:
    """What follows the prompt of a segment, token by token."""

    rewards: Sequence[float] | None  # the reward of each turn of the session, None if they are not known
    prompt: Sequence[int] = ()
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    doubted: list[bool] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    turn_rewards: list[TurnReward] = field(default_factory=list)

    def add(self, turn: Turn, *, is_learnt: bool) -> None:
        if turn.parent is None:
            self.prompt = turn.prompt
        else:
            self._add(turn.prompt, [0.0] * len(turn.prompt), learnt=False)
        start = len(self.tokens)
        self._add(turn.tokens, turn.logprobs, learnt=is_learnt, doubts=turn.unproven)
        for span in turn.spans:
            if not self.spans or span[1:] != self.spans[-1][1:]:
                self.spans.append(Span(start + span.start, span.generation, span.step))
        if self.rewards is not None and is_learnt:
            self.turn_rewards.append(TurnReward(len(self.tokens), self.rewards[turn.number]))

    def _add(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        *,
        learnt: bool,
        doubts: Sequence[bool] | None = None,
    ) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.mask += [learnt] * len(tokens)
        self.doubted += map(bool, doubts) if doubts is not None else [False] * len(tokens)


def _row(
    session: Session,
    response: _Response,
    group: str,
    now: float,
    position: tuple[int, int],
    info: dict[str, Any],
) -> Experience:
    generation, step = min(span[1:] for span in response.spans)
    return Experience(
        tokens=[*response.prompt, *response.tokens],
        prompt_length=len(response.prompt),
        logprobs=response.logprobs,
        action_mask=response.mask,
        reward=session.reward,
        group=group,
        task=session.task,
        rollout=session.rollout,
        segment=position[0],
        segments=position[1],
        generation=generation,
        step=step,
        spans=response.spans,
        turn_rewards=None if response.rewards is None else response.turn_rewards,
        unproven=response.doubted if any(response.doubted) else None,
        created_at=now,
        info=info,
    )


def _info(session: Session, path: Sequence[Turn], *, is_first: bool, is_last: bool) -> dict[str, Any]:
    info: dict[str, Any] = {"turns": len(path), "attempt": session.attempt}
    if session.info and is_first:
        info["score"] = dict(session.info)
    if is_first and (tools := tool_times(session.turns)):
        info["tools"] = tools
    if is_last:
        info["truncated"] = path[-1].answer.finish == "length"
    return info


def tool_times(turns: Sequence[Turn]) -> dict[str, tuple[int, float]]:
    """Return of each tool how often its time is known, and the sum of these times in seconds."""
    return added_times((name, (1, seconds)) for turn in turns for name, seconds in turn.tools.items())


def added_times(times: Iterable[tuple[str, tuple[int, float]]]) -> dict[str, tuple[int, float]]:
    """Return the sums of counts and seconds by the name of a tool, of so many names at most."""
    sums: dict[str, tuple[int, float]] = {}
    for name, (count, seconds) in times:
        if name in sums or len(sums) < MOST_TOOLS:
            count_before, before = sums.get(name, (0, 0.0))
            sums[name] = (count_before + count, round(before + seconds, 6))
    return sums
