"""Adapters in real vLLM on the CPU: each name answers with its own weights, and none is lost under a request."""

import json
import os
import threading
import time
from typing import ClassVar

import pytest
from support import small_qwen
from support.engine_process import python_of
from support.hook_contract import HookContract, load
from support.probe_contract import RealAnswersProbes
from support.real_bed import CLOSE, LIMIT, asked, seed_of, told
from support.targets import label, target_of
from support.vllm_process import VllmRealBed, vllm

from explorer_hooks.hook import HookOptions
from explorer_hooks.hooks.lora import LoraHook, in_use
from syncd.errors import LoadFailedError

PYTHON = python_of("SYNCD_VLLM_PYTHON", ".venv-vllm/bin/python")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FLAGS = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "4", "--max-cpu-loras", "8"]


class AdapterRealBed(VllmRealBed):
    hook_type = LoraHook
    cannot: ClassVar = {
        **VllmRealBed.cannot,
        "label before commit": "an adapter can be used under its own name from the moment it is loaded",
        "reopen": "an adapter that is loaded is whole, whether it was committed or not",
        "pause": "nothing is ever paused for an adapter",
        "shards": "an adapter is one file",
        "cache": "each version has its own name, and the cache keeps names apart",
        "checksums": "vLLM gives none of adapters",
        "label without load": "nothing makes real vLLM list an adapter that it has not",
    }
    dtype = None

    def __enter__(self):
        for name in self.listed():
            if name != "policy":
                told(self.process.address, "/v1/unload_lora_adapter", {"lora_name": name})
        return self

    def listed(self):
        return [one["id"] for one in asked(self.process.address, "GET", "/v1/models")[1]["data"]]

    def open(self, timeout=None):
        return LoraHook.from_options(HookOptions(self.process.address, timeout=timeout or self.timeout))

    def target(self, pair, *, shards=1):
        directory = f"{self.root}/versions/{pair[0]}.{pair[1]}"
        if not os.path.isdir(directory):
            small_qwen.write_adapter(directory, seed_of(pair))
        return target_of(directory, pair, kind="lora")

    def runs(self, target):
        """Ask as somebody would who follows the hook's word."""
        label = self.open().current_version().label
        return label == (target and target.label) and self.is_far(target) < CLOSE

    def model(self, target):
        if target is None:
            return small_qwen.model_of(0)
        return small_qwen.model_with_adapter(seed_of(target.version.pair))

    def is_far(self, target):
        model = self.model(target)
        name = "policy" if target is None else f"policy-{target.label}"
        prompt = list(range(10, 110))
        choice = self.completed(prompt, 8, model=name, logprobs=1, return_token_ids=True)
        wanted = small_qwen.expected(model, [*prompt, *choice["token_ids"]], 8)
        return max(abs(a - b) for a, b in zip(choice["logprobs"]["token_logprobs"], wanted, strict=True))

    def is_paused(self):
        return False


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    start = small_qwen.write_model(str(tmp_path_factory.mktemp("start")))
    log = tmp_path_factory.mktemp("vllm") / "log"
    engine = vllm(PYTHON, start, log, *FLAGS, VLLM_ALLOW_RUNTIME_LORA_UPDATING="True")
    engine.start()
    yield engine
    engine.kill()


@pytest.fixture
def bed(engine, tmp_path):
    bed = AdapterRealBed(engine, tmp_path, None)
    bed.timeout = 20.0
    with bed:
        yield bed


class TestContract(RealAnswersProbes, HookContract):
    bed_type = AdapterRealBed

    @pytest.fixture
    def bed(self, engine, tmp_path):
        bed = AdapterRealBed(engine, tmp_path, None)
        bed.timeout = 20.0
        with bed:
            yield bed


def name(step):
    """Return the name of the adapter of a step."""
    return f"policy-{label(step)}"


def test_each_adapter_name_answers_with_its_own_weights(bed, record_line):
    hook, targets, took = bed.open(), [bed.target((1, step)) for step in range(1, 9)], []
    for target in targets:
        before = time.monotonic()
        load(hook, target)
        took.append(time.monotonic() - before)
        assert bed.is_far(target) < CLOSE
    assert bed.listed() == ["policy", name(6), name(7), name(8)]
    assert max(bed.is_far(target) for target in [None, *targets[-3:]]) < CLOSE
    record_line(f"vLLM adapters: ms of a load: {', '.join(f'{1e3 * one:.0f}' for one in took)}")


def streaming(bed, name, count):
    answered, begun = [], threading.Event()

    def ask():
        answered.append(bed.stream([7] * 20, count, model=name, begun=begun))

    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(LIMIT)
    return thread, answered


def test_an_adapter_in_use_stays_loaded_until_its_request_ends(bed):
    hook = bed.open()
    load(hook, bed.target((1, 1)))
    thread, answered = streaming(bed, name(1), 450)
    assert in_use(hook._server) == {name(1)}
    for step in range(2, 6):
        load(hook, bed.target((1, step)))
        if thread.is_alive():
            assert name(1) in bed.listed()
    assert bed.is_far(bed.target((1, 5))) < CLOSE
    thread.join(LIMIT)
    assert answered == [450]
    bed.completed([1, 2, 3], 2, model=name(5))
    load(hook, bed.target((1, 6)))
    assert bed.listed() == ["policy", name(4), name(5), name(6)]


def test_a_request_finishes_on_an_adapter_that_was_rolled_back(bed):
    hook, good = bed.open(), bed.target((1, 1))
    load(hook, good)
    load(hook, bed.target((1, 2)))
    thread, answered = streaming(bed, name(2), 300)
    hook.abort(good)
    assert bed.listed() == ["policy", name(1)]
    thread.join(LIMIT)
    assert answered == [300]


def test_an_adapter_above_max_lora_rank_is_refused_and_the_old_one_stays(bed):
    hook, good = bed.open(), bed.target((1, 1))
    load(hook, good)
    wrong = bed.target((1, 2))
    path = f"{wrong.path}/adapter_config.json"
    with open(path) as file:
        config = json.load(file)
    with open(path, "w") as file:
        json.dump({**config, "r": 64}, file)
    hook.prepare(wrong)
    with pytest.raises(LoadFailedError, match="max_lora_rank"):
        hook.load(wrong)
    hook.abort(good)
    assert bed.runs(good)
