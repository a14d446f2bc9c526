"""The exam of servers: vLLM and SGLang as fakes that answer as transformers does, over HTTP."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from support import small_qwen  # noqa: E402
from support.engine_beds import SmallSglangBed, SmallVllmBed  # noqa: E402
from support.followers import Scene  # noqa: E402
from support.proven import probe_of, write_version  # noqa: E402

from explorer_hooks.hook import EXAM_LABEL  # noqa: E402
from explorer_hooks.parts.exam.files import ExamFiles, Subject  # noqa: E402
from syncd.errors import EngineUnreachableError  # noqa: E402
from syncd.protocol.engine_state import EngineState, engine_report_of  # noqa: E402


@pytest.fixture(params=[SmallVllmBed, SmallSglangBed])
def bed(request, tmp_path):
    made = request.param(tmp_path)
    made.engine.started_from = small_qwen.write_model(f"{tmp_path}/model")
    made.scene = Scene(tmp_path / "job")
    yield made
    made.scene.close()
    made.close()


def follow(bed, **options):
    follower = bed.scene.follow("e0", bed.open(), retries=0, **options)
    return follower, engine_report_of(bed.scene.presence().info)


def test_a_server_that_loads_everything_passes_and_is_back_on_its_start_weights(bed):
    follower, found = follow(bed, exam="on")
    assert (found.exam, found.unseen, found.state) == ("passed", (), EngineState.WAITING)
    assert bed.engine.weights == bed.engine.start_weights
    assert follower.running().label is None
    assert not bed.is_paused()


def test_a_server_whose_head_stays_gets_no_work(bed):
    bed.inject("stale head")
    follower, found = follow(bed, exam="on")
    assert (found.exam, found.state) == ("failed", EngineState.WRONG)
    assert "lm_head.weight stayed as it was" in found.reason
    assert not follower.may_work()


def test_a_server_whose_loads_leave_the_prefix_cache_as_it_was_gets_no_work(bed):
    bed.inject("stale prefix cache")
    follower, found = follow(bed, exam="on")
    assert (found.exam, found.state) == ("failed", EngineState.WRONG)
    assert "the prefix cache holds keys and values of other weights" in found.reason
    assert not follower.may_work()


def test_a_server_that_has_passed_is_asked_for_the_tokens_of_the_probe_alone_until_it_is_asked_again(bed):
    hook, asked = bed.open(), []
    answer = hook.probe
    hook.probe = lambda target, tokens: asked.append(hook.asks_cache) or answer(target, tokens)
    follower = bed.scene.follow("e0", hook, retries=0, exam="on", prove_every=1e-9)
    assert asked
    assert all(asked)
    asked.clear()
    model = small_qwen.model_of(1)
    write_version(bed.scene.job, 1, model, probe_of(model))
    bed.scene.tick()
    assert follower.turn(timeout=60.0).kind == "applied"
    assert asked == [False]
    follower.turn(timeout=0.5)
    assert asked[1:]
    assert all(asked[1:])


def test_a_follower_that_restarts_takes_up_that_its_server_has_passed(bed):
    follower, _ = follow(bed, exam="on")
    model = small_qwen.model_of(1)
    write_version(bed.scene.job, 1, model, probe_of(model))
    bed.scene.tick()
    assert follower.turn(timeout=60.0).kind == "applied"
    follower.close()
    bed.scene.follow("e1", bed.open(), retries=0, exam="on")
    found = engine_report_of(bed.scene.presence("e1").info)
    assert (found.exam, found.unseen, found.state) == ("passed", (), EngineState.PROVEN)
    bed.scene.follow("e2", bed.open(), retries=0)
    assert engine_report_of(bed.scene.presence("e2").info).exam == "off"


def test_a_server_that_goes_away_in_exams_is_given_up_on_and_works(bed):
    hook = bed.open()

    def lost(target, tokens):
        raise EngineUnreachableError("nobody answers")

    hook.probe = lost
    follower = bed.scene.follow("e0", hook, retries=0, exam="on", check_every=0.0)
    for _ in range(4):
        follower.turn(timeout=0.5)
    found = engine_report_of(bed.scene.presence().info)
    assert "went away in 2 exams" in found.exam
    assert found.state is EngineState.WAITING
    assert bed.scene.names().count("exam_left_out") == 1


def test_a_server_that_others_may_use_is_examined_only_if_that_is_asked_for(bed):
    assert follow(bed)[1].exam == "off"
    assert bed.engine.label in ("default", None)


@pytest.mark.fault("a follower is killed while its engine is examined")
def test_a_server_that_was_left_in_an_exam_is_put_back_before_anything_else(bed):
    hook = bed.open()
    with ExamFiles(bed.scene.job).opened(Subject(hook.start_directory()), "float32", None) as (_, copy):
        hook.mark(EXAM_LABEL)
        hook.load(copy)
        hook.commit(copy)
    assert bed.engine.weights != bed.engine.start_weights
    follower, found = follow(bed)
    assert "exam_ended" in bed.scene.names()
    assert bed.engine.weights == bed.engine.start_weights
    assert found.state is EngineState.WAITING
    assert follower.running().label is None
