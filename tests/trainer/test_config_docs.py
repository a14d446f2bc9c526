"""What is said of the configuration is true: documentation, schema, examples, and the names of verl's algorithms."""

import ast
import glob
import importlib.util
import json
import os
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("pydantic", reason="the trainer needs pydantic")

from syncd.jobfile.model import KEYS, json_schema
from syncd.jobfile.trainer_sections import AlgorithmSection
from trainer.config.algorithms import (
    ADVANTAGES,
    AGGREGATIONS,
    ALGORITHMS,
    GAE,
    KL_TYPES,
    LACKING,
    LOSSES,
    SFT,
    estimator_and_loss,
)
from trainer.config.job_config import to_toml
from trainer.config.load import load_config
from trainer.stages import load_stages

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "configs"


def test_every_key_and_table_has_a_description():
    assert len(KEYS.all) > 80
    assert [key.name for key in KEYS.all.values() if not key.about] == []
    assert [name for name, about in KEYS.tables.items() if not about] == []


def test_the_json_schema_has_the_keys_of_the_configuration():
    schema = json.loads(json_schema())
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["job", "model"]
    assert schema["$defs"]["SyncSection"]["properties"]["interval"]["fixed"] is True
    assert "fixed" not in schema["$defs"]["SyncSection"]["properties"]["offset"]


@pytest.mark.parametrize("name", ["grpo", "sft"])
def test_example_files_load_and_survive_a_round_trip(name, tmp_path):
    config = load_config(str(EXAMPLES / f"{name}.toml"))
    assert config.algorithm.name == name
    path = tmp_path / "again.toml"
    path.write_text(to_toml(config))
    assert (
        tomllib.loads(to_toml(load_config(str(path))))["algorithm"]
        == tomllib.loads(to_toml(config))["algorithm"]
    )


def test_the_example_of_stages_loads():
    plan = load_stages(str(EXAMPLES / "stages.toml"))
    assert [(stage.name, stage.config.algorithm.name, stage.follows) for stage in plan.stages] == [
        ("sft", "sft", False),
        ("grpo", "grpo", True),
    ]


def test_the_examples_are_grpo_ppo_sft_and_stages_only():
    assert sorted(map(os.path.basename, glob.glob(f"{EXAMPLES}/*"))) == [
        "grpo.toml",
        "ppo.toml",
        "sft.toml",
        "stages.toml",
    ]


def test_an_algorithm_name_sets_estimator_and_loss_unless_overridden():
    assert estimator_and_loss(AlgorithmSection(name="gspo")) == ("grpo", "gspo")
    assert estimator_and_loss(AlgorithmSection(name="gspo", advantage="rloo")) == ("rloo", "gspo")
    assert estimator_and_loss(AlgorithmSection(name="grpo", loss="gpg")) == ("grpo", "gpg")
    assert estimator_and_loss(AlgorithmSection(name=SFT)) == ("", "")


def test_algorithm_tables_match_the_names_in_verl():
    """Read from verl's source: importing it takes as long as all other tests here together."""
    spec = importlib.util.find_spec("verl")
    if spec is None:
        pytest.skip("verl is not installed")
    source = Path(spec.submodule_search_locations[0], "trainer", "ppo", "core_algos.py").read_text()
    tree = ast.parse(source)
    (enum,) = [node for node in tree.body if getattr(node, "name", "") == "AdvantageEstimator"]
    estimators = {part.value.value for part in enum.body if isinstance(part, ast.Assign)}
    losses = {
        call.args[0].value
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        for call in node.decorator_list
        if isinstance(call, ast.Call) and call.func.id == "register_policy_loss"
    }
    assert estimators == ADVANTAGES | LACKING.keys() | {GAE}
    assert not ADVANTAGES & LACKING.keys()
    assert losses - LOSSES.keys() == {"bypass_mode", "geo_mean"}, "docs/algorithms.md says why not these"
    assert losses >= LOSSES.keys()
    assert {algorithm.advantage for name, algorithm in ALGORITHMS.items() if name != SFT} <= ADVANTAGES
    for name in (*AGGREGATIONS, *(kind.removesuffix("+") for kind in KL_TYPES)):
        assert f'"{name}"' in source
