"""The exam on a real SGLang in bfloat16: it reloads a tied head, and each good load is proven."""

import pytest
from support import real_exam
from support.engine_models import write_start
from support.engine_process import python_of
from support.followers import Scene
from support.sglang_process import sglang

from explorer_hooks.hook import HookOptions
from explorer_hooks.hooks.sglang import SGLangHook
from syncd.protocol.engine_state import EngineState

PYTHON = python_of("SYNCD_SGLANG_PYTHON", ".venv-sglang/bin/python")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_tied_model_passes_and_each_good_load_is_proven(tmp_path, record_line):
    name = "Qwen3, tied"
    engine = sglang(PYTHON, write_start(tmp_path / "start", name), tmp_path / "log", "--dtype", "bfloat16")
    engine.start()
    scene = Scene(tmp_path / "job")
    try:
        hook = SGLangHook.from_options(HookOptions(engine.address))
        follower, found = real_exam.examined(scene, hook, name, record_line, "SGLang")
        assert (found.exam, found.unseen, found.state) == ("passed", (), EngineState.WAITING)
        real_exam.require_good_loads(scene, follower, name, record_line, "SGLang")
    finally:
        scene.close()
        engine.kill()
