"""`trainer export` of a distributed checkpoint as Megatron writes it, made of a model of transformers.

That Megatron's own files are read so is in `engines/test_megatron_real.py`.
"""

import os
import pickle
import shutil

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("safetensors", reason="needs safetensors")

import torch.distributed.checkpoint as dcp  # noqa: E402

from syncd.errors import ConfigError, CorruptDataError  # noqa: E402
from trainer.export import export  # noqa: E402
from trainer.parts.megatron.export import _read_heads  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

HEADS, GROUPS, SIZE, LAYERS = 4, 2, 8, 3


def model_of(kind):
    torch.manual_seed(5)
    sizes = {
        "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "head_dim": SIZE,
        "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for tensor in model.state_dict().values():
        tensor.normal_()
    return model


def grouped(query, key, value):
    """Return queries, keys and values as Megatron has them: of each group its queries, its key and its value."""
    queries = query.reshape(GROUPS, -1, *query.shape[1:])
    others = (one.reshape(GROUPS, SIZE, *one.shape[1:]) for one in (key, value))
    return torch.cat([queries, *others], 1).flatten(0, 1)


def split_layer(found, place):
    """Return a layer by Megatron's names."""
    attention, mlp = f"{place}.self_attn", f"{place}.mlp"
    made = {
        "self_attention.linear_qkv.layer_norm_weight": found[f"{place}.input_layernorm.weight"],
        "self_attention.linear_proj.weight": found[f"{attention}.o_proj.weight"],
        "mlp.linear_fc1.layer_norm_weight": found[f"{place}.post_attention_layernorm.weight"],
        "mlp.linear_fc1.weight": torch.cat([found[f"{mlp}.{one}_proj.weight"] for one in ("gate", "up")]),
        "mlp.linear_fc2.weight": found[f"{mlp}.down_proj.weight"],
    }
    for kind in ("weight", "bias"):
        if f"{attention}.q_proj.{kind}" in found:
            whole = grouped(*(found[f"{attention}.{one}_proj.{kind}"] for one in "qkv"))
            made[f"self_attention.linear_qkv.{kind}"] = whole
    for one in "qk":
        if f"{attention}.{one}_norm.weight" in found:
            made[f"self_attention.{one}_layernorm.weight"] = found[f"{attention}.{one}_norm.weight"]
    return made


def write_checkpoint(model, directory):
    """Write a model as Megatron does: layers stacked, beside things of the optimizer."""
    found = model.state_dict()
    layers = [split_layer(found, f"model.layers.{layer}") for layer in range(LAYERS)]
    whole = {f"decoder.layers.{name}": torch.stack([one[name] for one in layers]) for name in layers[0]}
    whole |= {
        "embedding.word_embeddings.weight": found["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": found["model.norm.weight"],
        "output_layer.weight": found["lm_head.weight"],
        "optimizer.state.exp_avg.output_layer.weight": found["lm_head.weight"],
    }
    dcp.save(whole, storage_writer=dcp.FileSystemWriter(directory), no_dist=True)


@pytest.fixture(params=["Llama", "Qwen2", "Qwen3"])
def job(request, tmp_path):
    model = model_of(request.param)
    place = tmp_path / "job/global_step_4/actor/model"
    model.config.save_pretrained(place / "huggingface")
    write_checkpoint(model, place / "dist_ckpt")
    (tmp_path / "job/latest_checkpointed_iteration.txt").write_text("4")
    return tmp_path, model, place


@pytest.mark.slow
def test_a_step_of_verl_with_megatron_becomes_a_model_of_transformers(job):
    root, model, _ = job
    export(f"{root}/job", 4, f"{root}/out")
    found, info = transformers.AutoModelForCausalLM.from_pretrained(f"{root}/out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


@pytest.mark.slow
def test_older_checkpoints_have_it_one_level_up(job):
    root, model, place = job
    for name in ("huggingface", "dist_ckpt"):
        shutil.move(place / name, place.parent / name)
    export(f"{root}/job", 4, f"{root}/out", "bfloat16")
    found = transformers.AutoModelForCausalLM.from_pretrained(f"{root}/out", dtype="auto").state_dict()
    assert torch.equal(found["lm_head.weight"], model.state_dict()["lm_head.weight"].bfloat16())


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harmful",)


@pytest.mark.parametrize("job", ["Llama"], indirect=True)
def test_damaged_and_foreign_checkpoints_are_refused_and_nothing_is_run(job, monkeypatch):
    root, _, place = job
    monkeypatch.chdir(root)
    (name,) = (found for found in os.listdir(place / "dist_ckpt") if found.endswith(".distcp"))
    os.truncate(place / "dist_ckpt" / name, 3000)
    with pytest.raises(CorruptDataError, match="cannot be read"):
        export(f"{root}/job", 4, f"{root}/out")
    (place / "dist_ckpt/.metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(ConfigError, match="only load by running code"):
        export(f"{root}/job", 4, f"{root}/out")
    assert not (root / "harmful").exists()
    (place / "dist_ckpt/.metadata").write_bytes(b"no pickle")
    with pytest.raises(CorruptDataError):
        export(f"{root}/job", 4, f"{root}/out")
    shutil.rmtree(place / "dist_ckpt")
    moe = {"decoder.layers.mlp.router.weight": torch.ones(3, 2, 2)}
    dcp.save(moe, storage_writer=dcp.FileSystemWriter(place / "dist_ckpt"), no_dist=True)
    with pytest.raises(ConfigError, match="not of Llama, Qwen2 or Qwen3"):
        export(f"{root}/job", 4, f"{root}/out")
    assert not (root / "out").exists()


def test_a_configuration_that_is_nested_too_deeply_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(CorruptDataError, match="no number of attention heads"):
        _read_heads(str(tmp_path / "config.json"))
