"""Real vLLM on the CPU: what it answers after each load is compared with transformers, never with a status code."""

import contextlib

import pytest
from support import probe_contract, small_qwen
from support.engine_process import STARTING, python_of
from support.followers import Scene
from support.hook_contract import load
from support.probe_contract import ROWS, RealAnswersProbes, difference
from support.proven import probe_of, write_version
from support.real_bed import awaited, told
from support.real_contract import RealEngineContract, TakesWeights, wrong_shape
from support.real_deltas import TakesDeltas
from support.real_spans import NamesVersions
from support.targets import target_of
from support.teaching import RealTeaches
from support.vllm_process import VllmRealBed, plugged, vllm

from explorer_hooks.finding import open_hook
from explorer_hooks.hook import HookOptions, Running
from explorer_hooks.hooks.restarting import is_taken
from explorer_hooks.hooks.vllm import VllmHook
from syncd.errors import EngineDeadError, LoadFailedError
from syncd.protocol.engine_state import EngineState, engine_report_of
from syncd.protocol.probe import write_base_probe

PYTHON = python_of("SYNCD_VLLM_PYTHON", ".venv-vllm/bin/python")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class Bed(VllmRealBed):
    def bring_down(self, job, place):
        """Load a wrong shape past the checks: vLLM does not come back from it, and the hook says so."""
        hook = self.open()
        good = target_of(f"{job.job.step(1)}/actor", (1, 1))
        wrong = target_of(small_qwen.write_shards(str(place / "wrong"), 5, 2, wrong_shape), (1, 9))
        with pytest.raises(LoadFailedError):
            hook.load(wrong)
        with pytest.raises(EngineDeadError) as error:
            hook.abort(good)
        assert "restart" in error.value.hint
        assert hook.current_version() == Running(job.label(1), paused=True)


class TestVllm(RealTeaches, NamesVersions, TakesDeltas, TakesWeights, RealAnswersProbes, RealEngineContract):
    """It has the back end of this package throughout, so that files are seen to come as ever beside it."""

    bed_type = Bed

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, start_directory, tmp_path_factory):
        place = tmp_path_factory.mktemp("vllm")
        flags = ["--enable-scale-out", "--weight-transfer-config", '{"backend": "syncd"}']
        engine = vllm(PYTHON, start_directory, place / "log", *flags, PYTHONPATH=plugged(place))
        engine.start()
        yield engine
        engine.kill()

    def test_a_stale_prefix_cache_is_detected_by_the_comparison(self, bed):
        """The check is worth something: without a reset the same prompt is answered with the old keys and values."""
        target = bed.target((1, 10))
        assert bed.runs(None)
        kwargs = {"weights_path": target.path}
        told(bed.process.address, "/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
        assert not bed.runs(target)
        told(bed.process.address, "/reset_prefix_cache", {})
        assert bed.runs(target)


class TestTied:
    """A model whose head is its embedding: vLLM 0.32.0 on a CPU keeps the head that it was started with."""

    def test_the_head_that_a_reload_of_a_tied_model_leaves_shows(self, tmp_path, record_line):
        start = small_qwen.write_model(str(tmp_path / "start"), tied=True)
        engine = vllm(PYTHON, start, tmp_path / "log")
        engine.start()
        try:
            hook = VllmHook.from_options(HookOptions(engine.address))
            before = difference(hook.probe(None, ROWS), small_qwen.model_of(0, tied=True))
            model = small_qwen.model_of(1, tied=True)
            model.save_pretrained(tmp_path / "1")
            target = target_of(tmp_path / "1", (1, 1))
            load(hook, target)
            answer = hook.probe(target, ROWS)
            assert hook.current_version() == Running(target.label)
        finally:
            engine.kill()
        after = difference(answer, model)
        record_line(f"vLLM, tied: mean and worst {before} before, {after} after the load")
        assert before[1] < probe_contract.CLOSE
        assert after[0] > probe_contract.FAR
        assert answer.cached == pytest.approx(answer.fresh, abs=probe_contract.CLOSE)


class TestFollowed:
    """A follower of a real job: each version is proven, or the engine is found out."""

    @pytest.mark.parametrize("tied", [False, True])
    def test_an_engine_that_keeps_a_tied_head_is_wrong_and_another_is_proven(
        self, tmp_path, tied, record_line
    ):
        start = small_qwen.write_model(str(tmp_path / "start"), tied=tied)
        engine = vllm(PYTHON, start, tmp_path / "log")
        engine.start()
        scene = Scene(tmp_path / "job")
        try:
            write_base_probe(scene.job, probe_of(small_qwen.model_of(0, tied=tied)), start)
            follower = scene.follow("e0", VllmHook.from_options(HookOptions(engine.address)), retries=0)
            assert "engine_calibrated" in scene.names()
            assert "reload_tested" in scene.names()
            for step in (1, 2, 3):
                model = small_qwen.model_of(step, tied=tied)
                write_version(scene.job, step, model, probe_of(model))
                scene.tick()
                outcome = follower.turn(timeout=60)
                found = engine_report_of(scene.presence().info)
                record_line(
                    f"vLLM, {'tied' if tied else 'untied'}, step {step}: {outcome.kind}, {found.proof}"
                )
                assert outcome.kind == ("failed" if tied else "applied")
                assert found.state is (EngineState.WRONG if tied else EngineState.PROVEN)
                assert found.ready is follower.may_work() is not tied
        finally:
            scene.close()
            engine.kill()


class TestRestarted:
    """A tied model, which this vLLM reloads wrongly: with reload=restart each version is loaded by a start."""

    def test_a_tied_model_is_proven_on_each_version(self, tmp_path, record_line):
        start = small_qwen.write_model(str(tmp_path / "start"), tied=True)
        shape = vllm(PYTHON, "{model}", tmp_path / "log")  # its command and environment alone
        settings = {"reload": "restart", "start_model": start, "server_log": f"{tmp_path}/log"}
        variables = [f"{key}={value}" for key, value in shape.env.items()]
        argv = ("env", "-u", "PYTHONPATH", *variables, *shape.argv)
        hook = open_hook(f"vllm={shape.address}", argv=argv, settings=settings)
        scene = Scene(tmp_path / "job")
        with contextlib.closing(scene):
            write_base_probe(scene.job, probe_of(small_qwen.model_of(0, tied=True)), start)
            follower = scene.follow("e0", hook, retries=0)
            awaited(lambda: follower.turn(0.5) and "engine_calibrated" in scene.names(), limit=3 * STARTING)
            assert engine_report_of(scene.presence().info).exam == "passed"
            for step in (1, 2):
                model = small_qwen.model_of(step, tied=True)
                write_version(scene.job, step, model, probe_of(model), beside=start)
                scene.tick()
                outcome = follower.turn(timeout=60)
                found = engine_report_of(scene.presence().info)
                record_line(f"vLLM, tied, restarted, step {step}: {outcome.timings}, {found.proof}")
                assert outcome.kind == "applied", outcome.reason
                assert (found.state, found.ready) == (EngineState.PROVEN, True)
        assert not is_taken("127.0.0.1", shape.port)
