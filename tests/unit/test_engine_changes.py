"""The test of an engine's change: its level of false alarms, and what it finds, by simulated noise."""

import itertools
import math
import random

import pytest

from explorer_hooks.hook import ProbeAnswer
from explorer_hooks.proof.changes import (
    KEPT,
    LEVEL,
    START,
    Anchor,
    Anchors,
    least_seen,
    log_chance,
    stayed,
)
from syncd.protocol.probe import Probe

ROWS, LENGTH = 4, 16
TOKENS = tuple(tuple(range(5, 5 + LENGTH)) for _ in range(ROWS))
NOISE = 0.01


def rows(values):
    return tuple(tuple(values[at : at + LENGTH - 1]) for at in range(0, len(values), LENGTH - 1))


class Run:
    """Versions of a model whose log-probs drift by `step` nats each, and the noise of trainer and engine in each."""

    def __init__(self, seed, *, trainer=NOISE, engine=NOISE):
        self.draw, self.noise = random.Random(seed), (trainer, engine)
        self.true = [self.draw.uniform(-8, -0.1) for _ in range(ROWS * (LENGTH - 1))]
        self.loaded = list(self.true)
        self.anchors, self.count = Anchors(), 0
        self.prove()

    def heard(self, values, noise):
        return rows([value + self.draw.gauss(0, noise) for value in values])

    def prove(self, answer=None):
        """Return why the engine fails at this version; keep the version as proven otherwise."""
        probe = Probe(TOKENS, self.heard(self.true, self.noise[0]), "bfloat16", "bfloat16")
        answers = (ProbeAnswer(answer or self.heard(self.loaded, self.noise[1])),)
        name = f"1.{self.count}" if self.count else START
        new = Anchor(name, probe, answers)
        (changes,) = self.anchors.changes(new)
        reason, self.seen, self.answer = stayed(changes), least_seen(changes), answers[0].logprobs
        if not reason:
            self.anchors.add(new)
        self.count += 1
        return reason

    def move(self, size, loaded=1.0):
        """Move the model; the engine takes a part of the change."""
        for at in range(len(self.true)):
            change = self.draw.gauss(0, size)
            self.true[at] += change
            self.loaded[at] += loaded * change


def test_the_bound_is_that_of_random_signs():
    assert log_chance([1.0] * 60) == pytest.approx(-60 * math.log(2), rel=1e-3)  # all of one sign: 2**-60
    assert log_chance([-1.0, 0.5]) == log_chance([]) == log_chance([0.0]) == log_chance([math.nan]) == 0.0
    draw = random.Random(1)
    terms = [draw.expovariate(1) for _ in range(60)]
    signed = [math.fsum(draw.choice((-1, 1)) * term for term in terms) for _ in range(20000)]
    for share in (0.2, 0.3, 0.4):
        total = share * math.fsum(terms)
        # A set of signs that gives this sum: its bound is above the share of all sets that give as much.
        flipped = [*terms]
        for at in sorted(range(60), key=lambda at: terms[at]):
            if math.fsum(flipped) - 2 * terms[at] < total:
                break
            flipped[at] = -terms[at]
        reached = sum(value >= math.fsum(flipped) for value in signed) / len(signed)
        assert math.exp(log_chance(flipped)) >= reached


@pytest.mark.parametrize("noise", [(NOISE, NOISE), (0.0, NOISE), (NOISE, 0.7 * NOISE), (NOISE, 3 * NOISE)])
@pytest.mark.parametrize("step", [1e-4, 1e-3, 1e-2, 0.1])
def test_a_right_engine_never_fails_whatever_the_learning_rate(noise, step):
    for seed in range(2):
        run = Run(seed, trainer=noise[0], engine=noise[1])
        for _ in range(25):
            run.move(step)
            assert run.prove() == ""


@pytest.mark.parametrize("since", [1, 12])
def test_an_engine_that_gives_its_old_answers_is_found_once_the_model_has_moved_by_half_the_noise(since):
    for seed in range(8):
        run = Run(seed, trainer=0.0)  # its noise would count as a change
        for _ in range(since):
            run.move(0.1)
            assert run.prove() == ""
        old = run.answer
        run.move(0.3 * NOISE)
        assert run.prove(old) == ""
        run.move(0.9 * NOISE)
        assert "it was not loaded" in run.prove(old)


def test_an_engine_that_stays_with_answers_that_vary_is_found_by_the_slope():
    run = Run(3, engine=0.002)
    run.move(0.1, loaded=0.0)
    reason = run.prove()
    assert "a part of it alone" in reason
    assert "its start model" in reason


@pytest.mark.parametrize(
    ("lacking", "moved", "is_found"), [(0.5, 10, True), (0.3, 20, True), (0.02, 100, False)]
)
def test_a_part_that_was_not_loaded_is_found_if_it_is_large_enough(lacking, moved, is_found):
    run = Run(4)
    run.move(moved * NOISE, loaded=1 - lacking)
    assert bool(run.prove()) is is_found


def test_what_would_have_been_found_is_told_with_each_proof():
    run = Run(5)
    run.move(1e-5)
    assert run.prove() == "" or run.seen is None
    run.move(100 * NOISE)
    assert run.prove() == ""
    share, since = run.seen
    assert share <= 0.2
    assert since in (START, "1.1")
    weaker = Run(5, trainer=5 * NOISE)
    weaker.move(20 * NOISE)
    assert weaker.prove() == ""
    assert weaker.seen[0] > share


def test_the_anchors_reach_from_the_first_to_the_newest():
    kept = Anchors()
    for number in range(1000):
        probe = Probe(((1, 2),), ((-1.0 - number / 1000,),), "float32", "float32")
        for _ in range(2):
            kept.add(Anchor(str(number), probe, (ProbeAnswer(probe.logprobs),)))
        found = [int(anchor.version) for anchor in kept]
        assert (found[0], found[-1]) == (0, number)
        assert len(found) <= KEPT + 1
        gaps = [after - before for before, after in itertools.pairwise(found)]
        assert max(gaps, default=1) <= 2 * (number + 1) / KEPT + 1


def test_probes_of_other_tokens_and_answers_of_other_replicas_are_not_compared():
    run = Run(6)
    other = Probe(((1, 2),), ((-1.0,),), "bfloat16", "bfloat16")
    assert run.anchors.changes(Anchor("1.2", other, (ProbeAnswer(((-1.0,),)),))) == [[]]
    same = next(iter(run.anchors)).probe
    assert run.anchors.changes(Anchor("1.2", same, (ProbeAnswer(same.logprobs),) * 2)) == [[], []]
    run.anchors.add(Anchor("1.1", same, (ProbeAnswer(same.logprobs),), ("xxh3:1",)))
    again = Anchor("1.2", same, (ProbeAnswer(same.logprobs),), ("xxh3:1",))
    assert [change.since for change in run.anchors.changes(again)[0]] == [START]
    assert stayed([]) == ""
    assert least_seen([]) is None
    assert LEVEL == 1e-6
