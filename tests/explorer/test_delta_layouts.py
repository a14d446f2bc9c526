"""Deltas straight into models whose parameters do not lie as files do: transposed, strided, tied, fused, in FP8.

Engines compute with the memory that their parameters are views of, so that memory is compared, bit for bit, with
what the values of a full load leave there. All bit patterns occur, NaN too: none means "keep what was there".
"""

import json
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from safetensors.torch import save_file  # noqa: E402
from support.tied_qwen import log_probs, tiny  # noqa: E402
from test_follow_deltas import DeltaScene  # noqa: E402
from test_transformers_deltas import Loader, callback, transformers  # noqa: E402

from explorer_hooks.hooks.transformers import TransformersHook  # noqa: E402
from syncd.errors import RefusedError  # noqa: E402
from syncd.publishing import FollowingDisk, publish_export, read_export  # noqa: E402
from syncd.transports.delta.publish import publish_delta  # noqa: E402

NAMES = ("q", "k", "v")
ROWS, COLUMNS = 48, 320
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


class Layout(NamedTuple):
    """How an engine holds q, k and v.

    Args:
        memory: What it computes with.
        tensors: Its parameters, each a view of that memory.
        is_straight: Whether a file's bytes are the parameters' bytes, so that changes go straight into them.
    """

    memory: torch.Tensor
    tensors: dict[str, torch.Tensor]
    is_straight: bool


def apart(dtype):
    memory = torch.zeros((3, ROWS, COLUMNS), dtype=dtype)
    return Layout(memory, dict(zip(NAMES, memory, strict=True)), is_straight=True)


def tied(dtype):
    """As `apart`; another name of q comes first, and no file has it."""
    memory, tensors, _ = apart(dtype)
    return Layout(memory, {"head": tensors["q"], **tensors}, is_straight=True)


def transposed(dtype):
    memory = torch.zeros((3, COLUMNS, ROWS), dtype=dtype)
    return Layout(memory, {name: one.t() for name, one in zip(NAMES, memory, strict=True)}, is_straight=False)


def strided(dtype):
    """Each second column; what lies between is another's."""
    memory = torch.full((3, ROWS, 2 * COLUMNS), 1.0, dtype=torch.float32).to(dtype)
    return Layout(
        memory, {name: one[:, ::2] for name, one in zip(NAMES, memory, strict=True)}, is_straight=False
    )


def fused(dtype):
    memory = torch.zeros((3 * ROWS, COLUMNS), dtype=dtype)
    return Layout(memory, dict(zip(NAMES, memory.split(ROWS), strict=True)), is_straight=True)


def fused_and_transposed(dtype):
    memory = torch.zeros((COLUMNS, 3 * ROWS), dtype=dtype)
    views = (part.t() for part in memory.split(ROWS, dim=1))
    return Layout(memory, dict(zip(NAMES, views, strict=True)), is_straight=False)


class Engine(torch.nn.Module):
    """A module with these parameters, under these names."""

    def __init__(self, tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


class Weights:
    """q, k and v with random bits, each with a scale, and what training changes of them."""

    def __init__(self, dtype):
        self.dtype, self.random = dtype, torch.Generator().manual_seed(7)
        shape = (ROWS, COLUMNS * dtype.itemsize)
        self.bits = {name: self._draw(shape) for name in NAMES}

    def _draw(self, shape):
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=self.random)

    def train(self):
        for bits in self.bits.values():
            chosen = torch.rand(bits.shape, generator=self.random) < 0.02
            bits[chosen] = self._draw(bits.shape)[chosen]

    def tensors(self):
        return {name: bits.view(self.dtype).clone() for name, bits in self.bits.items()}

    def publish(self, scene, step):
        export = scene.place / f"export{step}"
        export.mkdir()
        save_file(self.tensors(), export / "model.safetensors", metadata={"format": "pt"})
        (export / "config.json").write_text(json.dumps({"a": 1}))
        publish(scene, step, export)


def publish(scene, step, export):
    found = read_export(FollowingDisk(), str(export))
    if step == 1:
        publish_export(scene.job, step, FollowingDisk(), found, allow_nonfinite=True)
    else:
        made = publish_delta(scene.job, step, FollowingDisk(), found, step - 1, allow_nonfinite=True)
        assert made.why_whole == ""
    scene.tick()


def after_a_full_load(layout, dtype, values):
    """Return the memory of an engine that each value was copied into."""
    fresh = layout(dtype)
    for name, value in values.items():
        bits_of(fresh.tensors[name]).copy_(bits_of(value))
    return fresh.memory


def bits_of(tensor):
    return tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.int16)


@pytest.fixture
def scene(tmp_path):
    scene = DeltaScene(tmp_path / "job")
    yield scene
    scene.close()


def opened(scene, hook):
    scene._stack.callback(hook.close)
    return Loader(scene, hook)


LAYOUTS = [apart, tied, transposed, strided, fused, fused_and_transposed]


@pytest.mark.fault("a delta goes into a scratch copy of a tensor, not into the one that is computed with")
@pytest.mark.fault("the shards of a fused FP8 weight damage each other")
@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bfloat16", "float8"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("hook", [transformers, callback])
def test_the_memory_that_is_computed_with_is_that_of_a_full_load(scene, hook, layout, dtype):
    weights, engine = Weights(dtype), layout(dtype)
    loader = opened(scene, hook(Engine(engine.tensors)))
    for step in (1, 2, 3):
        weights.publish(scene, step)
        loader.disk.bytes.clear()
        read = loader.load(step)
        assert step == 1 or (1 in read) != engine.is_straight  # else the keyframe is read
        expected = after_a_full_load(layout, dtype, weights.tensors())
        assert torch.equal(bits_of(engine.memory), bits_of(expected)), f"step {step}"
        weights.train()


@pytest.mark.fault("the shards of a fused FP8 weight damage each other")
@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bfloat16", "float8"])
def test_an_engine_that_lists_a_fused_tensor_under_one_name_refuses_files_and_deltas(scene, dtype):
    """Nobody here knows where the parts lie in it, so nothing is guessed, and nothing is written."""
    weights, engine = Weights(dtype), fused(dtype)
    loader = opened(scene, transformers(Engine({"qkv": engine.memory})))
    before = engine.memory.clone()
    for step in (1, 2):
        weights.publish(scene, step)
        with pytest.raises(RefusedError, match="qkv"):
            loader.load(step)
        assert torch.equal(bits_of(engine.memory), bits_of(before))
        weights.train()


def transposed_model(seed):
    """Return a model with tied embeddings, two of whose layers compute with transposed memory."""
    model = tiny(seed, BF16)
    for layer in model.model.layers:
        weight = layer.mlp.gate_proj.weight
        layer.mlp.gate_proj.weight = torch.nn.Parameter(weight.detach().t().contiguous().t())
        assert not layer.mlp.gate_proj.weight.is_contiguous()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model


@pytest.mark.fault("a delta goes into a scratch copy of a tensor, not into the one that is computed with")
@pytest.mark.parametrize("make", [tiny, transposed_model])
def test_a_real_model_answers_after_a_delta_as_after_a_full_load(scene, make):
    trained = tiny(1, BF16)
    served, whole = (make(0, BF16) if make is tiny else make(0) for _ in range(2))
    loader = opened(scene, TransformersHook(served, probe=False))
    for step in (1, 2, 3):
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.view(torch.int16)[torch.rand(parameter.shape) < 0.02] += 1
        export = scene.place / f"model{step}"
        trained.save_pretrained(export)
        publish(scene, step, export)
        loader.load(step)
        whole.load_state_dict(trained.state_dict())
        assert torch.equal(log_probs(served), log_probs(whole))
        assert served.lm_head.weight is served.model.embed_tokens.weight
