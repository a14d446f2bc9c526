"""The contract of hooks that answer probes: the answer is that of transformers, and faults that a label hides show.

A bed needs besides what every bed has: `model(target)`, the model of a version, None: of the start weights, by
transformers and not by what the engine holds; `inject(fault)`, one of `fake_engines.FAULTS` for the loads to come;
`load_stale(hook, target)`, a load that leaves the prefix cache as it was; `dtype`, what the engine says of it;
`stays`, what its checksums say where nothing was loaded. Keys of `cannot`: `cache`, `checksums`, `exam`
and the faults.
"""

import contextlib
import statistics
import time
from dataclasses import replace

import pytest

from explorer_hooks.hook import EXAM_DIGEST, EXAM_LABEL, Running
from explorer_hooks.proof.parameter_check import Moved, moved
from support import small_qwen
from support.hook_contract import IMPATIENCE, bounded, load, needs
from syncd.errors import EngineUnreachableError, LoadFailedError
from syncd.protocol.version import Version

CLOSE = 1e-4
"""Nats by which a log-prob in float32 may differ from transformers'."""

FAR = 0.1
"""Nats by which other weights, or a cache of other weights, differ at least."""

ROWS = [[(7 + 31 * row + 17 * at * at) % 500 + 3 for at in range(16)] for row in range(4)]
UNKNOWN = [[5, small_qwen.VOCABULARY + 88]]


def difference(answer, model, rows=ROWS):
    """Return the mean and the largest difference from transformers, in nats."""
    assert list(map(len, answer.logprobs)) == [len(row) - 1 for row in rows]
    off = [
        abs(found - wanted)
        for values, row in zip(answer.logprobs, rows, strict=True)
        for found, wanted in zip(values, small_qwen.expected(model, row, len(row) - 1), strict=True)
    ]
    return sum(off) / len(off), max(off)


def stale(answer):
    """Return how far the token after the long prompt is off with the cache."""
    return abs(answer.fresh - answer.cached)


def examined(target):
    """Return the target with the label of an exam."""
    return replace(target, version=Version(0, 0, target.version.kind, target.path, EXAM_DIGEST))


def load_and_probe(bed, hook, target, rows=ROWS):
    """Load a version as a follower does; return its answer to a probe."""
    hook.prepare(target)
    hook.load(target)
    if hook.probes == "held":
        assert bed.is_paused()
        answer = hook.probe(target, rows)
        hook.commit(target)
        return answer
    hook.commit(target)
    return hook.probe(target, rows)


class AnswersProbes:
    """Cases for a class of `BedCases`."""

    def test_the_answer_of_the_start_weights_is_that_of_transformers(self, bed, hook):
        answer = hook.probe(None, ROWS)
        assert difference(answer, bed.model(None))[1] < CLOSE
        assert difference(answer, bed.model(bed.target((1, 10))))[0] > FAR

    def test_the_answer_of_each_loaded_version_is_that_of_transformers(self, bed, hook):
        before = None
        for step in (10, 12, 15):
            target = bed.target((1, step))
            answer = load_and_probe(bed, hook, target)
            assert difference(answer, bed.model(target))[1] < CLOSE
            assert difference(answer, bed.model(before))[0] > FAR
            before = target

    def test_sequences_of_any_length_are_answered(self, bed, hook):
        rows = [[5, 6], list(range(10, 110)), [9, 9, 9], [6, 5]]
        answer = load_and_probe(bed, hook, bed.target((1, 10)), rows)
        assert difference(answer, bed.model(bed.target((1, 10))), rows)[1] < CLOSE
        assert (
            difference(hook.probe(bed.target((1, 10)), rows[:1]), bed.model(bed.target((1, 10))), rows[:1])[1]
            < CLOSE
        )

    def test_a_probe_changes_nothing(self, bed, hook):
        target = bed.target((1, 10))
        load(hook, target)
        answers = {hook.probe(target, ROWS).logprobs for _ in range(3)}
        assert hook.current_version() == Running(target.label)
        assert bed.runs(target)
        assert not bed.is_paused()
        for answer in answers:
            assert (
                max(abs(a - b) for a, b in zip(sum(answer, ()), sum(min(answers), ()), strict=True)) < CLOSE
            )

    def test_the_dtype_is_known(self, bed, hook):
        assert hook.dtype() == getattr(bed, "dtype", None)

    def test_a_token_that_the_model_does_not_know_is_a_failed_load_and_harms_nobody(self, bed, hook):
        target = bed.target((1, 10))
        load(hook, target)
        with pytest.raises(LoadFailedError) as error:
            hook.probe(target, UNKNOWN)
        assert error.value.hint
        assert difference(hook.probe(target, ROWS), bed.model(target))[1] < CLOSE

    @needs("cache")
    def test_the_cache_holds_keys_and_values_of_the_loaded_version(self, bed, hook):
        for step in (10, 11, 12):
            answer = load_and_probe(bed, hook, bed.target((1, step)))
            assert stale(answer) < CLOSE
            assert stale(hook.probe(bed.target((1, step)), ROWS)) < CLOSE

    @needs("cache")
    def test_a_stale_prefix_cache_shows_although_the_probe_is_right(self, bed, hook):
        load_and_probe(bed, hook, bed.target((1, 10)))
        target = bed.target((1, 11))
        bed.load_stale(hook, target)
        answer = hook.probe(target, ROWS)
        assert difference(answer, bed.model(target))[1] < CLOSE
        assert stale(answer) > FAR
        following = bed.target((1, 12))
        assert stale(load_and_probe(bed, hook, following)) < CLOSE

    @needs("stale head")
    def test_a_head_that_stays_as_it_was_shows(self, bed, hook):
        self._assert_shows(bed, hook, "stale head")

    @needs("label without load")
    def test_a_label_without_a_load_shows(self, bed, hook):
        self._assert_shows(bed, hook, "label without load")

    def _assert_shows(self, bed, hook, fault):
        load_and_probe(bed, hook, bed.target((1, 10)))
        bed.inject(fault)
        target = bed.target((1, 11))
        answer = load_and_probe(bed, hook, target)
        assert hook.current_version() == Running(target.label)
        assert difference(answer, bed.model(target))[0] > FAR

    @needs("exam")
    def test_an_exam_is_taken_back(self, bed, hook):
        """The weights of an exam have a label of their own, and nothing of them stays."""
        target = examined(bed.target((1, 10)))
        hook.prepare(target)
        hook.mark(EXAM_LABEL)
        hook.load(target)
        if hook.probes == "serving" and target.version.kind == "weights":
            hook.commit(target)
        assert difference(hook.probe(target, ROWS), bed.model(bed.target((1, 10))))[1] < CLOSE
        assert hook.current_version().label == EXAM_LABEL or hook.current_version().paused
        hook.end_exam()
        assert hook.current_version() == Running(None)
        assert not bed.is_paused()
        assert difference(hook.probe(None, ROWS), bed.model(None))[1] < CLOSE
        following = bed.target((1, 11))
        answer = load_and_probe(bed, hook, following)
        assert difference(answer, bed.model(following))[1] < CLOSE

    @needs("cache")
    def test_the_cache_is_left_out_of_an_answer_on_request(self, bed, hook):
        target = bed.target((1, 10))
        load(hook, target)
        hook.asks_cache = False
        answer = hook.probe(target, ROWS)
        assert (answer.fresh, answer.cached) == (None, None)
        assert difference(answer, bed.model(target))[1] < CLOSE

    @needs("checksums")
    def test_checksums_change_with_a_load_and_with_nothing_else(self, bed, hook):
        before = hook.checksums()
        assert before == hook.checksums()
        load(hook, bed.target((1, 10)))
        first = hook.checksums()
        assert moved(before, first) is Moved.CHANGED
        assert not bed.is_paused()
        load(hook, bed.target((1, 11)))
        assert moved(first, hook.checksums()) is Moved.CHANGED
        load(hook, bed.target((1, 10)))
        assert hook.checksums() == first

    @needs("checksums", "label without load")
    def test_checksums_stay_if_nothing_was_loaded(self, bed, hook):
        load(hook, bed.target((1, 10)))
        before = hook.checksums()
        bed.inject("label without load")
        load(hook, bed.target((1, 11)))
        assert moved(before, hook.checksums()) is bed.stays

    @needs("gone")
    def test_an_engine_that_is_gone_is_unreachable(self, bed, hook):
        target = bed.target((1, 10))
        load(hook, target)
        bed.patience = IMPATIENCE
        with contextlib.closing(bed.open()) as impatient, bed.gone():
            assert isinstance(bounded(lambda: impatient.probe(target, ROWS)), EngineUnreachableError)


class RealAnswersProbes(AnswersProbes):
    """What a real engine must show besides."""

    def test_a_probe_is_exact_and_short(self, bed, hook, record_line):
        target = bed.target((1, 10))
        mean, worst = difference(load_and_probe(bed, hook, target), bed.model(target))
        seconds = []
        for _ in range(20):
            begin = time.monotonic()
            hook.probe(target, ROWS)
            seconds.append(time.monotonic() - begin)
        took = f"{1e3 * statistics.median(seconds):.1f} ms, longest {1e3 * max(seconds):.1f} ms"
        record_line(f"probe by {hook.name}: mean {mean:.1e}, worst {worst:.1e} nats; median {took}")
        assert worst < CLOSE
