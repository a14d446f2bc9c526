"""Whether an engine's answer to a probe proves a version: figures by hand."""

import math
from dataclasses import replace

import pytest
from support.jobs import ManualClock

from explorer_hooks.hook import ProbeAnswer
from explorer_hooks.proof.changes import START
from explorer_hooks.proof.judgement import (
    UnprovenError,
    compare,
    has_grown,
    problem,
    sees_changes,
    tolerance,
    worst_of,
)
from explorer_hooks.proof.prover import Prover
from syncd.errors import LoadFailedError
from syncd.protocol.engine_state import Proof
from syncd.protocol.probe import Probe

TOKENS = ((5, 6, 7), (8, 9))
OURS = ((-1.0, -2.0), (-3.0,))


def probe_of(compute="float32", export="float32"):
    return Probe(TOKENS, OURS, compute, export)


class Answering:
    """A hook that answers probes with what it is told."""

    probes = "serving"

    def __init__(self, *answers, dtype="float32"):
        self.answers, self.asked, self._dtype = list(answers), [], dtype

    def probe(self, target, tokens):
        self.asked.append((target, tokens))
        return self.answers.pop(0)

    def dtype(self):
        return self._dtype

    def rounding(self):
        return ""


class Target:
    label = "1.7.0123456789abcdef"

    def __init__(self, probe):
        self.probe = probe


def off_by(*values):
    """Return an answer whose log-probs differ from the probe's by these, in order."""
    return ProbeAnswer(((-1.0 + values[0], -2.0 + values[1]), (-3.0 + values[2],)))


def prover(*answers, baseline=None, dtype="float32"):
    hook = Answering(*answers, dtype=dtype)
    return Prover(hook, ManualClock(), lambda: baseline), hook


@pytest.mark.parametrize(
    ("compute", "export", "engine", "calibrated", "expected"),
    [
        ("float32", "float32", "float32", None, 1e-3),
        ("float32", "keep", "float32", None, 1e-3),
        ("float32", "bfloat16", "float32", None, 0.1),
        ("bfloat16", "keep", "float32", None, 0.1),
        ("float32", "float32", "bfloat16", None, 0.1),
        ("float32", "float32", None, None, 0.1),  # an engine that does not say computes in bfloat16
        ("float32", "float32", "float32", 1e-6, 1e-4),  # the floor
        ("float32", "float32", "float32", 5e-5, 4e-4),  # 8 times what was measured
        ("float32", "float32", "float32", 5e-4, 1e-3),  # never above the table
        ("bfloat16", "bfloat16", "bfloat16", 1e-4, 5e-3),
        ("bfloat16", "bfloat16", "bfloat16", 4e-3, 0.032),
        ("bfloat16", "bfloat16", "bfloat16", 0.09, 0.1),
    ],
)
def test_tolerance_follows_the_dtypes_and_the_calibration(compute, export, engine, calibrated, expected):
    assert tolerance(probe_of(compute, export), engine, calibrated) == pytest.approx(expected)


def test_the_difference_is_the_mean_and_the_largest_over_all_tokens():
    proof = compare("v", probe_of(), off_by(0.25, -0.5, 0.75), 0.5, None, 0.0123456789)
    assert proof == Proof("v", 0.5, 0.75, 0.5, None, 3, 0.012346)
    assert proof.is_proven  # the mean is at the tolerance, though one token is above it
    assert not compare("v", probe_of(), off_by(0.25, -0.5, 0.76), 0.5, None, 0).is_proven


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_answer_that_is_not_a_number_never_proves(bad):
    proof = compare("v", probe_of(), off_by(0.0, bad, 0.0), 1e9, None, 0)
    assert not proof.is_proven
    assert (proof.mean, proof.worst) == (2.0**53, 2.0**53)


@pytest.mark.parametrize("rows", [((-1.0, -2.0),), ((-1.0,), (-2.0, -3.0)), ((-1.0, -2.0), ())])
def test_an_answer_of_other_tokens_is_an_error(rows):
    with pytest.raises(LoadFailedError, match="another number of log-probs"):
        compare("v", probe_of(), ProbeAnswer(rows), 1.0, None, 0)


def test_a_stale_prefix_cache_is_a_problem_although_the_log_probs_are_right():
    right = compare("v", probe_of(), off_by(0, 0, 0), 0.01, None, 0)
    assert problem(right, ProbeAnswer(OURS, fresh=-1.0, cached=-1.09)) == ""
    assert "prefix cache" in problem(right, ProbeAnswer(OURS, fresh=-1.0, cached=-1.11))
    assert problem(right, ProbeAnswer(OURS)) == ""


def test_a_version_is_proven_by_the_answer_under_its_own_name():
    asking, hook = prover(off_by(0, 0, 0))
    target = Target(probe_of())
    proof = asking.prove(target)
    assert proof is asking.last
    assert (proof.version, proof.mean, proof.tokens) == (Target.label, 0.0, 3)
    assert hook.asked == [(target, TOKENS)]


def test_other_weights_are_an_error_that_says_how_far_off_they_are():
    asking, _ = prover(off_by(0.5, 0.5, 1.31))
    with pytest.raises(UnprovenError, match=r"0\.77 nats .* 3 tokens, where 0\.001 are tolerated"):
        asking.prove(Target(probe_of()))
    assert not asking.last.is_proven


def test_nothing_is_asked_without_a_probe_or_of_an_engine_that_does_not_answer_probes():
    asking, hook = prover()
    assert asking.prove(Target(None)) is None
    assert not asking.can_prove(Target(None))
    hook.probes = ""
    assert asking.prove(Target(probe_of())) is None
    assert asking.calibrate() is None
    assert hook.asked == []


def test_calibration_measures_the_start_model_and_tightens_the_tolerance():
    asking, hook = prover(off_by(3e-5, 3e-5, 3e-5), off_by(3e-4, 3e-4, 3e-4), baseline=probe_of())
    start = asking.calibrate()
    assert (start.version, start.tolerance) == (START, 1e-3)
    assert hook.asked[0] == (None, TOKENS)
    assert asking.calibrated == pytest.approx(3e-5)
    with pytest.raises(UnprovenError):  # 3e-4 is within the table, and more than 8 times what was measured
        asking.prove(Target(probe_of()))


def test_an_engine_with_another_start_model_is_not_calibrated():
    asking, _ = prover(off_by(0.5, 0.5, 0.5), off_by(9e-4, 9e-4, 9e-4), baseline=probe_of())
    assert not asking.calibrate().is_proven
    assert asking.calibrated is None
    assert asking.prove(Target(probe_of())).tolerance == 1e-3


def test_a_difference_that_has_grown_is_noticed_only_against_a_calibration():
    grown = Proof("v", 0.6, 1.0, 1.0, 0.125, 3, 0.0)
    assert has_grown(grown)
    assert not has_grown(Proof("v", 0.5, 1.0, 1.0, 0.125, 3, 0.0))
    assert not has_grown(Proof("v", 0.6, 1.0, 1.0, None, 3, 0.0))


def shifted(by):
    """Return a probe whose log-probs are all that much higher than those of `probe_of()`."""
    return Probe(TOKENS, tuple(tuple(one + by for one in row) for row in OURS), "float32", "float32")


@pytest.mark.parametrize(
    ("compute", "export", "engine", "stored", "expected"),
    [
        ("float32", "keep", "float32", set(), True),
        ("bfloat16", "bfloat16", "bfloat16", set(), True),
        (
            "float32",
            "bfloat16",
            "bfloat16",
            set(),
            False,
        ),  # published weights stay the same under small updates
        ("float32", "float32", "bfloat16", set(), False),
        ("float32", "float32", None, set(), False),
        (
            "float32",
            "keep",
            "bfloat16",
            {"bfloat16"},
            True,
        ),  # the trainer's own tensors, as the engine holds them
        ("float32", "keep", "bfloat16", {"float32"}, False),
        ("float32", "keep", "bfloat16", {"bfloat16", "float32"}, False),
        ("bfloat16", "keep", "float32", {None}, False),
    ],
)
def test_changes_are_compared_only_where_nothing_is_rounded(compute, export, engine, stored, expected):
    assert sees_changes(probe_of(compute, export), engine, stored) is expected


def stuck_at_the_first(drift):
    """Return the step at which an engine that never leaves version 1 is found, and the reason."""
    asking, hook = prover(baseline=None)
    for step in range(1, 200):
        target = Target(shifted(drift * step))
        target.label = f"1.{step}"
        hook.answers.append(ProbeAnswer(shifted(drift).logprobs))
        try:
            asking.prove(target)
        except UnprovenError as error:
            return step, error.message
    return None, ""


@pytest.mark.parametrize(("drift", "found"), [(1e-4, 2), (4e-6, 4), (1.1e-6, 11), (1e-9, None)])
def test_an_engine_that_stays_where_it_was_is_found_once_versions_have_drifted_away(drift, found):
    step, reason = stuck_at_the_first(drift)
    assert step == found
    assert not found or "exactly as it did on version 1." in reason


def test_an_engine_that_stays_on_a_late_version_is_found_as_soon():
    asking, hook = prover(baseline=None)
    for step in range(1, 200):
        # 150 versions that differ much, all of them loaded; then small updates, and the engine stays on version 150.
        at = 0.01 * min(step, 150) + 4e-6 * max(step - 150, 0)
        target = Target(shifted(at))
        target.label = f"1.{step}"
        hook.answers.append(ProbeAnswer(shifted(min(at, 1.5)).logprobs))
        if step < 153:
            asking.prove(target)
            continue
        with pytest.raises(UnprovenError, match=r"exactly as it did on version 1\.150"):
            asking.prove(target)
        return


def test_an_engine_that_stays_on_its_start_model_is_found():
    asking, _ = prover(off_by(0, 0, 0), off_by(0, 0, 0), baseline=probe_of())
    asking.calibrate()
    with pytest.raises(UnprovenError, match="exactly as it did on its start model"):
        asking.prove(Target(shifted(5e-5)))


def test_the_worst_replica_counts_and_the_first_wrong_one_is_named():
    near, far = Proof("v", 0.1, 0.2, 0.5, None, 3, 0.0), Proof("v", 0.6, 0.9, 0.5, None, 3, 0.0)
    assert worst_of([(near, "")]) == (near, "")
    assert worst_of([(far, "why")]) == (far, "why")
    assert worst_of([(near, ""), (near, "")]) == (replace(near, replicas=2), "")
    assert worst_of([(near, ""), (far, "why")]) == (replace(far, replicas=2), "replica 1 of 2: why")


def test_one_replica_that_stays_where_it_was_is_found():
    first, second = shifted(1e-4), shifted(2e-4)
    stayed_behind = ProbeAnswer(second.logprobs, others=(ProbeAnswer(first.logprobs),))
    asking, _ = prover(ProbeAnswer(first.logprobs, others=(ProbeAnswer(first.logprobs),)), stayed_behind)
    asking.prove(Target(first))
    target = Target(second)
    target.label = "1.8.0123456789abcdef"
    with pytest.raises(
        UnprovenError, match=r"replica 1 of 2: the engine answers exactly as .* version 1\.7\."
    ):
        asking.prove(target)
