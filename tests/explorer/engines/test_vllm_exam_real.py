"""The exam on a real vLLM in bfloat16: what it leaves out is named before it gets work, and good loads are proven."""

import contextlib

import pytest
from support import real_exam
from support.engine_models import write_start
from support.engine_process import python_of
from support.followers import Scene
from support.real_adapters import LORA_FLAGS
from support.vllm_process import vllm

from explorer_hooks.hook import HookOptions
from explorer_hooks.hooks.vllm import VllmHook
from explorer_hooks.hooks.vllm_lora import LoraHook
from syncd.protocol.engine_state import EngineState

TIED = pytest.importorskip("explorer_hooks.parts.exam.exam", reason="needs the part exam").TIED

PYTHON = python_of("SYNCD_VLLM_PYTHON", ".venv-vllm/bin/python")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@contextlib.contextmanager
def followed(tmp_path, name, *flags, **env):
    """Yield a job and the address of a vLLM that runs a model."""
    start = write_start(tmp_path / "start", name)
    engine = vllm(PYTHON, start, tmp_path / "log", "--dtype", "bfloat16", *flags, **env)
    engine.start()
    scene = Scene(tmp_path / "job")
    try:
        yield scene, engine.address
    finally:
        scene.close()
        engine.kill()


@pytest.mark.parametrize("name", ["Qwen3, untied", "Llama, untied"])
def test_a_model_that_it_reloads_passes_and_each_good_load_is_proven(tmp_path, name, record_line):
    with followed(tmp_path, name) as (scene, address):
        hook = VllmHook.from_options(HookOptions(address))
        follower, found = real_exam.examined(scene, hook, name, record_line, "vLLM")
        assert (found.exam, found.unseen, found.state) == ("passed", (), EngineState.WAITING)
        real_exam.require_good_loads(scene, follower, name, record_line, "vLLM")


@pytest.mark.parametrize(("name", "part"), [("Qwen3, tied", TIED), ("Qwen3-MoE", "stayed as")])
def test_a_model_of_which_it_reloads_a_part_gets_no_work(tmp_path, name, part, record_line):
    with followed(tmp_path, name) as (scene, address):
        hook = VllmHook.from_options(HookOptions(address))
        follower, found = real_exam.examined(scene, hook, name, record_line, "vLLM")
        assert (found.exam, found.state, follower.may_work()) == ("failed", EngineState.WRONG, False)
        assert part in found.reason


def test_an_engine_of_adapters_passes_and_each_good_adapter_is_proven(tmp_path, record_line):
    name = "Llama, untied"
    more = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    with followed(tmp_path, name, *LORA_FLAGS, **more) as (scene, address):
        follower = scene.follow("e0", LoraHook.from_options(HookOptions(address)), retries=0, exam="on")
        real_exam.require_good_adapters(scene, follower, name, record_line, "vLLM")
