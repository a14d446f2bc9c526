"""Evaluation sets: their figures against all choices of responses, and what of a set is refused."""

import itertools
import json
import math
from fractions import Fraction

import pytest
from support.job_file import LEAST

pytest.importorskip("pydantic", reason="explorers need pydantic")

from explorer_hooks.parts.evaluation.bench import BenchStep
from explorer_hooks.parts.evaluation.bench_report import tables
from explorer_hooks.parts.evaluation.sets import TaskOutcome, best_at, figures_of, open_sets, pass_at
from explorer_hooks.run.load import load_file
from explorer_hooks.run.scoring import BuiltInScorer
from syncd.errors import ConfigError
from syncd.jobfile.evaluation import EvaluationSet
from trainer.config.load import load_config


@pytest.fixture
def write(tmp_path):
    """Write a job's file with some lines more, and return its path."""

    def one(more=""):
        path = tmp_path / "job.toml"
        path.write_text(f'{LEAST}[explorer]\ntasks = "tasks.jsonl"\n{more}')
        return str(path)

    return one


def test_pass_at_k_is_the_share_of_choices_with_a_correct_response():
    for samples, correct in ((1, 0), (1, 1), (5, 2), (8, 3), (8, 8)):
        responses = [True] * correct + [False] * (samples - correct)
        for k in range(1, samples + 1):
            choices = list(itertools.combinations(responses, k))
            assert pass_at(samples, correct, k) == pytest.approx(sum(map(any, choices)) / len(choices))
    assert pass_at(10, 3, 5) == pytest.approx(1 - 7 * 6 * 5 * 4 * 3 / (10 * 9 * 8 * 7 * 6))
    assert 0.0 < pass_at(1024, 1, 512) < 1.0


def test_best_at_k_is_the_mean_best_reward_over_all_choices():
    rewards = [0.5, -1.0, 2.0, 0.5, 0.25]
    for k in range(1, 6):
        choices = list(itertools.combinations(rewards, k))
        assert best_at(rewards, k) == pytest.approx(sum(map(max, choices)) / len(choices))


def test_the_table_of_a_set_has_every_digit_of_a_count():
    line = {"generation": 1, "step": 20, "reward": 0.25, "tokens": 1234567}
    rows = list(tables([BenchStep(20, lines={"": line})], {"": EvaluationSet(tasks="t")}))
    assert rows[2].split() == ["20", "1.20", "0.2500", "1234567"]


def test_figures_are_means_over_the_tasks_whose_responses_all_have_rewards():
    section = EvaluationSet(tasks="t", samples=4, temperature=1.0, correct=0.5, k=(1, 2))
    outcomes = [
        TaskOutcome([1.0, 0.0, 0.0, 0.5], 40, 1),
        TaskOutcome([0.0, 0.0, 0.25, 0.0], 30, 2),
        TaskOutcome((), 10, 4),
    ]
    figures = figures_of(section, outcomes)
    assert figures == pytest.approx({
        "reward": float((Fraction(3, 8) + Fraction(1, 16)) / 2),
        # Of two means, the standard error is half of their distance.
        "reward_stderr": pytest.approx(float((Fraction(3, 8) - Fraction(1, 16)) / 2)),
        "truncated": 3 / 8,
        "pass_at_1": (2 / 4 + 0) / 2,
        "pass_at_2": (1 - math.comb(2, 2) / math.comb(4, 2)) / 2,
        # Of six pairs of the first task three have 1.0, two 0.5 and one 0; of the second three have 0.25.
        "best_at_2": ((3 * 1.0 + 2 * 0.5) / 6 + 3 * 0.25 / 6) / 2,
    })  # fmt: skip
    assert {"tasks", "failed", "tokens", "seconds", *figures} == set(section.figure_names())
    assert set(figures_of(section, outcomes[2:]).values()) == {None}


def test_a_set_is_a_table_whose_tasks_are_relative_to_the_file(write, tmp_path):
    path = write('[explorer.evaluation.sets.math]\ntasks = "math.jsonl"\nsamples = 8\ntemperature = 1.0\n')
    more = ["--explorer.evaluation.sets.math.k=[1,4]", "--explorer.evaluation.sets.code.tasks=code.jsonl"]
    sets = load_file(path, more).explorer.evaluation.named()
    assert list(sets) == ["math", "code"]
    assert sets["math"].tasks == str(tmp_path / "math.jsonl")
    assert (sets["math"].ks, sets["code"].ks, sets["code"].temperature) == ((1, 4), (1,), 0.0)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ("[explorer.evaluation]\nsamples = 8", "samples = 8 at temperature 0"),
        ("[explorer.evaluation]\nk = [4]", "k has 4, and there are 1 responses"),
        ("[explorer.evaluation]\nk = [0]", r"explorer.evaluation.k = \[0\] is not a list"),
        ("[explorer.evaluation]\nreward = 'none such'", "neither auto, exact_match, math,"),
        ("[explorer.evaluation.sets.math]\nlimit = 4", "sets.math.tasks is missing"),
        ('[explorer.evaluation.sets.math]\ntasks = "t"\nlimit = "4"', 'sets.math.limit = "4" is not a whole'),
        ('[explorer.evaluation.sets.math]\ntasks = "t"\nsample = 4', "unknown key .*sets.math.sample"),
        ("[explorer.evaluation.sets]\nmath = 4", "sets.math = 4 is not a table"),
        ('[explorer.evaluation.sets.reward]\ntasks = "t"', "'reward' is not a name of an evaluation set"),
        ('[explorer.evaluation.sets."a b"]\ntasks = "t"', "'a b' is not a name of an evaluation set"),
    ],
)
def test_what_a_set_cannot_be_is_an_error_that_names_the_key(write, more, what):
    with pytest.raises(ConfigError, match=what):
        load_file(write(more))


def test_steps_are_compared_only_by_a_figure_that_a_set_produces(write):
    sets = '[explorer.evaluation.sets.math]\ntasks = "t"\nsamples = 4\ntemperature = 1.0\ncorrect = 1\n'
    for metric in ("eval/math/pass_at_4", "eval/math/best_at_4", "eval/math/reward"):
        load_config(write(f'{sets}[selection]\nmetric = "{metric}"\n'), [])
    load_config(write('[selection]\nmetric = "eval/reward"\n'), [])  # explorers may have a file of their own
    for metric in ("eval/reward", "eval/math/pass_at_8", "eval/maths/reward"):
        with pytest.raises(ConfigError, match="is a figure of no set") as error:
            load_config(write(f'{sets}[selection]\nmetric = "{metric}"\n'), [])
        assert json.dumps(error.value.hint or "").startswith('"did you mean eval/math/')


def test_the_key_of_a_set_differs_by_who_says_the_reward_and_by_columns(write, tmp_path):
    rows = [{"prompt": "a", "question": "b", "answer": "c"}]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def key(more):
        file = load_file(write(f'{more}[explorer.evaluation]\ntasks = "held.jsonl"\n'))
        with open_sets(file, BuiltInScorer("exact_match"), lambda *_: True) as (held_out,):
            return held_out.key

    agent = '[explorer.agent]\ncommand = "true"\n'
    found = [key(""), key('prompt_key = "question"\n'), key(agent), key(f'{agent}reward = "function"\n')]
    assert len(set(found)) == len(found)
    assert key("") == found[0]
