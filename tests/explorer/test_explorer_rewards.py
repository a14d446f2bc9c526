"""Rewards: final answers and when two are the same; functions of one's own that hang, die and lie."""

import json
import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from importlib.util import find_spec

import pytest
from support.synchronizers import eventually

from explorer_hooks.run import scoring
from explorer_hooks.run.rewards import (
    BUILT_IN,
    MAX_ANSWER,
    MAX_RESPONSE,
    final_answer,
    plain_task,
    same_answer,
    score_of,
)
from explorer_hooks.run.scoring import BuiltInScorer, ScoredGroup, ScoredText, open_scorer
from explorer_hooks.tasks.sources import open_tasks
from syncd.errors import ConfigError
from syncd.extras import install_command
from syncd.jobfile.explorer_sections import RewardSection
from syncd.jobfile.task_sets import TaskSetSection


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


TEXTS = ["0.7", " 1 ", b"1", bytearray(b"1"), {"reward": "0.7"}]
"""What Python's float takes, and what is no number."""


@pytest.mark.parametrize(
    "returned", [float("nan"), float("inf"), None, "much", {"score": 1}, [1], 10**400, *TEXTS]
)
def test_an_invalid_return_value_is_a_problem_without_a_reward(returned):
    score = score_of(returned)
    assert score.reward is None
    assert score.problem


def test_reward_info_is_converted_to_plain_data():
    assert score_of({"reward": 1, "why": ("a", 1)}).info == {"why": ["a", 1]}
    assert score_of({"reward": 1, "set": {1}}).info == {"set": "{1}"}


class Scalar(Fraction):
    """A number of another library's."""


def test_what_is_no_json_in_an_info_costs_itself_alone():
    """By hand: one value that is not finite, at any depth, leaves the parts beside it what they are."""
    assert score_of({"reward": 1, "a": 0.5, "b": math.nan}).info == {"a": 0.5, "b": "nan"}
    parts = {"parts": {"x": 1, "y": [0.25, math.inf, None, True], 3: Scalar(1, 2)}, "why": "so", "set": {1}}
    assert score_of({"reward": 1, **parts}).info == {
        "parts": {"x": 1, "y": [0.25, "inf", None, True], "3": 0.5},
        "why": "so",
        "set": "{1}",
    }
    assert score_of({"reward": 1, "huge": Fraction(10**400)}).info["huge"].startswith("Fraction(1000")
    loop = [0.5]
    loop.append(loop)
    deep = leaf = {}
    for _ in range(5000):
        leaf["in"] = leaf = {}
    found = score_of({"reward": 1, "loop": loop, "deep": deep, "a": 0.5}).info
    assert (found["loop"], found["a"]) == ([0.5, "[0.5, [...]]"], 0.5)
    json.dumps(found, allow_nan=False)


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
    if response == "text":
        return "much"
    return {"reward": float(response), "task": task["id"], "prompt": prompt}

def short(tokens, truncated):
    return 0.0 if truncated else 1.0 / tokens

def best(responses, tokens, task):
    if "list" in responses:
        return [1.0]
    if "text" in responses:
        return "much"
    longest = max(map(len, responses))
    return [{"reward": float(len(one) == longest), "of": len(responses)} for one in responses]

def flaky(response):
    with open(response, "a") as file:
        file.write("x")
    if os.path.getsize(response) < 3:
        raise ConnectionError("the judge is busy")
    return 1.0

def positional(given, answer, task):
    return 1.0
"""


@pytest.fixture
def scorer(tmp_path):
    """Return a function that opens a scorer with functions of its own; all are closed in the end."""
    (tmp_path / "own_reward.py").write_text(FUNCTIONS)
    opened = []

    def one(**keys):
        opened.append(open_scorer(RewardSection(**keys), [str(tmp_path)]))
        return opened[-1]

    yield one
    for each in opened:
        each.close()


def group(*texts, **task):
    """Return a group of responses of so many tokens as characters; those that end in `...` are cut off."""
    responses = tuple(ScoredText(text, len(text), text.endswith("...")) for text in texts)
    return ScoredGroup("p", {"id": "t", "answer": "4", **task}, responses)


@pytest.mark.slow
def test_a_function_that_hangs_dies_raises_or_returns_no_number_loses_one_score(scorer):
    function = scorer(function="own_reward:score", timeout=6.0, workers=2)
    texts = ["1", "hang", "2", "die", "3", "raise", "4", "nan", "5", "text"]
    first, last = function.score([group(*texts[:4]), group(*texts[4:])])
    found = [*first, *last]
    assert [len(first), [score.reward for score in found]] == [
        4,
        [1.0, None, 2.0, None, 3.0, None, 4.0, None, 5.0, None],
    ]
    assert found[0].info == {"task": "t", "prompt": "p"}
    assert [score.problem for score in found if score.reward is None] == [
        "it took more than 6 s",
        "its process ended with 3",
        "ValueError: of no worth",
        "it returned nan",
        "it returned str instead of a number",
    ]


def test_several_functions_are_weighted_and_each_is_in_the_info(scorer):
    """1.0 x (the answer is right) + 0.5 / tokens, or nothing if it was cut off, + 2 x (none is longer)."""
    function = scorer(functions={"exact_match": 1.0, "own_reward:short": 0.5, "own_reward:best": 2})
    assert function.needs_groups
    ((right, wrong, cut),) = function.score([group("4", "12345", "5...")])
    assert (right.reward, wrong.reward, cut.reward) == (1.0 + 0.5, 0.1 + 2.0, 0.0)
    assert right.info == {"exact_match": 1.0, "short": 1.0, "best": 0.0, "best.of": 3}
    assert wrong.info == {"exact_match": 0.0, "short": 0.2, "best": 1.0, "best.of": 3}
    # A part that fails: no reward, and its name. The next group has its own.
    spoilt, good = function.score([group("4", "list"), group("4")])
    assert [score.problem for score in spoilt] == ["best: it returned 1 rewards for 2 responses"] * 2
    assert good[0].reward == 3.5
    ((text, _),) = function.score([group("text", "1")])
    assert text.problem == "best: it returned str instead of a list for the group"


def test_a_call_that_fails_is_tried_again_so_many_times(scorer, tmp_path):
    paths = [str(tmp_path / name) for name in ("one", "two")]
    ((score,),) = scorer(function="own_reward:flaky", retries=2, pause=0.01).score([group(paths[0])])
    assert (score.reward, os.path.getsize(paths[0])) == (1.0, 3)
    ((score,),) = scorer(function="own_reward:flaky", retries=1, pause=0.01).score([group(paths[1])])
    assert (score.problem, os.path.getsize(paths[1])) == ("ConnectionError: the judge is busy", 2)


def test_a_pause_before_a_retry_ends_when_the_scorer_is_closed(scorer, tmp_path):
    function = scorer(function="own_reward:flaky", retries=9, pause=50.0)
    path = tmp_path / "one"
    found = []
    thread = threading.Thread(target=lambda: found.extend(function.score([group(str(path))])))
    thread.start()
    eventually(path.exists)
    function.close()
    thread.join(20)
    assert not thread.is_alive()
    assert found[0][0].reward is None


@pytest.mark.parametrize("name", ["missing", "positional"])
def test_a_reward_function_that_cannot_be_used_is_an_error_at_once(scorer, name):
    with pytest.raises(ConfigError, match=f"own_reward:{name} cannot be used"):
        scorer(function=f"own_reward:{name}")
    with pytest.raises(ConfigError, match="no_such_module:score"):
        scorer(functions={"own_reward:short": 1.0, "no_such_module:score": 1.0})


def test_auto_compares_with_the_answer_unless_the_task_was_generated(scorer):
    function = scorer()
    assert not function.needs_groups
    assert [[one.reward for one in scores] for scores in function.score([group("4", "5"), group("5")])] == [
        [1.0, 0.0],
        [0.0],
    ]


def test_auto_opens_what_scores_generated_tasks_once_for_all_threads(scorer, monkeypatch):
    opened = []

    def slow(*_):
        opened.append(BuiltInScorer("exact_match"))
        time.sleep(0.2)
        return opened[-1]

    monkeypatch.setattr(scoring, "_open_one", slow)
    function = scoring.AutoScorer(RewardSection(), ())
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(function.score, [[group("4", reasoning_gym={})]] * 4))
    assert [scores[0][0].reward for scores in found] == [1.0] * 4
    assert len(opened) == 1


@pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="pip install 'syncd[tasks]'")
def test_tasks_of_reasoning_gym_are_scored_as_it_does(scorer):
    """A wrong answer may be worth something there."""
    options = {"min_word_len": 5, "max_word_len": 5}
    section = TaskSetSection(source="reasoning_gym:spell_backward", size=4, seed=2, options=options)
    task = open_tasks([section])[3]
    import reasoning_gym  # once the product has imported it, without what its parser warns of

    texts = (task.answer, f"I say <answer> {task.answer} </answer>", "nothing", task.answer[:-1] + "!")
    given = ScoredGroup(task.text, plain_task(task), tuple(map(ScoredText, texts)))
    mixed = scorer().score([group("4"), given, group("5")])
    data = reasoning_gym.create_dataset("spell_backward", seed=2, size=4, **options)
    expected = [data.score_answer(text, data[3]) for text in (task.answer, task.answer, texts[2], texts[3])]
    assert [[one.reward for one in scores] for scores in mixed] == [[1.0], expected, [0.0]]
    assert expected[0] == 1.0
    assert len(set(expected)) > 1


@pytest.mark.skipif(find_spec("math_verify") is None, reason="pip install 'syncd[tasks]'")
def test_math_verify_knows_equal_expressions_and_runs_in_a_process_of_its_own(scorer):
    function = scorer(function="math_verify")
    equal = [
        r"so \\boxed{\\frac{1}{2}}",
        "it is 0.5",
        r"$\\sqrt{\\frac{1}{4}}$",
        "it is 0.4",
        "",
        "\\boxed{" * 50,
    ]
    solution = "half of it\n#### 1/2"
    both = function.score([group(*equal, answer="1/2"), group("0.5", answer=solution)])
    assert [[one.reward for one in scores] for scores in both] == [[1.0, 1.0, 1.0, 0.0, 0.0, 0.0], [1.0]]


def test_a_reward_of_a_library_that_is_not_installed_names_the_extra(scorer, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the library of the reward math_verify is not installed") as caught:
        scorer(function="math_verify")
    assert caught.value.hint == install_command("tasks")
