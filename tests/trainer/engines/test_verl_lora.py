"""LoRA on verl's engine: equal to torch and peft by hand, published as peft reads it, resumed bit for bit."""

import os

import pytest
from support import samples
from support.verl_release import LACKS

torch = pytest.importorskip("torch", reason="the trainer needs torch")
pytestmark = [
    pytest.mark.group("engines"),
    pytest.mark.slow,
    pytest.mark.skipif(LACKS.adapter_states, reason="this release of verl loads no states of adapters alone"),
]

NOISE = 2e-5
"""Of log-probs in float32, in nats."""


@pytest.fixture(scope="module")
def lora_models(models):
    from support import lora_cases

    samples.make_model(models / "tied-safe", tied=True)
    lora_cases.make_adapter(models / "adapter", models / "untied")
    lora_cases.make_adapter(models / "dora", models / "untied", use_dora=True)
    lora_cases.make_adapter(models / "renamed-adapter", models / "untied")
    lora_cases.rename_tensors(models / "renamed-adapter")
    return models


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def two(launch, lora_models, place):
    return launch(place, "verl", 2, "lora_steps", "lora_resumed", "lora_published")


@pytest.fixture(scope="module")
def one(launch, lora_models, place, two):
    """Return what one rank found, in the directory of two ranks."""
    names = ("lora_steps", "expected_lora_steps", "plain_answers", "lora_refused", "lora_resharded")
    return launch(place, "verl", 1, *names)


def of_peft(name):
    """Return peft's name of a parameter in a file."""
    return name.replace(".default.", ".")


def close(found, wanted, tolerance):
    found = {of_peft(name): tensor for name, tensor in found.items()}
    wanted = {of_peft(name): tensor for name, tensor in wanted.items()}
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name] - tensor).norm() <= tolerance * tensor.norm(), name


@pytest.mark.parametrize("name", ["grpo", "kl", "sft"])
def test_steps_equal_those_of_torch_and_peft_by_hand_on_one_and_two_ranks(one, two, name):
    (expected,) = one["expected_lora_steps"]
    for its in (*one["lora_steps"], *two["lora_steps"]):
        for (gradients, metrics, weights), (wanted, loss, kl, after) in zip(
            its[name], expected[name], strict=True
        ):
            close(gradients, wanted, 2e-5)
            close(weights, after, 1e-5)
            norm = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
            assert metrics["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
            if name == "sft":
                assert metrics["sft/loss"] == pytest.approx(loss, rel=1e-5)
            else:
                assert metrics["actor/pg_loss"] == pytest.approx(loss, abs=1e-6)
            if name == "kl":
                assert kl > 1e-3
                assert metrics["actor/kl_loss"] == pytest.approx(kl, rel=1e-4)


def test_training_resumes_bit_for_bit_and_saves_no_weight_of_the_base(two):
    for found in two["lora_resumed"]:
        assert found["again"] == found["metrics"][2:]
        assert all(torch.equal(found["end again"][name], tensor) for name, tensor in found["end"].items())
        assert all(found["files"].values()), found["files"]
        assert "optim_world_size_2_rank_0.pt" in found["files"]
        assert any(not torch.equal(found["start"][name], tensor) for name, tensor in found["end"].items())
        assert {of_peft(name) for name in found["names"]} == found["end"].keys()


def test_one_rank_goes_on_from_the_state_of_two(one, two):
    (found,), saved = one["lora_resharded"], two["lora_resumed"][0]["saved"]
    assert all(torch.equal(found["loaded"][name], tensor) for name, tensor in saved.items())
    close(found["end"], two["lora_resumed"][0]["end"], 1e-4)
    for mine, its in zip(found["metrics"], two["lora_resumed"][0]["metrics"][2:], strict=True):
        assert mine == pytest.approx(its, rel=1e-3, abs=1e-6)


def test_a_step_is_an_adapter_that_peft_loads(one, two, lora_models):
    from safetensors.torch import load_file
    from support import lora_cases

    (plain,) = one["plain_answers"]
    found, other = (its["adapter"] for its in two["lora_published"])
    manifest, actor = found["manifest"], f"{found['step']}/actor"
    assert (manifest.kind, manifest.world_size) == ("lora", 2)
    assert [record.name for record in manifest.shards] == ["actor/adapter_model.safetensors"]
    assert [record.name for record in manifest.files] == ["actor/adapter_config.json"]
    assert sorted(name for name in os.listdir(actor) if not name.startswith(".")) == [
        "adapter_config.json", "adapter_model.safetensors", "huggingface",
    ]  # fmt: skip
    tensors = load_file(f"{actor}/adapter_model.safetensors")
    assert tensors.keys() == found["exported"].keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in other["exported"].items())
    answers = lora_cases.answers_of(f"{lora_models}/untied", actor)
    assert far(answers, found["answers"]) < NOISE < 1e-2 < far(plain["untied"], found["answers"])
    probe = manifest.probe
    assert far(lora_cases.answers_of(f"{lora_models}/untied", actor, probe.tokens), probe.logprobs) < NOISE


def far(found, wanted):
    pairs = [(a, b) for row, its in zip(found, wanted, strict=True) for a, b in zip(row, its, strict=True)]
    return max(abs(a - b) for a, b in pairs)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_step_is_exported_merged_from_the_step_or_from_the_training_state(two, tmp_path, dtype):
    from support import lora_cases

    from trainer.export import export

    found = two["lora_published"][0]["adapter"]
    export(os.path.dirname(found["step"]), 2, str(tmp_path / "merged"), dtype)
    assert far(lora_cases.answers_of(tmp_path / "merged"), found["answers"]) < NOISE
    assert "tokenizer.json" in os.listdir(tmp_path / "merged")


def test_the_manifest_names_the_base_by_its_digest(two, lora_models):
    from syncd.protocol.adapter_base import model_digest
    from syncd.protocol.local_disk import LocalDisk

    disk = LocalDisk()
    found = two["lora_published"][0]["adapter"]
    assert found["manifest"].base == found["record"]
    assert found["record"].digest == model_digest(disk, f"{lora_models}/untied")
    assert found["record"].digest != model_digest(disk, f"{lora_models}/tied-safe")
    assert found["record"].step is None
    assert "base.json" in found["training"]


def test_the_baseline_is_of_the_model_without_the_adapter_that_a_run_starts_from(one, two, lora_models):
    from support import lora_cases

    found = two["lora_published"][0]["adapter"]
    (plain,) = one["plain_answers"]
    assert far(found["fresh"], plain["untied"]) > 1e-2
    start = lora_cases.answers_of(f"{lora_models}/untied", rows=found["base"].tokens)
    assert far(start, found["base"].logprobs) < NOISE


def test_a_merged_step_is_a_whole_model_in_float32(one, two):
    from support import lora_cases

    (plain,) = one["plain_answers"]
    found = two["lora_published"][0]["merged"]
    assert found["manifest"].kind == "weights"
    assert found["manifest"].base is None
    for place in ("actor", "actor/huggingface"):
        answers = lora_cases.answers_of(f"{found['step']}/{place}")
        assert far(answers, found["answers"]) < NOISE < 1e-3 < far(plain["tied-safe"], found["answers"])
    assert far(found["fresh"], plain["tied-safe"]) < NOISE


def test_verl_s_own_export_is_of_untrained_weights_and_is_not_used(two, lora_models):
    """`get_per_tensor_param()` gives the base without a word: a step made of it would be the start model for ever."""
    from safetensors.torch import load_file

    published = two["lora_published"][0]
    start, own = load_file(f"{lora_models}/tied-safe/model.safetensors"), published["merged"]["exported"]
    trap = {name.replace(".base_layer", ""): tensor for name, tensor in published["trap"].items()}
    assert all(torch.equal(trap[name], tensor) for name, tensor in start.items())
    changed = {name for name, tensor in start.items() if not torch.equal(own[name], tensor)}
    assert changed == {name for name in start if name.endswith("_proj.weight")}


REFUSALS = {
    "fsdp": ('model.lora with engine.strategy = "fsdp" is not supported', "fsdp2"),
    "no rank": ("model.lora.alpha has no effect without a rank", "leave it out"),
    "nccl": ('sync.method = "nccl" sends whole weights', "merged"),
    "embedding": ("the model cannot be built: ", "linear layers only"),
    "nothing": ("the model cannot be built: Target modules", "linear layers only"),
    "another rank": ("the adapter to start from has rank 4, and model.lora.rank = 8", "rank = 4"),
    "another alpha": ("the adapter to start from has alpha 12, and model.lora.alpha = 8", "alpha = 12"),
    "targets of an adapter": ("model.lora.targets has no effect without new adapters", "leave it out"),
    "no adapter": ("No such file or directory", ""),
    "adapter of another model": (
        "the adapter to start from has no tensor base_model.model.model.layers.0.self_attn.q_proj.lora_A",
        "model.lora.adapter",
    ),
    "dora": ("an adapter with DoRA is not supported", ""),
    "binary": ("the model has no weights in safetensors", "save_pretrained"),
    "tied head": ("layer lm_head can have no adapter: its weight is tied", "exclude"),
    "another base": ("the saved adapter belongs to xxh3_128:", "put back the model"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_done_is_refused_with_a_hint(one, name):
    kind, message, hint = one["lora_refused"][0][name]
    wanted, advice = REFUSALS[name]
    assert wanted in message
    assert advice in hint
    assert kind == "ConfigError"


def test_an_engine_that_trains_no_adapters_refuses_them(tmp_path):
    from support.tiny import TinyEngine

    from syncd.errors import ConfigError
    from syncd.transports.ranks import Ranks

    config = samples.configured("none", tmp_path, model={"lora": {"rank": 4}})
    with pytest.raises(ConfigError, match="trains no adapters"):
        TinyEngine(samples.context_of(config, Ranks())).prepare()
