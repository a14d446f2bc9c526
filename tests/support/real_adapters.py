"""Adapters in a real engine: each name answers with its own weights, and none is lost under a request."""

import os
import threading
import time
from typing import ClassVar

import pytest

from explorer_hooks.hook import HookOptions
from support import small_qwen
from support.hook_contract import HookContract, load
from support.probe_contract import RealAnswersProbes
from support.real_bed import CLOSE, LIMIT, asked, seed_of, told
from support.targets import label, target_of
from syncd.errors import LoadFailedError

LORA_FLAGS = ["--enable-lora", "--max-lora-rank", "8"]
PROMPT = list(range(10, 110))


class AdapterBed:
    """What a bed of a real engine needs for adapters, before that engine's own bed.

    Attributes:
        unload_path: Where the engine takes a name away.
    """

    cannot: ClassVar = {
        "label before commit": "an adapter can be used under its own name from the moment it is loaded",
        "reopen": "an adapter that is loaded is whole, whether it was committed or not",
        "pause": "nothing is ever paused for an adapter",
        "shards": "an adapter is one file",
        "cache": "each version has its own name, and the cache keeps names apart",
        "checksums": "the engine gives none of adapters",
        "label without load": "nothing makes a real engine list an adapter that it has not",
    }
    dtype = None
    timeout = 20.0

    def __enter__(self):
        for name in self.listed():
            if name != "policy":
                told(self.process.address, self.unload_path, {"lora_name": name})
        return self

    def answered(self, name, prompt, count):
        """Return the tokens after a prompt and their log-probs by the adapter of a name, None: by the model."""
        raise NotImplementedError

    def streamed(self, name, prompt, count, begun):
        """Return how many tokens a stream by an adapter had; `begun` is set after the first few."""
        raise NotImplementedError

    def listed(self):
        return [one["id"] for one in asked(self.process.address, "GET", "/v1/models")[1]["data"]]

    def open(self, timeout=None, **settings):
        options = HookOptions(self.process.address, timeout=timeout or self.timeout, settings=settings)
        return self.hook_type.from_options(options)

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
        tokens, found = self.answered(None if target is None else f"policy-{target.label}", PROMPT, 8)
        wanted = small_qwen.expected(self.model(target), [*PROMPT, *tokens], 8)
        return max(abs(a - b) for a, b in zip(found, wanted, strict=True))

    def is_paused(self):
        return False


def named(step):
    """Return the name of the adapter of a step."""
    return f"policy-{label(step)}"


def streaming(bed, name, count):
    """Begin a stream; return its thread, and the list that has its number of tokens in the end."""
    answered, begun = [], threading.Event()

    def ask():
        answered.append(bed.streamed(name, [7] * 20, count, begun))

    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(LIMIT)
    return thread, answered


class RealAdapters(RealAnswersProbes, HookContract):
    """The cases of every engine; `engine` is a fixture with the process, `bed_type` its bed."""

    @pytest.fixture
    def bed(self, engine, tmp_path):
        with self.bed_type(engine, tmp_path, None) as bed:
            yield bed

    def test_each_adapter_name_answers_with_its_own_weights(self, bed, record_line):
        hook, targets, took = bed.open(drain="0.001"), [bed.target((1, step)) for step in range(1, 9)], []
        for target in targets:
            before = time.monotonic()
            load(hook, target)
            took.append(time.monotonic() - before)
            assert bed.is_far(target) < CLOSE
        assert sorted(bed.listed()) == ["policy", named(6), named(7), named(8)]
        assert max(bed.is_far(target) for target in [None, *targets[-3:]]) < CLOSE
        record_line(f"{bed.engine} adapters: ms of a load: {', '.join(f'{1e3 * one:.0f}' for one in took)}")

    def test_a_request_finishes_on_an_adapter_that_was_rolled_back(self, bed):
        hook, good = bed.open(), bed.target((1, 1))
        load(hook, good)
        load(hook, bed.target((1, 2)))
        thread, answered = streaming(bed, named(2), 300)
        hook.abort(good)
        assert bed.listed() == ["policy", named(1)]
        thread.join(LIMIT)
        assert answered == [300]

    def test_an_adapter_above_max_lora_rank_is_refused_and_the_old_one_stays(self, bed):
        hook, good = bed.open(), bed.target((1, 1))
        load(hook, good)
        wrong = bed.target((1, 2))
        small_qwen.write_adapter(wrong.path, seed_of((1, 2)), rank=64)
        wrong = target_of(wrong.path, (1, 2), kind="lora")
        hook.prepare(wrong)
        with pytest.raises(LoadFailedError, match=r"max.lora.rank"):
            hook.load(wrong)
        hook.abort(good)
        assert bed.runs(good)
