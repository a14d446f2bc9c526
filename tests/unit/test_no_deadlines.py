"""No test has a wall-clock deadline that a loaded machine breaks: what can be seen of that in the tests' own text."""

import ast
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parents[1]
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time", "times"}
WAITS = {"communicate", "run", "check_call", "check_output"}
LEAST = 30
"""Seconds: a literal time-out below this is none that only a failing test reaches."""


def test_hypothesis_has_no_deadline():
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check


def test_no_test_contains_a_wall_clock_deadline():
    wrong = [
        f"{path.relative_to(TESTS)}:{line} {reason}"
        for path in sorted(TESTS.rglob("*.py"))
        for line, reason in found(path.read_text(encoding="utf-8"))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "text",
    [
        "assert time.monotonic() - started < 2",
        "assert 0.3 < time.perf_counter() - started < 3",
        "assert sum(os.times()[2:4]) - before < 1",
        "process.communicate(timeout=10)",
        "subprocess.run(command, timeout=5.0)",
        "@settings(deadline=500)\ndef test(): pass",
        "@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])\ndef test(): pass",
    ],
)
def test_each_kind_of_deadline_is_found(text):
    assert found(text)


@pytest.mark.parametrize(
    "text",
    [
        "assert time.monotonic() < ends",
        "assert time.monotonic() - started > 0.3",
        "assert abs(time.time() - when) < 300",
        "assert abs(time.time() - when) < LONG",
        "process.communicate(timeout=LONG)",
        "subprocess.run(command, timeout=60)",
        "@settings(max_examples=5)\ndef test(): pass",
        "@settings(suppress_health_check=[HealthCheck.too_slow])\ndef test(): pass",
    ],
)
def test_code_that_no_load_breaks_is_not_reported(text):
    assert found(text) == []


def found(text):
    """Return the lines of a text that no loaded machine keeps, each with the reason."""
    tree = ast.parse(text)
    wrong = [(node.lineno, reason) for node in ast.walk(tree) if (reason := reason_against(node))]
    return sorted(wrong)


def reason_against(node):
    if isinstance(node, ast.Assert) and any(is_upper_bound(inner) for inner in ast.walk(node.test)):
        return "asserts that little time has passed"
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if name in WAITS and is_short(given.get("timeout")):
            return f"waits for less than {LEAST} seconds"
        if name == "settings" and "deadline" in given and ast.unparse(given["deadline"]) != "None":
            return "has a deadline of its own"
        if name == "settings" and "too_slow" not in ast.unparse(given.get("suppress_health_check", ANY)):
            return "fails where examples are slow"
    return None


ANY = ast.parse("too_slow", mode="eval").body


def is_short(value):
    return isinstance(value, ast.Constant) and isinstance(value.value, int | float) and value.value < LEAST


def is_upper_bound(node):
    """Say whether a comparison holds only while the difference of two readings of a clock is small."""
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    return any(
        (isinstance(operator, ast.Lt | ast.LtE) and is_passed(left) and is_few(right))
        or (isinstance(operator, ast.Gt | ast.GtE) and is_passed(right) and is_few(left))
        for operator, left, right in zip(node.ops, sides, sides[1:], strict=False)
    )


def is_few(value):
    return isinstance(value, ast.Constant) and value.value < 2 * LEAST


def is_passed(node):
    return any(
        isinstance(inner, ast.BinOp)
        and isinstance(inner.op, ast.Sub)
        and any(
            isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in CLOCKS
            for call in ast.walk(inner)
        )
        for inner in ast.walk(node)
    )
