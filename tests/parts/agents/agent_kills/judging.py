"""What a run must have left behind: each group once or counted, each rollout just what its agent was told."""

import itertools
import json
import os
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from agent_kills.engine import logprob, prompt_key, read_log
from agent_kills.parts import SIZE
from support.chat_model import make_tokenizer

from syncd.experience import batch_paths
from syncd.experience.table import decode_batch
from syncd.protocol.layout import Job

SHUFFLES = 2000


@dataclass
class Verdict:
    """What was found.

    Args:
        wrong: What must not be.
        rollouts: Finished rollouts.
        dropped: Groups that were dropped, by reason, as the metrics count them.
        attempts: Attempts that took a turn.
        turns: Turns of each finished rollout.
        tokens: Tokens that the model chose, of each.
    """

    wrong: list[str] = field(default_factory=list)
    rollouts: int = 0
    dropped: Counter = field(default_factory=Counter)
    attempts: int = 0
    turns: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def judged(parts):
    """Return what a run that has ended has left behind."""
    found = Verdict()
    for part, name in ((parts.player, "the player"), (parts.explorer, "the explorer")):
        if part.has_ended() and part.code != 0:
            found.wrong.append(f"{name} ended with {part.code}")
    job = Job.at(os.path.join(parts.place, "job"))
    rows = list(_rows(job))
    _judge_groups(rows, parts, found)
    told = {
        name: read_log(os.path.join(parts.place, "said", name)) for name in os.listdir(os.environ["SAID"])
    }
    found.attempts = sum(bool(lines) for lines in told.values())
    found.wrong += [
        f"{name}: {line['wrong']}" for name, lines in told.items() for line in lines if "wrong" in line
    ]
    drawn = {line["text"]: line for line in read_log(os.path.join(parts.place, "answers.jsonl"))}
    words = make_tokenizer().convert_ids_to_tokens(range(len(make_tokenizer())))
    for row in rows:
        found.turns.append(row.info["turns"])
        found.tokens.append(sum(row.action_mask))
        for problem in _problems(row, told.get(row.info["score"]["session"], []), drawn, words):
            found.wrong.append(f"{row.group}, rollout {row.rollout}: {problem}")
    return found


def _rows(job):
    directory = batch_paths.batches(job, "e0")
    for number in sorted(batch_paths.numbers(job, directory)):
        path = batch_paths.batch(job, "e0", number)
        yield from decode_batch(job.disk.read(path, 1 << 28), path)


def _judge_groups(rows, parts, found):
    """Each rollout of a task that is there is there once, and what is not there was counted."""
    found.rollouts = len(rows)
    places = Counter((row.task, row.rollout) for row in rows)
    found.wrong += [f"{place} was written {count} times" for place, count in places.items() if count > 1]
    groups = {}
    for row in rows:
        groups.setdefault(row.group, []).append((row.task, row.rollout))
    found.wrong += [f"{group} is {members}" for group, members in groups.items() if len(members) != SIZE]
    path = os.path.join(parts.place, "job/explorers/e0/metrics.jsonl")
    if not os.path.exists(path):
        found.wrong.append("the explorer has written no metrics")
        return
    with open(path) as file:
        lines = [json.loads(line) for line in file]
    found.dropped.update(lines[-1].get("dropped_total", {}) if lines else {})
    missing = len(parts.tasks) - len(groups)
    if missing != found.dropped.total():
        found.wrong.append(f"{missing} groups are missing, and {dict(found.dropped)} are counted")


def _problems(row, told, drawn, words):
    """Yield what is wrong with a row; `told` is what its agent noted, `drawn` what the engine did."""
    if not told or "turns" not in told[-1]:
        yield "its agent had not ended"
    answers, at = [], 0
    for own, run in itertools.groupby(range(len(row.action_mask)), key=row.action_mask.__getitem__):
        places = list(run)
        if own:
            answers.append((places[0], "".join(words[row.tokens[row.prompt_length + at]] for at in places)))
    texts = [text.removesuffix("<|end|>") for _, text in answers]
    if texts != [line["text"] for line in told if "text" in line]:
        yield "its turns are not those that its agent was told"
    spans = [(span.start, span.step) for span in row.spans]
    for (at, _), text in zip(answers, texts, strict=True):
        line = drawn.get(text)
        if line is None:
            yield f"nobody has drawn {text!r}"
        elif line["prompt"] != prompt_key(row.tokens[: row.prompt_length + at]):
            yield f"{text!r} was drawn for another prompt"
        elif row.unproven is not None and row.unproven[at]:
            continue  # an engine that was killed meanwhile has forgotten its version: not trained
        elif not line["label"].startswith(_label(spans, at)) or abs(row.logprobs[at] - logprob(text)) > 1e-6:
            yield f"{text!r} has another version or log-prob"


def _label(spans, at):
    step = next(step for start, step in reversed(spans) if start <= at)
    return f"1.{step}" if step else "default"


def compared(ones, others, seed=0):
    """Return the distance of two samples after Kolmogorov and Smirnov, and its p-value.

    Lengths are whole numbers, for which the usual formula is not right; so p is how often samples that are put
    together and parted at random are as far from each other.
    """
    both = np.concatenate([ones, others])
    chance, size = np.random.default_rng(seed), len(ones)
    distance = _distance(both, size)
    far = sum(_distance(chance.permutation(both), size) >= distance for _ in range(SHUFFLES))
    return distance, (far + 1) / (SHUFFLES + 1)


def _distance(both, size):
    order = np.argsort(both, kind="stable")
    steps = np.where(order < size, 1 / size, -1 / (len(both) - size))
    ends = np.append(np.diff(both[order]) > 0, True)
    return float(np.abs(np.cumsum(steps)[ends]).max())
