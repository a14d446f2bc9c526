"""Whether an engine's answer to a probe proves a version: figures by hand."""

import math

import pytest
from support.jobs import ManualClock

from explorer_hooks.follower.proof import START, Prover, UnprovenError, compare, has_grown, problem, tolerance
from explorer_hooks.hook import ProbeAnswer
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
