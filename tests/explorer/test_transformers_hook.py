"""The hook for a model in this process: the contract, log-probs against a reference, and generations beside loads."""

import contextlib
import sys
import threading
import time
import types
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from safetensors.torch import save_file  # noqa: E402
from support.hook_contract import Bed, HookContract, bounded, load  # noqa: E402
from support.targets import label as target_label  # noqa: E402
from support.targets import target_of  # noqa: E402
from support.tied_qwen import log_probs, tiny  # noqa: E402

from explorer_hooks.hook import HookOptions, Running  # noqa: E402
from explorer_hooks.hooks.transformers import TransformersHook  # noqa: E402
from syncd.errors import ConfigError, EngineDeadError, EngineUnreachableError, LoadFailedError, RefusedError  # noqa: E402
from syncd.protocol.version import UNKNOWN_LABEL  # noqa: E402


def seed_of(pair):
    return 100 * pair[0] + pair[1]


class ModelBed(Bed):
    cannot: ClassVar = {
        **dict.fromkeys(("gone", "hung"), "the engine is this process"),
        **dict.fromkeys(("restart", "reopen"), "model and hook live and die together"),
        "pause": "only the hook itself pauses generations",
    }
    lists_tensors = True

    def __init__(self, directory):
        self.directory, self.model, self.broken = directory, tiny(0), False
        self.hook = None

    def open(self):
        self.hook = TransformersHook(self.model, timeout=self.patience, on_commit=self._on_commit)
        return self.hook

    def _on_commit(self, target):
        if self.broken:
            self.broken = False
            raise RuntimeError("no commit today")

    def target(self, pair, *, shards=1):
        place = self.directory / f"{pair[0]}.{pair[1]}-{shards}"
        size = "1MB" if shards == 1 else "5KB"
        tiny(seed_of(pair)).save_pretrained(place, max_shard_size=size)
        return target_of(place, pair, verified=False)

    def runs(self, target):
        expected = tiny(0 if target is None else seed_of(target.version.pair))
        return torch.equal(log_probs(self.model), log_probs(expected))

    def is_paused(self):
        return self.hook.current_version().paused

    def fail_load(self, target):
        path = f"{target.path}/{target.shards[-1].name}"
        with open(path, "r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x7f")

    def fail_commit(self):
        self.broken = True


class TestModel(HookContract):
    bed_type = ModelBed

    def test_a_version_in_several_shards_is_loaded(self, bed, hook):
        target = bed.target((1, 10), shards=3)
        assert len(target.shards) > 1
        load(hook, target)
        self.assert_serves(bed, hook, target)


@pytest.fixture
def bed(tmp_path):
    return ModelBed(tmp_path)


@pytest.fixture
def hook(bed):
    return bed.open()


def test_a_version_without_the_tied_head_is_complete(bed, hook):
    target = bed.target((1, 3))
    assert "lm_head.weight" not in target.tensors
    load(hook, target)
    assert bed.model.lm_head.weight is bed.model.model.embed_tokens.weight
    assert bed.runs(target)
    assert hook.tensors() == target.tensors


def test_a_version_with_the_tied_head_is_complete(bed, hook, tmp_path):
    state = {name: tensor.detach().clone() for name, tensor in tiny(7).state_dict().items()}
    assert "lm_head.weight" in state
    (tmp_path / "both").mkdir()
    save_file(state, tmp_path / "both" / "model.safetensors")
    load(hook, target_of(tmp_path / "both", (1, 7)))
    assert torch.equal(log_probs(bed.model), log_probs(tiny(7)))


def test_a_version_in_half_precision_is_cast(bed, hook, tmp_path):
    tiny(4, torch.bfloat16).save_pretrained(tmp_path / "half")
    target = target_of(tmp_path / "half", (1, 4), verified=False)
    load(hook, target)
    expected = tiny(4)
    for parameter in expected.parameters():
        parameter.data = parameter.data.bfloat16().float()
    assert torch.equal(log_probs(bed.model), log_probs(expected))
    assert {meta.dtype for meta in target.tensors.values()} == {"BF16"}
    assert hook.tensors() == target.tensors


def test_a_hook_without_cast_refuses_another_dtype(tmp_path):
    hook = TransformersHook(tiny(0), cast=False)
    assert {meta.dtype for meta in hook.tensors().values()} == {"F32"}
    tiny(4, torch.bfloat16).save_pretrained(tmp_path / "half")
    with pytest.raises(RefusedError, match=r"BF16\[32, 16\] instead of F32"):
        hook.prepare(target_of(tmp_path / "half", (1, 4)))


def test_another_model_is_refused_and_the_weights_are_unchanged(bed, hook, tmp_path):
    before = log_probs(bed.model)
    tiny(1, width=32).save_pretrained(tmp_path / "other")
    with pytest.raises(RefusedError, match="does not fit the model"):
        hook.prepare(target_of(tmp_path / "other", (1, 1)))
    assert torch.equal(log_probs(bed.model), before)


def test_a_flipped_byte_fails_the_load_and_the_rollback_is_bit_for_bit(bed, hook):
    good, bad = bed.target((1, 1)), bed.target((1, 2))
    load(hook, good)
    hook.prepare(bad)
    bed.fail_load(bad)
    with pytest.raises(LoadFailedError, match="digest"):
        hook.load(bad)
    assert not bed.runs(good)
    hook.abort(good)
    assert bed.runs(good)


def test_a_dead_model_refuses_to_generate_until_it_is_loaded(bed, hook):
    bad = bed.target((1, 2))
    hook.prepare(bad)
    bed.fail_load(bad)
    with pytest.raises(LoadFailedError):
        hook.load(bad)
    with pytest.raises(EngineDeadError):
        hook.abort(None)
    with pytest.raises(EngineDeadError), hook.generating():
        pass
    assert hook.current_version() == Running(UNKNOWN_LABEL, paused=True)
    good = bed.target((1, 3))
    load(hook, good)
    with hook.generating() as label:
        assert label == good.label


def test_each_generation_runs_on_one_version(bed, hook):
    """Generate in two threads while a third loads one version after the other, as a follower beside a loop does."""
    references = {target_label(step): log_probs(tiny(seed_of((1, step)))) for step in range(1, 7)}
    references[None] = log_probs(tiny(0))
    targets = [bed.target((1, step)) for step in range(1, 7)]
    over, seen, wrong = threading.Event(), set(), []

    def generate():
        while not over.is_set():
            with hook.generating() as label:
                seen.add(label)
                found = [log_probs(bed.model) for _ in range(3)]
                wrong.extend(label for one in found if not torch.equal(one, references[label]))

    threads = [threading.Thread(target=generate) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for target in targets:
            load(hook, target)
            with hook.generating() as label:
                assert label == target.label
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert len(seen) > 1


def test_an_endless_generation_blocks_a_load_only_until_its_time_out(bed):
    hook = TransformersHook(bed.model, timeout=0.2)
    target = bed.target((1, 1))
    hook.prepare(target)
    begun, free = threading.Event(), threading.Event()

    def generate():
        with hook.generating():
            begun.set()
            free.wait(30)

    thread = threading.Thread(target=generate)
    thread.start()
    begun.wait(30)
    assert isinstance(bounded(lambda: hook.load(target)), EngineUnreachableError)
    assert bed.model is hook.model
    assert hook.current_version() == Running(None)
    with hook.generating() as label:  # work goes on
        assert label is None
    free.set()
    thread.join()
    load(hook, target)
    assert bed.runs(target)


def test_an_endless_load_blocks_a_generation_only_until_its_time_out(bed):
    hook = TransformersHook(bed.model, timeout=0.2)
    target = bed.target((1, 1))
    hook.prepare(target)
    hook.load(target)
    with pytest.raises(EngineUnreachableError, match="load"), hook.generating():
        pass
    hook.commit(target)
    with hook.generating() as label:
        assert label == target.label


def test_a_nested_generation_may_start_while_a_load_waits(bed, hook):
    target = bed.target((1, 1))
    hook.prepare(target)
    with hook.generating():
        loading = threading.Thread(target=hook.load, args=(target,))
        loading.start()
        while not hook.current_version().paused:
            time.sleep(0.001)
        with hook.generating() as label:
            assert label is None
    loading.join()
    hook.commit(target)
    assert bed.runs(target)


def module(**attributes):
    found = types.ModuleType("module_of_a_test")
    vars(found).update(attributes)
    return found


@pytest.mark.parametrize("kind", ["model", "holder", "maker", "hook"])
def test_an_import_path_may_name_a_model_a_holder_a_factory_or_a_hook(kind, monkeypatch):
    model = tiny(0)
    holder = types.SimpleNamespace(model=model)
    ready = TransformersHook(model)
    things = {"model": model, "holder": holder, "maker": lambda: holder, "hook": ready}
    monkeypatch.setitem(sys.modules, "module_of_a_test", module(thing=things[kind]))
    hook = TransformersHook.from_options(
        HookOptions(address="module_of_a_test:thing", settings={"direct": "false"})
    )
    assert hook.model is model
    assert (hook is ready) == (kind == "hook")


@pytest.mark.parametrize(
    ("address", "settings", "says"),
    [
        (None, {}, "import path"),
        ("os:sep", {}, "not a model"),
        ("os:getpid", {}, "not a model"),
        ("os:sep", {"direct": "perhaps"}, "direct"),
        ("os:sep", {"speed": "high"}, "speed"),
    ],
)
def test_wrong_options_are_refused(address, settings, says):
    with pytest.raises(ConfigError, match=says):
        TransformersHook.from_options(HookOptions(address=address, settings=settings))


def test_a_closed_hook_leaves_the_model_usable(bed, hook):
    target = bed.target((1, 1))
    load(hook, target)
    with contextlib.closing(hook):
        pass
    with hook.generating():
        assert bed.runs(target)
