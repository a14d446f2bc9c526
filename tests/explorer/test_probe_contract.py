"""Hooks that answer probes keep the contract of probes, with fake servers and with models of this process."""

from typing import ClassVar

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from support import small_qwen  # noqa: E402
from support.engine_beds import (  # noqa: E402
    SmallLoraBed,
    SmallSglangBed,
    SmallSglangLoraBed,
    SmallVllmBed,
    seed_of,
)
from support.hook_contract import Bed, BedCases  # noqa: E402
from support.probe_contract import ROWS, AnswersProbes  # noqa: E402
from support.targets import target_of  # noqa: E402

from explorer_hooks.hook import Running  # noqa: E402
from explorer_hooks.hooks.callback import CallbackHook  # noqa: E402
from explorer_hooks.hooks.transformers import TransformersHook  # noqa: E402


class TestVllm(AnswersProbes, BedCases):
    bed_type = SmallVllmBed


class TestSglang(AnswersProbes, BedCases):
    bed_type = SmallSglangBed


class TestLora(AnswersProbes, BedCases):
    bed_type = SmallLoraBed


class TestSglangLora(AnswersProbes, BedCases):
    bed_type = SmallSglangLoraBed


class ModelBed(Bed):
    """A model of this process, with dropout that a probe must keep out."""

    dtype = "float32"
    cannot: ClassVar = {
        **dict.fromkeys(("cache", "gone", "checksums"), "the engine is this process"),
        "exam": "its start weights lie in no directory",
    }

    def __init__(self, directory):
        self.directory, self.fault = directory, ""
        self.engine = small_qwen.model_of(0)
        self.engine.train()
        self.engine.model.layers[0].self_attn.attention_dropout = 0.5

    def open(self):
        self.hook = TransformersHook(self.engine, timeout=self.patience)
        return self.hook

    def target(self, pair, *, shards=1):
        directory = small_qwen.write_shards(
            self.directory / f"{pair[0]}.{pair[1]}", 1000 * pair[0] + pair[1], shards
        )
        return target_of(directory, pair)

    def model(self, target):
        return small_qwen.model_of(0 if target is None else seed_of(target))

    def runs(self, target):
        wanted = self.model(target).state_dict()
        return all(torch.equal(tensor, wanted[name]) for name, tensor in self.engine.state_dict().items())

    def is_paused(self):
        return self.hook.current_version().paused

    def inject(self, fault):
        """Have what is loaded next be wrong in a way that no check of files can find."""
        kept = {name: tensor.clone() for name, tensor in self.engine.state_dict().items()}
        stay = {"lm_head.weight"} if fault == "stale head" else set(kept)
        load = self.hook.load

        def faulty(target):
            load(target)
            with torch.no_grad():
                for name, tensor in self.engine.state_dict().items():
                    if name in stay:
                        tensor.copy_(kept[name])

        self.hook.load = faulty


class TestTransformers(AnswersProbes, BedCases):
    bed_type = ModelBed

    def test_a_probe_leaves_mode_gradients_and_generators_as_they_were(self, bed, hook):
        modes = [module.training for module in bed.engine.modules()]
        state = torch.get_rng_state()
        hook.probe(None, ROWS)
        assert [module.training for module in bed.engine.modules()] == modes
        assert torch.equal(torch.get_rng_state(), state)
        assert all(one.grad is None and not one.is_inference() for one in bed.engine.parameters())


class OwnEngine:
    """Somebody's own Python around a model."""

    def __init__(self):
        self.model, self.label, self.fault, self.gone = small_qwen.model_of(0), None, "", False

    def load(self, target):
        if self.fault == "label without load":
            return
        head = self.model.lm_head.weight.detach().clone()
        self.model = small_qwen.model_of(seed_of(target))
        if self.fault == "stale head":
            self.model.lm_head.weight.data = head

    def commit(self, target):
        self.label = target.label

    def current(self):
        return Running(self.label)

    def probe(self, tokens):
        if self.gone:
            raise ConnectionRefusedError("nobody is there")
        return [small_qwen.expected(self.model, row, len(row) - 1) for row in tokens]


class OwnBed(ModelBed):
    cannot: ClassVar = {
        **dict.fromkeys(("cache", "gone", "checksums"), "the engine is this process"),
        "exam": "its start weights lie in no directory",
    }

    def __init__(self, directory):
        self.directory, self.own = directory, OwnEngine()

    @property
    def engine(self):
        return self.own.model

    def open(self):
        own = self.own
        return CallbackHook(
            own.load, own.current, commit=own.commit, probe=own.probe, dtype="float32", timeout=self.patience
        )

    def is_paused(self):
        return False

    def inject(self, fault):
        self.own.fault = fault


class TestCallback(AnswersProbes, BedCases):
    bed_type = OwnBed
