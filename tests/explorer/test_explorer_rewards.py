"""Rewards: final answers and when two are the same; functions of one's own that hang, die and lie."""

import time

import pytest

from explorer_hooks.explorer.rewards import (
    BUILT_IN,
    MAX_ANSWER,
    MAX_RESPONSE,
    final_answer,
    same_answer,
    score_of,
)
from explorer_hooks.explorer.scoring import open_scorer
from syncd.errors import ConfigError


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{7}", "7"),
        (r"\boxed{a{b}c} and 9", "a{b}c"),
        ("reasoning 12\n#### 1,234", "1,234"),
        ("first #### 1\nlast #### 2 ", "2"),
        ("it is 3, no, -4.5", "-4.5"),
        ("between 1,000 and 2,000,", "2,000"),
        ("a ratio of 3/4", "3/4"),
        ("nothing", None),
        ("", None),
        (r"\boxed{never closed 5", "5"),
    ],
)
def test_the_final_answer_is_extracted_from_a_response(response, answer):
    assert final_answer(response) == answer


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("42", "42.0"),
        ("42", " $42$ "),
        ("1,234", "1234"),
        ("0.5", r"\frac{1}{2}"),
        ("1/2", r"\dfrac12"),
        ("-1/2", r"-\frac{1}{2}"),
        ("-1/2", r"\frac{-1}{2}"),
        ("50%", r"50\%"),
        ("50%", "0.5"),
        ("50%", "50"),
        ("x = 5", "5"),
        (r"10^{3}".replace("10", r"1\times10"), "1000"),
        ("1e3", "1000"),
        (r"90^\circ", "90"),
        (r"\text{Monday}", "monday"),
        (r"\left( 1, 2 \right)", "(1.0,2)"),
        ("5.", "5"),
        ("0.1", "1/10"),
        ("\u22123", "-3"),
    ],
)
def test_equal_answers_in_different_notation_match(left, right):
    assert same_answer(left, right)
    assert same_answer(right, left)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("42", "43"),
        ("1/3", "0.333"),
        ("0.1", "0.1000000000000000001"),
        ("1/0", "0"),
        ("(1,2)", "(2,1)"),
        ("(1,2)", "[1,2]"),
        ("", ""),
        ("1e999", "inf"),
        ("50%", "5000"),
        ("nan", "0"),
        ("12", "1,2"),
    ],
)
def test_different_answers_do_not_match(left, right):
    assert not same_answer(left, right)
    assert not same_answer(right, left)


@pytest.mark.parametrize(
    "hostile",
    [
        "9" * MAX_RESPONSE,
        "1e" + "9" * 1000,
        "1/" * 100_000,
        r"\boxed{" * 30_000,
        r"\boxed{" + "{" * 100_000,
        "1," * 100_000,
        r"\frac" * 50_000,
        "####" * 60_000,
        "__import__('os').system('true')",
        "9**9**9**9",
        "\x00" * 1000,
        "\u0663" * 1000,
    ],
)
def test_hostile_responses_are_parsed_in_linear_time(hostile):
    whole, quarter = seconds_of(hostile), seconds_of(hostile[: len(hostile) // 4])
    assert whole < 10 * quarter + 1.0, "quadratic patterns take sixteen times as long, minutes here"


def seconds_of(hostile):
    """Return the seconds of a processor that scoring takes; nothing of it is an answer."""
    begin = time.process_time()
    for response in (hostile, rf"\boxed{{{hostile}}}", f"#### {hostile}"):
        assert BUILT_IN["math"]("", response, {"answer": "5"}) == 0.0
    return time.process_time() - begin


def test_long_answers_match_only_as_a_whole():
    long = "a" * (MAX_ANSWER + 5)
    assert same_answer(long, long)
    assert not same_answer(long, f"{long}b")


def test_a_task_s_answer_may_be_a_worked_solution():
    math = BUILT_IN["math"]
    assert math("", "it is 8", {"answer": "3+5 = 8\n#### 8"}) == 1.0
    assert math("", "it is 8", {"answer": r"thus \boxed{8}"}) == 1.0
    assert math("", "it is 8", {"answer": 8}) == 1.0
    assert math("", "it is 9", {"answer": 8}) == 0.0


def test_exact_match_strips_whitespace_only():
    exact = BUILT_IN["exact_match"]
    assert exact("", " yes\n", {"answer": "yes"}) == 1.0
    assert exact("", "Yes", {"answer": "yes"}) == 0.0
    assert exact("", "", {"answer": None}) == 0.0


@pytest.mark.parametrize(
    ("returned", "reward"),
    [(1, 1.0), (True, 1.0), (0.25, 0.25), ({"reward": 2, "why": "good"}, 2.0)],
)
def test_a_reward_function_may_return_a_number_or_a_dict_with_reward(returned, reward):
    assert score_of(returned).reward == reward


@pytest.mark.parametrize("returned", [float("nan"), float("inf"), None, "much", {"score": 1}, [1], 10**400])
def test_an_invalid_return_value_is_a_problem_without_a_reward(returned):
    score = score_of(returned)
    assert score.reward is None
    assert score.problem


def test_reward_info_is_converted_to_plain_data():
    assert score_of({"reward": 1, "why": ("a", 1)}).info == {"why": ["a", 1]}
    assert score_of({"reward": 1, "set": {1}}).info == {"set": "{1}"}


FUNCTIONS = """
import os, time

def score(prompt, response, task):
    print("chatter")
    if response == "hang":
        time.sleep(1000)
    if response == "die":
        os._exit(3)
    if response == "raise":
        raise ValueError("of no worth")
    if response == "nan":
        return float("nan")
    return {"reward": float(response), "task": task["id"], "prompt": prompt}
"""


@pytest.fixture
def places(tmp_path):
    (tmp_path / "own_reward.py").write_text(FUNCTIONS)
    return [str(tmp_path)]


@pytest.mark.slow
def test_a_function_that_hangs_dies_raises_or_returns_nan_loses_one_score(places):
    scores = open_scorer("own_reward:score", timeout=6.0, workers=2, directories=places)
    try:
        responses = ["1", "hang", "2", "die", "3", "raise", "4", "nan", "5"]
        found = scores.score([("p", response, {"id": "t"}) for response in responses])
    finally:
        scores.close()
    assert [score.reward for score in found] == [1.0, None, 2.0, None, 3.0, None, 4.0, None, 5.0]
    assert found[0].info == {"task": "t", "prompt": "p"}
    problems = [score.problem for score in found if score.reward is None]
    assert problems == [
        "it took more than 6 s",
        "it ended its process",
        "ValueError: of no worth",
        "it returned nan",
    ]


@pytest.mark.parametrize("function", ["own_reward:missing", "no_such_module:score"])
def test_a_reward_function_that_cannot_be_imported_is_an_error_at_once(places, function):
    with pytest.raises(ConfigError, match=function):
        open_scorer(function, timeout=30.0, workers=1, directories=places)
