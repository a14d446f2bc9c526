"""What the trainer gets of a session: a row for each segment, with the tokens, log-probs and versions as recorded.

A segment is a prompt and what follows it token by token: the answers of the model, which are learnt, and between them
what templates and tools wrote, which is not. It ends in a turn that no other continues. Segments that share turns, of
an agent that has branched, all have them; they are learnt in the first one alone.
"""

from collections.abc import Sequence
from typing import Any

from explorer_hooks.gateway.sessions import Session, SessionGroup, Turn
from syncd.experience.model import Experience, Span


def experiences_of(group: SessionGroup, name: str, now: float) -> list[Experience]:
    """Return the rows of a whole group: its rollouts in order, the segments of each one after the other.

    Args:
        group: The group; each of its sessions has a turn and a reward.
        name: What experiences call it.
        now: Seconds since the epoch.

    Raises:
        UsageError: A row cannot be stored.
    """
    sessions = [session for _, session in sorted(group.rollouts.items())]
    return [row for session in sessions for row in _rows(session, name, now)]


def _rows(session: Session, group: str, now: float) -> list[Experience]:
    leaves, learnt = session.leaves, set[int]()
    rows = []
    for segment, leaf in enumerate(leaves):
        path = leaf.path
        rows.append(_row(session, path, learnt, group, now, (segment, len(leaves))))
        learnt.update(turn.number for turn in path)
    return rows


def _row(
    session: Session, path: Sequence[Turn], known: set[int], group: str, now: float, place: tuple[int, int]
) -> Experience:
    """Return the row of a segment; `known` are the numbers of its turns that an earlier row has."""
    first = path[0]
    tokens, prompt = [*first.prompt, *first.tokens], len(first.prompt)
    logprobs, mask, spans, doubted = (
        list(first.logprobs),
        _mask(first, known),
        list(first.spans),
        _doubts(first),
    )
    for turn in path[1:]:
        gap, start = len(turn.prompt), len(tokens) + len(turn.prompt) - prompt
        tokens += [*turn.prompt, *turn.tokens]
        logprobs += [*[0.0] * gap, *turn.logprobs]
        mask += [*[False] * gap, *_mask(turn, known)]
        doubted += [*[False] * gap, *_doubts(turn)]
        spans += [Span(start + span.start, span.generation, span.step) for span in turn.spans]
    merged = [span for at, span in enumerate(spans) if not at or span[1:] != spans[at - 1][1:]]
    generation, step = min(span[1:] for span in merged)
    return Experience(
        tokens=tokens,
        prompt_length=prompt,
        logprobs=logprobs,
        action_mask=mask,
        reward=session.reward,
        group=group,
        task=session.task,
        rollout=session.rollout,
        segment=place[0],
        segments=place[1],
        generation=generation,
        step=step,
        spans=merged,
        unproven=doubted if any(doubted) else None,
        created_at=now,
        info=_info(session, path, place),
    )


def _mask(turn: Turn, known: set[int]) -> list[bool]:
    return [turn.number not in known] * len(turn.tokens)


def _doubts(turn: Turn) -> list[bool]:
    return [False] * len(turn.tokens) if turn.unproven is None else list(map(bool, turn.unproven))


def _info(session: Session, path: Sequence[Turn], place: tuple[int, int]) -> dict[str, Any]:
    told: dict[str, Any] = {"turns": len(path), "attempt": session.attempt}
    if session.info and place[0] == 0:
        told["score"] = dict(session.info)
    if place[0] == place[1] - 1:
        told["truncated"] = path[-1].answer.finish == "length"
    return told
