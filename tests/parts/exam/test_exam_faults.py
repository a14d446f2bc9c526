"""A fault at each call of an exam, and a kill: nobody is given an engine that runs the weights of an exam."""

import contextlib

import pytest
from support.fake_hook import START, FakeHook, digest_of, logprobs_of
from support.followers import Scene
from support.jobs import shard_bytes

from explorer_hooks.hook import EXAM_DIGEST, EXAM_LABEL
from explorer_hooks.parts.exam import examination
from explorer_hooks.parts.exam.exam import Exam
from syncd.errors import EngineDeadError, EngineUnreachableError, LoadFailedError, RefusedError
from syncd.protocol.engine_state import EngineState, engine_report_of
from syncd.protocol.probe import Probe, write_base_probe
from syncd.protocol.version import Version
from syncd.transports.base import WeightDirectory

ROWS = ((1, 2, 3),)
CALLS = ("prepare", "mark", "load", "probe", "commit", "reload_start")
ERRORS = (LoadFailedError, EngineUnreachableError, RefusedError)


class Killed(BaseException):
    """The follower's process ends."""


class ExamHook(FakeHook):
    """A server that can be examined."""

    is_own = True

    def __init__(self, engine, probes):
        super().__init__(engine, probes=probes)
        self.reloads_start = True
        engine.mark = lambda label: setattr(engine, "label", label)

    def start_directory(self):
        return "/start"

    def mark(self, label):
        self.engine.call("mark", label)

    def reload_start(self):
        self.engine.call("reload_start")
        self.engine.label = None
        return True


class Files:
    """Has an exam of an engine whose answers follow from what it has loaded."""

    def __init__(self, job):
        self.path = f"{job.root}-copy"

    def keep_passed(self, engine, unseen):
        pass

    def recall_passed(self, engine):
        return None

    @contextlib.contextmanager
    def opened(self, subject, dtype, baseline):
        start, copied = (
            tuple(value for row in logprobs_of(weights, ROWS) for value in row)
            for weights in (START, digest_of(self.path))
        )
        exam = Exam(Probe(ROWS, (start,), "float32", "keep"), copied, {"all of it": start}, 1, 0.0)
        yield exam, WeightDirectory(Version(0, 0, "weights", self.path, EXAM_DIGEST), self.path)


@pytest.fixture
def scene(tmp_path, monkeypatch):
    made = Scene(tmp_path / "job")
    monkeypatch.setattr(examination, "ExamFiles", Files)
    (tmp_path / "job-copy").mkdir()
    (tmp_path / "job-copy" / "a.safetensors").write_bytes(shard_bytes({"a": (2, 2)}, 5))
    rows = tuple(map(tuple, logprobs_of(START, ROWS)))
    write_base_probe(made.job, Probe(ROWS, rows, "float32", "float32"), "start")
    yield made
    made.close()


def report(scene):
    return engine_report_of(scene.presence().info)


def arm(scene, call, at, error):
    """Have a call fail, once; note at each what others are told of the engine."""
    engine, seen, dead = scene.engine, [], []

    def meet(name):
        with contextlib.suppress(OSError, KeyError, AttributeError):
            seen.append((engine.label, engine.weights, report(scene).ready))
        is_met = name == call and engine.reached[name] == at
        dead.extend([True] * (is_met and error is Killed))
        if is_met or dead:
            raise error("it went wrong")

    for name in CALLS:
        engine.doing[name] = lambda name=name: meet(name)
    return seen


def is_safe(label, weights, ready):
    return not ready or (weights == START and label is None)


@pytest.mark.parametrize("probes", ["held", "serving"])
@pytest.mark.parametrize(("call", "at"), [*((call, 1) for call in CALLS), ("probe", 2), ("probe", 3)])
@pytest.mark.parametrize("error", ERRORS)
def test_a_fault_in_an_exam_leaves_an_engine_that_works_on_its_start_weights_or_not_at_all(
    scene, probes, call, error, at
):
    seen = arm(scene, call, at, error)
    follower = scene.follow("e0", ExamHook(scene.engine, probes), retries=0)
    for _ in range(4):
        with contextlib.suppress(EngineDeadError):
            follower.turn(timeout=0.02)
    assert all(is_safe(*one) for one in seen)
    found = report(scene)
    assert is_safe(scene.engine.label, scene.engine.weights, found.ready)
    assert is_safe(scene.engine.label, scene.engine.weights, follower.may_work())
    if found.exam == "passed":
        assert found.state in (EngineState.WAITING, EngineState.WRONG, EngineState.DEAD)


@pytest.mark.parametrize(
    ("probes", "call", "at"),
    [
        *(("held", call, at) for call, at in (("load", 1), ("probe", 2), ("reload_start", 1))),
        *(
            ("serving", call, at)
            for call, at in (("load", 1), ("commit", 1), ("probe", 2), ("reload_start", 1))
        ),
    ],
)
@pytest.mark.fault("a follower is killed while its engine is examined")
def test_whoever_follows_a_follower_that_was_killed_in_an_exam_restores_the_start_weights(
    scene, probes, call, at
):
    arm(scene, call, at, Killed)
    with pytest.raises(Killed):
        scene.follow("e0", ExamHook(scene.engine, probes), retries=0)
    assert scene.engine.label == EXAM_LABEL
    scene.engine.doing.clear()
    follower = scene.follow("e1", ExamHook(scene.engine, probes), retries=0)
    assert (scene.engine.weights, scene.engine.label) == (START, None)
    assert "exam_ended" in scene.names()
    assert follower.may_work()
    assert engine_report_of(scene.presence("e1").info).exam == "passed"


def test_an_engine_that_loads_nothing_fails(scene):
    scene.engine.answers_as = START
    scene.follow("e0", ExamHook(scene.engine, "held"), retries=0)
    found = report(scene)
    assert (found.exam, found.state, found.ready) == ("failed", EngineState.WRONG, False)
    assert "all of it stayed as it was" in found.reason or "loaded nothing" in found.reason
