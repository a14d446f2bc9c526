"""What `engine.strategy = "megatron"` takes and refuses; its tables are compared with verl's McoreEngineConfig."""

import dataclasses

import pytest
from support import samples

torch = pytest.importorskip("torch", reason="the trainer needs torch")

from syncd.errors import ConfigError  # noqa: E402
from trainer.engines.verl import checks  # noqa: E402
from trainer.engines.verl.release import RELEASES, installed_release, lacking_problems  # noqa: E402
from trainer.parts.megatron import STRATEGY  # noqa: E402
from trainer.parts.megatron.config import (  # noqa: E402
    MEGATRON_ELSEWHERE,
    MEGATRON_REFUSED,
    OF_MEGATRON,
    megatron_problems,
)


def configured(**tables):
    model = {"dtype": "bfloat16"} | tables.pop("model", {})
    engine = {"strategy": "megatron", "compute_dtype": "bfloat16"} | tables.pop("engine", {})
    return samples.configured("/nowhere", model=model, engine=engine, **tables)


def problems(**tables):
    return [problem.text for problem in megatron_problems(configured(**tables))]


def test_the_usual_settings_have_no_problem():
    sizes = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2, "sequence_parallel": True}
    more = {"override_transformer_config": {"recompute_granularity": "selective"}, "pad_to_length": True}
    options = {**sizes, **more, "pad_to_length_bucket": 128}
    assert problems(engine={"options": options, "packing": True}) == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tensor_model_parallel_size": 0}, "is not an accepted value"),
        ({"sequence_parallel": True}, "without engine.options.tensor_model_parallel_size above 1"),
        ({"virtual_pipeline_model_parallel_size": 2}, "needs engine.options.pipeline_model_parallel_size"),
        ({"use_dynamic_bsz": True}, "needs a bound"),
        ({"max_token_len_per_gpu": 9}, "without engine.options.use_dynamic_bsz = true"),
        ({"pad_to_length": True}, "without engine.packing = true"),
        ({"vanilla_mbridge": False}, "is not set here"),
        ({"use_megatron_fsdp": True}, "is not supported: its training state has another format"),
        ({"override_transformer_config": {"sequence_parallel": True}}, "is not an accepted value"),
        ({"reshard_after_forward": True}, "verl has no engine.options.reshard_after_forward"),
    ],
)
def test_options_that_cannot_work_are_refused(options, text):
    (found,) = problems(engine={"options": options})
    assert text in found


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"model": {"dtype": "float32"}}, 'model.dtype = "float32" is not supported'),
        ({"engine": {"compute_dtype": "float32"}}, 'engine.compute_dtype = "float32" is not supported'),
        ({"model": {"attn_implementation": "eager"}}, "model.attn_implementation has no effect"),
        ({"critic": {"enabled": True}}, "a critic is not supported"),
        ({"data": {"sft_ratio": 0.1, "sft_path": "x"}}, "examples beside rollouts are not supported"),
    ],
)
def test_other_keys_that_it_cannot_have_are_refused(tables, text):
    (found,) = problems(**tables)
    assert text in found


def test_every_field_of_verl_is_used_set_elsewhere_or_refused_with_a_reason():
    if installed_release() not in STRATEGY.releases:
        pytest.skip("this release of verl is refused with this strategy")
    config = pytest.importorskip("verl.workers.config", reason="the comparison needs verl")
    names = {field.name for field in dataclasses.fields(config.McoreEngineConfig)}
    known = OF_MEGATRON.keys() | MEGATRON_ELSEWHERE.keys() | MEGATRON_REFUSED.keys()
    assert known == names - {"_target_"}


def test_processors_and_missing_packages_are_refused_at_the_start(monkeypatch):
    monkeypatch.setattr(checks, "release_problems", lambda _: ())
    with pytest.raises(ConfigError, match="megatron does not run on processors") as refused:
        checks.check(configured(), "cpu")
    assert refused.value.exit_code == 78
    lacking = dataclasses.replace(STRATEGY, packages={"no_such_package": "pip install it"})
    monkeypatch.setattr(checks, "strategy_of", lambda _: lacking)
    with pytest.raises(ConfigError, match="needs the package no_such_package") as refused:
        checks.check(configured(), "cuda")
    assert refused.value.hint == "pip install it"


def test_verl_before_0_9_is_refused_by_name():
    (found,) = lacking_problems(configured(), "0.8", RELEASES["0.8"])
    assert found.key == "engine.strategy"
    assert "verl 0.8 has no Megatron engine that is supported here" in found.text
