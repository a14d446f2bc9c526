"""`syncd probe DIR`: the probe of a model directory, as `syncd publish --probe` takes it."""

import json
import os
from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="syncd probe needs torch")
transformers = pytest.importorskip("transformers", reason="syncd probe needs transformers")

from support import samples  # noqa: E402

from syncd.protocol.layout import Job  # noqa: E402
from syncd.protocol.local_disk import LocalDisk  # noqa: E402
from syncd.protocol.manifest import read_manifest  # noqa: E402
from syncd.protocol.probe import read_probe  # noqa: E402
from trainer.probe import probe_directory, probe_model, probe_tokens  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return samples.make_model(tmp_path_factory.mktemp("models") / "model", tied=False, tokenizer=True)


def answered(path, tokens, dtype):
    """Return the log-probs of tokens by transformers alone, one sequence in one call with labels."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    with torch.no_grad():
        logits = [model(torch.tensor([row])).logits[0].double() for row in tokens]
    return [
        [float(torch.log_softmax(at, -1)[token]) for at, token in zip(one[:-1], row[1:], strict=True)]
        for one, row in zip(logits, tokens, strict=True)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_probe_of_a_directory_is_published_with_it(shell, model, tmp_path, dtype):
    done = shell("probe", model, "--dtype", dtype)
    assert (done.code, done.err) == (0, "")
    (tmp_path / "probe.json").write_text(done.out)
    probe = read_probe(LocalDisk(), str(tmp_path / "probe.json"))
    assert (probe.compute_dtype, probe.export_dtype) == (dtype, "keep")
    assert probe.tokens == probe_tokens(model, samples.VOCAB)
    for row, its in zip(probe.logprobs, answered(model, probe.tokens, getattr(torch, dtype)), strict=True):
        assert row == pytest.approx(its, abs=1e-5)
    (tmp_path / "job").mkdir()
    job = Job.at(tmp_path / "job")
    published = shell("publish", job.root, 3, model, "--probe", tmp_path / "probe.json")
    assert published.code == 0, published.err
    assert read_manifest(job.disk, job.step(3)).probe == probe


def test_a_directory_without_a_model_is_refused(shell, tmp_path):
    done = shell("probe", tmp_path / "nothing")
    assert (done.code, done.out) == (78, "")
    assert "it has no config.json" in done.err
    only_pickled = samples.make_model(tmp_path / "pickled", tied=False, binary=True)
    done = shell("probe", only_pickled)
    assert (done.code, done.out) == (78, "")
    assert "the model cannot be loaded" in done.err
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "none-such"}))
    assert shell("probe", tmp_path).code == 78


def cut_off(path):
    os.truncate(f"{path}/model.safetensors", os.path.getsize(f"{path}/model.safetensors") // 2)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (
            partial(samples.change_weights, change=samples.remove_a_tensor),
            "it has no tensor model.layers.1.mlp.up_proj.weight",
        ),
        (
            partial(samples.change_weights, change=samples.reshape_a_tensor),
            "its tensor lm_head.weight has another shape than the model's",
        ),
        (cut_off, "the model cannot be loaded"),
    ],
    ids=["a tensor is missing", "a tensor has another shape", "the file is cut off"],
)
def test_a_damaged_or_incomplete_model_is_refused(shell, tmp_path, damage, reason):
    path = samples.make_model(tmp_path / "model", tied=False, tokenizer=True)
    damage(path)
    done = shell("probe", path)
    assert (done.code, done.out) == (78, "")
    assert reason in done.err


def test_a_model_that_answers_nan_is_refused_with_the_name_of_the_tensor(shell, tmp_path):
    path = samples.make_model(tmp_path / "broken", tied=False)
    samples.change_weights(
        path, lambda weights: weights["model.layers.1.mlp.up_proj.weight"][0].fill_(float("nan"))
    )
    done = shell("probe", path)
    assert (done.code, done.out) == (65, "")
    assert "tensor model.layers.1.mlp.up_proj.weight is not finite" in done.err
    assert os.listdir(tmp_path) == ["broken"]


@pytest.mark.parametrize("is_training", [True, False])
def test_a_model_of_this_process_answers_as_its_directory_does_and_is_as_before(model, is_training):
    here = transformers.AutoModelForCausalLM.from_pretrained(model).train(is_training)
    assert probe_model(here, str(model)) == probe_directory(str(model), "float32")
    assert here.training is is_training
