"""Adapters in real vLLM on the CPU: each name answers with its own weights, and none is lost under a request."""

from typing import ClassVar

import pytest
from support import small_qwen
from support.engine_process import python_of
from support.hook_contract import load
from support.real_adapters import LORA_FLAGS, AdapterBed, RealAdapters, named, streaming
from support.real_bed import CLOSE, LIMIT
from support.vllm_process import VllmRealBed, vllm

from explorer_hooks.hooks.vllm_lora import LoraHook

PYTHON = python_of("SYNCD_VLLM_PYTHON", ".venv-vllm/bin/python")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FLAGS = [*LORA_FLAGS, "--max-loras", "4", "--max-cpu-loras", "8"]


class VllmAdapterBed(AdapterBed, VllmRealBed):
    hook_type = LoraHook
    unload_path = "/v1/unload_lora_adapter"
    cannot: ClassVar = {**VllmRealBed.cannot, **AdapterBed.cannot}

    def answered(self, name, prompt, count):
        choice = self.completed(prompt, count, model=name or "policy", logprobs=1, return_token_ids=True)
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def streamed(self, name, prompt, count, begun):
        return self.stream(prompt, count, model=name, begun=begun)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    start = small_qwen.write_model(str(tmp_path_factory.mktemp("start")))
    log = tmp_path_factory.mktemp("vllm") / "log"
    engine = vllm(PYTHON, start, log, *FLAGS, VLLM_ALLOW_RUNTIME_LORA_UPDATING="True")
    engine.start()
    yield engine
    engine.kill()


class TestContract(RealAdapters):
    bed_type = VllmAdapterBed

    def test_an_adapter_in_use_stays_loaded_until_its_request_ends(self, bed):
        hook = bed.open()
        load(hook, bed.target((1, 1)))
        thread, answered = streaming(bed, named(1), 450)
        assert hook._used() == {named(1)} or not thread.is_alive()
        for step in range(2, 6):
            load(hook, bed.target((1, step)))
            if thread.is_alive():
                assert named(1) in bed.listed()
        assert bed.is_far(bed.target((1, 5))) < CLOSE
        thread.join(LIMIT)
        assert answered == [450]
        bed.completed([1, 2, 3], 2, model=named(5))
        load(hook, bed.target((1, 6)))
        assert bed.listed() == ["policy", named(4), named(5), named(6)]
