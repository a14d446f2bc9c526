"""Adapters in real SGLang on the CPU, by the cases of vLLM's, and what only SGLang does."""

import os
from typing import ClassVar

import pytest
from safetensors.torch import load_file, save_file
from support import small_qwen
from support.engine_matrix import Row, Watched, check_adapters, sglang_answer
from support.engine_process import python_of
from support.hook_contract import load
from support.real_adapters import PROMPT, AdapterBed, RealAdapters, named, streaming
from support.real_bed import CLOSE, LIMIT, asked, told
from support.sglang_process import LORA, SglangRealBed, sglang
from support.targets import target_of

from explorer_hooks.hooks.sglang_lora import SGLangLoraHook
from explorer_hooks.run.generation import GroupRequest
from explorer_hooks.run.server_apis import SGLangGenerateApi
from syncd.errors import RefusedError

PYTHON = python_of("SYNCD_SGLANG_PYTHON", ".venv-sglang/bin/python")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class SglangAdapterBed(AdapterBed, SglangRealBed):
    hook_type = SGLangLoraHook
    unload_path = "/unload_lora_adapter"
    cannot: ClassVar = {**SglangRealBed.cannot, **AdapterBed.cannot}

    def answered(self, name, prompt, count):
        return self.answer(prompt, count, **({} if name is None else {"lora_path": name}))

    def streamed(self, name, prompt, count, begun):
        return self.stream(prompt, count, begun, lora_path=name)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    start = small_qwen.write_model(str(tmp_path_factory.mktemp("start")))
    engine = sglang(PYTHON, start, tmp_path_factory.mktemp("sglang") / "log", *LORA)
    engine.start()
    yield engine
    engine.kill()


class TestContract(RealAdapters):
    bed_type = SglangAdapterBed

    def test_an_unload_waits_for_requests_and_the_name_goes_at_once(self, bed, monkeypatch):
        monkeypatch.setattr("explorer_hooks.hooks.sglang_lora._UNLOADING", 0.2)
        hook = bed.open(keep="0", drain="0.001", timeout=LIMIT)
        load(hook, bed.target((1, 1)))
        thread, answered = streaming(bed, named(1), 450)
        load(hook, bed.target((1, 2)))
        load(hook, bed.target((1, 3)))
        assert named(1) not in bed.listed()
        assert bed.is_far(bed.target((1, 3))) < CLOSE
        thread.join(LIMIT)
        assert answered == [450]
        load(hook, bed.target((1, 4)))
        assert bed.is_far(bed.target((1, 4))) < CLOSE

    def test_a_request_that_names_an_unloaded_adapter_has_it_read_again(self, bed):
        hook = bed.open()
        for step in (1, 2):
            load(hook, bed.target((1, step)))
        told(bed.process.address, bed.unload_path, {"lora_name": named(1)})
        assert bed.listed() == ["policy", named(2)]
        assert bed.is_far(bed.target((1, 1))) < CLOSE
        assert sorted(bed.listed()) == ["policy", named(1), named(2)]
        assert hook.current_version().label == bed.target((1, 2)).label

    def test_a_server_that_never_had_an_adapter_says_so_in_words_that_are_understood(self, bed):
        api = SGLangGenerateApi("policy-1.9")
        body = api.body(GroupRequest(tuple(PROMPT), 2, 4, 1.0))
        hook = bed.open()
        reply = hook._server.post_any(api.path, body)
        assert (reply.status, api.lacks_adapter(reply)) == (400, True)
        load(hook, bed.target((1, 1)))
        api = SGLangGenerateApi(named(1))
        long = hook._server.post_any(api.path, api.body(GroupRequest((5,) * 600, 2, 4, 1.0)))
        assert (long.is_error, api.lacks_adapter(long)) == (True, False)

    def test_an_adapter_is_proven_under_its_own_name(self, bed, tmp_path, record_line):
        asking = {}
        answers = lambda _: sglang_answer(bed.process.address, **asking)  # noqa: E731
        record = lambda line: record_line(f"SGLang, {line}")  # noqa: E731
        with Watched(tmp_path, bed.open(timeout=LIMIT), small_qwen.model_of(0), answers) as watched:
            check_adapters(watched, Row("Qwen2, untied"), lambda name: asking.update(lora_path=name), record)

    def test_adapters_that_end_sglang_are_refused_before_it_hears_of_them(self, bed):
        hook, good = bed.open(), bed.target((1, 1))
        load(hook, good)
        wrong = bed.target((1, 2))
        path = f"{wrong.path}/adapter_model.safetensors"
        whole = load_file(path)
        changes = {
            "without": lambda name, half: None if "gate_proj" in name else half,
            "weight": lambda name, half: half[:, :32].contiguous() if "q_proj.lora_A" in name else half,
        }
        for message, change in changes.items():
            changed = {name: change(name, half) for name, half in whole.items()}
            save_file({name: half for name, half in changed.items() if half is not None}, path)
            with pytest.raises(RefusedError, match=message):
                hook.prepare(target_of(wrong.path, (1, 2), kind="lora"))
        assert os.path.isfile(path)
        assert bed.runs(good)
        assert asked(bed.process.address, "GET", "/health")[0] == 200
