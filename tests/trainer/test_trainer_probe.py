"""Which tokens a job asks its model, what becomes of the answer, and what the loop does with it."""

import itertools
import json
import math
import os

import pytest
import torch
from support import samples
from support.trainers import make_trainer, same, small_config, weights, write_experiences

from syncd.errors import NonFiniteError
from syncd.protocol.layout import Job
from syncd.protocol.manifest import read_manifest
from syncd.protocol.probe import Probe, read_base_probe
from syncd.synchronizer import Synchronizer
from trainer.experience.batch import Batch
from trainer.experience.sft import Example
from trainer.probe import LENGTH, TEXTS, make_probe, non_finite_error, probe_tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a model directory with a tokenizer that knows the words of the texts."""
    place = tmp_path_factory.mktemp("model")
    words = sorted({word for text in TEXTS for word in text.split()})
    document = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {
            "type": "WordLevel", "vocab": {word: number for number, word in enumerate(words, 1)} | {"[UNK]": 0},
            "unk_token": "[UNK]",
        },
    }  # fmt: skip
    (place / "tokenizer.json").write_text(json.dumps(document))
    (place / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"})
    )
    (place / "config.json").write_text("{}")
    return str(place)


def test_the_tokens_are_the_beginnings_of_fixed_texts(model):
    tokens = probe_tokens(model, 1000)
    words = ["[UNK]", *sorted({word for text in TEXTS for word in text.split()})]
    for row, text in zip(tokens, TEXTS, strict=True):
        assert [words[token] for token in row] == text.split()[:LENGTH]
    assert probe_tokens(model, 1000) == tokens
    assert 40 <= sum(map(len, tokens)) <= 64


def test_a_short_limit_shortens_each_sequence(model):
    tokens = probe_tokens(model, 1000, limit=5)
    assert tokens == tuple(row[:5] for row in probe_tokens(model, 1000))
    assert probe_tokens(model, 1000, limit=1) == ()


def test_without_a_usable_tokenizer_ids_are_spread_over_the_vocabulary(model, tmp_path):
    tokens = probe_tokens("/nowhere", 32000)
    assert [len(row) for row in tokens] == [LENGTH] * len(TEXTS)
    flat = sorted(token for row in tokens for token in row)
    assert {later - earlier for earlier, later in itertools.pairwise(flat)} == {500}
    assert tokens[0][:3] == (0, 18500, 5000)
    assert probe_tokens("/nowhere", 32000) == tokens
    # A tokenizer whose ids are beyond the model's vocabulary, and one to which every word is unknown.
    assert probe_tokens(model, 7) == probe_tokens("/nowhere", 7)
    unknown = samples.make_model(tmp_path / "unknown", tied=False, tokenizer=True)
    assert probe_tokens(unknown, samples.VOCAB) == probe_tokens("/nowhere", samples.VOCAB)
    (tmp_path / "tokenizer.json").write_text("{")
    assert probe_tokens(str(tmp_path), 32000) == tokens


def test_an_engine_that_knows_no_vocabulary_has_no_probe():
    assert probe_tokens("/nowhere", None) == ()


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_an_answer_that_is_not_finite_is_no_probe(value):
    assert make_probe(((1, 2, 3),), [[-1.0, value]], "float32", "bfloat16") is None
    assert make_probe(((1, 2, 3),), [[-1.0, -2.0]], "float32", "keep").count == 2


def test_the_error_of_a_model_that_answers_nan_names_the_tensor_if_one_is_to_blame():
    good, bad = torch.ones(3), torch.tensor([1.0, math.inf])
    assert "tensor b is not finite" in str(non_finite_error([("a", good), ("b", bad), ("c", bad)]))
    assert "outputs overflow" in str(non_finite_error([("a", good)]))


# --- in the loop, with the tiny engine ----------------------------------------------------------------------------


def run(job, total, **sections):
    """Train so many steps; return the engine, as it was at the end, and the metrics of each step."""
    os.makedirs(job, exist_ok=True)
    config = small_config(job, trainer={"total_steps": total, "save_interval": 2}, **sections)
    with Synchronizer.open(config.job.dir, "trainer", poll=0.01) as sync:
        trainer, shown = make_trainer(config, sync)
        trainer.prepare()
        try:
            assert trainer.train() == 0
        finally:
            trainer.shutdown()
        return trainer.engine, dict(shown.records)


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job").mkdir()
    write_experiences(tmp_path / "job", 8)
    return tmp_path / "job"


def probe_of(job, step):
    return read_manifest(Job.at(job).disk, Job.at(job).step(step)).probe


def test_each_step_has_the_probe_of_its_weights(job):
    engine, metrics = run(job, 3, sync={"dtype": "float32"})
    probes = [probe_of(job, step) for step in (1, 2, 3)]
    assert len({probe.logprobs for probe in probes}) == 3
    last = probes[-1]
    assert (last.compute_dtype, last.export_dtype, len(last.tokens)) == ("float32", "float32", 4)
    assert last == Probe(last.tokens, engine.token_logprobs(last.tokens), "float32", "float32")
    assert all(metrics[step]["timing_s/probe"] > 0 for step in (1, 2, 3))
    assert metrics[1]["timing_s/probe"] <= metrics[1]["timing_s/sync_weight"]


def test_the_baseline_is_that_of_the_start_model_once_a_job(job):
    run(job, 2)
    base = read_base_probe(Job.at(job))
    assert base.tokens == probe_of(job, 1).tokens
    assert base.logprobs != probe_of(job, 1).logprobs
    assert json.loads((job / ".syncd/base_probe.json").read_text())["model"] == "/nowhere"
    run(job, 4)
    assert read_base_probe(Job.at(job)) == base
    (job / ".syncd/base_probe.json").unlink()
    run(job, 6)
    assert read_base_probe(Job.at(job)) is None, "a resumed run has other weights"


def test_without_a_probe_nothing_is_different_but_the_probe(job, tmp_path):
    write_experiences(tmp_path, 8)
    run(job, 4)
    _, metrics = run(tmp_path, 4, sync={"probe": False})
    assert same(weights(job, 4), weights(tmp_path, 4))
    assert (probe_of(job, 4) is not None, probe_of(tmp_path, 4)) == (True, None)
    assert not (tmp_path / ".syncd/base_probe.json").exists()
    assert all("timing_s/probe" not in record for record in metrics.values())


def test_a_sync_of_a_step_that_is_sent_already_measures_nothing(job):
    config = small_config(job)
    with Synchronizer.open(config.job.dir, "trainer", poll=0.01) as sync:
        engine = make_trainer(config, sync)[0].engine
        engine.prepare()
        engine.sync_weight("checkpoint")
        measured = engine.sync_metrics["timing_s/probe"]
        assert measured > 0
        engine.sync_weight("checkpoint")
        assert engine.sync_metrics == {"timing_s/probe": measured}
        engine.train_step(Batch((), (), (), (), (), (Example([1, 2, 3], 1),)))
        assert engine.sync_metrics == {}
        engine.shutdown()


@pytest.mark.parametrize("is_checked", [True, False])
def test_a_model_that_answers_nan_sends_no_probe(job, is_checked):
    config = small_config(job, sync={"check_finite": is_checked})
    with Synchronizer.open(config.job.dir, "trainer", poll=0.01) as sync:
        engine = make_trainer(config, sync)[0].engine
        engine.prepare()
        engine.model.layer.weight.data[0, 0] = math.nan
        if is_checked:
            with pytest.raises(NonFiniteError, match=r"layer\.weight"):
                engine.sync_weight("checkpoint")
            assert not [name for name in os.listdir(job) if "global_step" in name]
        else:
            engine.sync_weight("checkpoint")
            engine.wait_for_save()
            assert probe_of(job, 0) is None
        engine.shutdown()


def test_a_baseline_that_cannot_be_written_does_not_stop_the_run(job, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainer.engines.files.write_base_probe", full)
    run(job, 1)
    assert read_base_probe(Job.at(job)) is None
    assert probe_of(job, 1) is not None
