"""The first version of an engine behind HTTP is compared with what the engine was started from."""

import dataclasses
import json

import pytest
from support.engine_beds import SglangBed, VllmBed, write_version
from support.hook_contract import load
from support.targets import target_of

from explorer_hooks.proof.start_model import StartModel, require_same_model, start_model_of
from syncd.errors import ConfigError, RefusedError
from syncd.transports.tensors import TensorMeta

START = {
    "model.embed_tokens.weight": (4, 4),
    "model.a.weight": (4, 2),
    "model.b.bias": (3,),
    "model.c.weight": (2, 2),
    "lm_head.weight": (4, 4),
    "model.experts.gate_up_proj": (2, 2),
    "model.self_attn.sinks": (2,),
}


@pytest.fixture(params=[VllmBed, SglangBed])
def bed_type(request):
    return request.param


def opened(bed_type, tmp_path, config=None, start=START, **settings):
    bed = bed_type(tmp_path, **settings)
    bed.engine.started_from = write_version(f"{tmp_path}/start", 1, shards=2, shapes=start)
    if config is not None:
        (tmp_path / "start/config.json").write_text(json.dumps(config))
    return bed


def version(tmp_path, start=START, **changed):
    shapes = {name: shape for name, shape in {**start, **changed}.items() if shape is not None}
    return target_of(write_version(f"{tmp_path}/version", 9, shapes=shapes), (1, 10))


UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
WITHOUT_HEAD = {"lm_head.weight": None}


@pytest.mark.parametrize(
    ("config", "changed", "message"),
    [
        (UNTIED, {"model.c.weight": (2, 3)}, r"'model\.c\.weight' is F32\[2, 3\] instead of F32\[2, 2\]"),
        (TIED, {"lm_head.weight": (5, 4)}, r"'lm_head\.weight' is F32\[5, 4\]"),
        (UNTIED, {"model.b.bias": None}, r"'model\.b\.bias' is missing"),
        (UNTIED, {"model.experts.gate_up_proj": None}, r"gate_up_proj' is missing"),
        (UNTIED, {"model.self_attn.sinks": None}, r"sinks' is missing"),
        (UNTIED, {"model.d.weight": (1,)}, r"'model\.d\.weight' is not expected"),
        (UNTIED, {"value_head.scale": (1,)}, r"'value_head\.scale' is not expected"),
        (UNTIED, WITHOUT_HEAD, r"'lm_head\.weight' is missing"),
        ({"text_config": UNTIED}, WITHOUT_HEAD, r"'lm_head\.weight' is missing"),
        ({**TIED, "text_config": UNTIED}, WITHOUT_HEAD, r"'lm_head\.weight' is missing"),
        (None, WITHOUT_HEAD, r"'lm_head\.weight' is missing"),
        (TIED, {"model.embed_tokens.weight": None}, r"embed_tokens\.weight' is missing"),
    ],
)
def test_a_first_version_that_does_not_fit_is_refused_before_the_pause(
    bed_type, tmp_path, config, changed, message
):
    with opened(bed_type, tmp_path, config) as bed:
        with pytest.raises(RefusedError, match=message):
            bed.open().prepare(version(tmp_path, **changed))
        assert not [path for path in bed.engine.paths() if path.startswith("POST")]


@pytest.mark.parametrize(
    ("config", "start", "changed"),
    [
        (UNTIED, {}, {}),
        (TIED, {}, WITHOUT_HEAD),
        ({"text_config": TIED}, {}, WITHOUT_HEAD),
        (TIED, WITHOUT_HEAD, {"lm_head.weight": (4, 4)}),
        (None, WITHOUT_HEAD, {"lm_head.weight": (4, 4)}),
        (UNTIED, {}, {"model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}),
        (UNTIED, {"h.0.attn.bias": (1, 1, 4, 4)}, {"h.0.attn.bias": None}),
    ],
)
def test_allowed_differences_between_checkpoints_are_accepted(bed_type, tmp_path, config, start, changed):
    start = {name: shape for name, shape in {**START, **start}.items() if shape is not None}
    with opened(bed_type, tmp_path, config, start) as bed:
        target = version(tmp_path, start, **changed)
        load(bed.open(), target)
        assert bed.runs(target)


def of(**dtypes):
    return {name.replace("__", "."): TensorMeta(dtype, (2,)) for name, dtype in dtypes.items()}


def test_float_dtypes_may_differ_and_integer_dtypes_may_not():
    start = StartModel(of(a="BF16", b="I64"), {})
    require_same_model(of(a="F32", b="I64"), start, "full", "/version")
    for wrong in (of(a="I32", b="I64"), of(a="BF16", b="F32")):
        for check in ("full", "shapes"):
            with pytest.raises(RefusedError, match="instead of"):
                require_same_model(wrong, start, check, "/version")


def test_next_token_prediction_layers_may_be_missing_if_the_config_has_them():
    tensors = of(model__layers__0__w="F32", model__layers__1__w="F32", mtp__norm__w="F32")
    config = {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    require_same_model(of(model__layers__0__w="F32"), StartModel(tensors, config), "full", "/version")
    with pytest.raises(RefusedError, match=r"layers\.1"):
        require_same_model(
            of(model__layers__0__w="F32"), StartModel(tensors, {"num_hidden_layers": 1}), "full", "/v"
        )
    with pytest.raises(RefusedError, match=r"layers\.0"):
        require_same_model(of(model__layers__1__w="F32"), StartModel(tensors, config), "full", "/version")


def test_a_missing_attention_bias_is_refused():
    start = StartModel(of(h__0__attn__bias="F32", a="F32"), {})
    with pytest.raises(RefusedError, match=r"attn\.bias"):
        require_same_model(of(a="F32"), start, "full", "/version")


def test_start_check_shapes_compares_shapes_only(bed_type, tmp_path):
    with opened(bed_type, tmp_path, start_check="shapes") as bed:
        bed.open().prepare(version(tmp_path, **{"model.b.bias": None}))
        with pytest.raises(RefusedError):
            bed.open().prepare(version(tmp_path, **{"model.c.weight": (9,)}))


def test_start_check_off_accepts_any_shape(bed_type, tmp_path):
    with opened(bed_type, tmp_path, start_check="off") as bed:
        bed.open().prepare(version(tmp_path, **{"model.c.weight": (9,)}))


def test_an_engine_started_from_an_unreadable_model_is_not_checked(bed_type, tmp_path, monkeypatch):
    with opened(bed_type, tmp_path) as bed:
        monkeypatch.chdir(tmp_path)
        for start in ("org/model", "start", "/not/here", str(tmp_path)):
            bed.engine.started_from = start
            bed.open().prepare(version(tmp_path, **{"model.c.weight": (9,)}))


def test_the_engine_s_start_directory_is_mapped_to_this_host(bed_type, tmp_path):
    with opened(bed_type, tmp_path, path_map=f"{tmp_path}:/mnt/there") as bed:
        bed.engine.started_from = "/mnt/there/start"
        with pytest.raises(RefusedError, match="instead of"):
            bed.open().prepare(version(tmp_path, **{"model.c.weight": (9,)}))


def test_an_unknown_start_check_is_refused(bed_type, tmp_path):
    with pytest.raises(ConfigError):
        bed_type(tmp_path, start_check="maybe").open()


def test_a_version_without_a_manifest_is_checked_by_its_shard_headers(bed_type, tmp_path):
    with opened(bed_type, tmp_path, UNTIED) as bed:
        target = dataclasses.replace(version(tmp_path, **WITHOUT_HEAD), shards=(), tensors={})
        with pytest.raises(RefusedError, match="is missing"):
            bed.open().prepare(target)


def test_a_start_model_from_the_hub_is_read_from_the_local_cache(bed_type, tmp_path, monkeypatch):
    """As the hub's client leaves it: links into blobs, and a second copy of the weights under other names."""
    monkeypatch.setenv("HF_HUB_CACHE", f"{tmp_path}/hub")
    model = tmp_path / "hub/models--org--model"
    blobs, snapshot = model / "blobs", model / "snapshots/0123abcd"
    write_version(str(blobs), 1, shapes=START)
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs/main").write_text("0123abcd")
    (snapshot / "model.safetensors").symlink_to(blobs / "model-00001-of-00001.safetensors")
    write_version(str(tmp_path / "other"), 2, shapes={"layers.0.attention.wq.weight": (2, 2)})
    (tmp_path / "other/model-00001-of-00001.safetensors").rename(snapshot / "consolidated.safetensors")
    with opened(bed_type, tmp_path) as bed:
        bed.engine.started_from = "org/model"
        bed.open().prepare(version(tmp_path))
        with pytest.raises(RefusedError, match="value_head"):
            bed.open().prepare(version(tmp_path, **{"value_head.scale": (1,)}))
        index = {"weight_map": dict.fromkeys(START, "model.safetensors")}
        (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
        (snapshot / "consolidated.safetensors").rename(snapshot / "extra.safetensors")
        bed.open().prepare(version(tmp_path))


@pytest.mark.parametrize("commit", ["../../start", "", "0123abcd/../../x"])
def test_a_cache_entry_that_points_outside_the_cache_is_not_followed(tmp_path, monkeypatch, commit):
    monkeypatch.setenv("HF_HUB_CACHE", f"{tmp_path}/hub")
    write_version(f"{tmp_path}/hub/start", 1, shapes=START)
    (tmp_path / "hub/models--org--model/refs").mkdir(parents=True)
    (tmp_path / "hub/models--org--model/refs/main").write_text(commit)
    assert start_model_of("org/model") is None
    assert start_model_of("../start") is None
