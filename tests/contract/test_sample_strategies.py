"""One contract for all sample strategies: those of the trainer, and one that another package registers."""

import json
from pathlib import Path

import pytest
from support.job_file import job_of, write_job

pytest.importorskip("pydantic", reason="the trainer needs pydantic")
pytest.importorskip("pyarrow", reason="experiences need pyarrow")

from support.experiences import whole_group, write

from syncd.errors import ConfigError, CorruptDataError
from syncd.jobfile.model import JobFile
from syncd.protocol.layout import Job
from trainer.config.load import load_config
from trainer.experience.batch import SampleStrategy
from trainer.plugins import SAMPLE_STRATEGY, load_plugins
from trainer.sampling import make_strategy, strategy_name

INSTALLED = Path(__file__).parent / "installed"

SETTINGS = {
    "fifo": {},
    "replay": {"data": {"replay": {"capacity": 4, "share": 0.5}}},
    "mix": {"data": {"sft_ratio": 0.5}},
    "sft": {"algorithm": {"name": "sft"}},
    "own-newest": {"data": {"strategy": "own-newest", "strategy_options": {"depth": 1}}},
}
"""What a job's file says to have each strategy."""


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Have the other package installed."""
    monkeypatch.syspath_prepend(str(INSTALLED))


@pytest.fixture
def world(tmp_path):
    """Return a function that makes the strategy of a name, and the job."""
    examples = [{"tokens": [1, 2, number + 3], "prompt_length": 1} for number in range(7)]
    path = tmp_path / "examples.jsonl"
    path.write_text("".join(f"{json.dumps(example)}\n" for example in examples))
    job = Job.at(tmp_path / "job")
    job.disk.make_directory(job.root)

    def made(name):
        settings = SETTINGS[name]
        data = {"groups": 2, "group_size": 2, "sft_path": str(path), **settings.get("data", {})}
        whole = {"job": {"dir": job.root}, "model": {"path": str(tmp_path)}, **settings, "data": data}
        config = JobFile.model_validate(whole)
        assert (config.data.strategy or strategy_name(config)) == name
        return make_strategy(config, job)

    write(job, "e0", *[whole_group(f"g{number}", step=1) for number in range(8)])
    return made


@pytest.mark.parametrize("name", SETTINGS)
class TestStrategy:
    def test_each_strategy_implements_sample_strategy(self, world, name):
        assert isinstance(world(name), SampleStrategy)

    def test_the_fields_of_a_batch_have_equal_lengths(self, world, name):
        batch = world(name).sample(1, generation=1)
        lengths = {len(field) for field in (batch.experiences, batch.groups, batch.weights, batch.origins)}
        assert len(lengths) == 1
        assert batch.experiences or batch.examples

    def test_the_state_is_plain_json_and_resumes_exactly(self, world, name):
        first = world(name)
        first.sample(1, generation=1)
        state = json.loads(json.dumps(first.state_dict()))
        again = world(name)
        again.load_state_dict(state)
        assert again.sample(2, generation=1) == first.sample(2, generation=1)

    def test_equal_states_and_files_give_equal_samples(self, world, name):
        assert world(name).sample(1, generation=1) == world(name).sample(1, generation=1)

    def test_commit_returns_the_number_of_released_batches_and_keeps_needed_ones(self, world, name):
        strategy = world(name)
        strategy.sample(1, generation=1)
        state = strategy.state_dict()
        released = strategy.commit(state)
        assert isinstance(released, int)
        assert released >= 0
        again = world(name)
        again.load_state_dict(state)
        assert again.sample(2, generation=1) == strategy.sample(2, generation=1)

    def test_metrics_are_numbers_by_name(self, world, name):
        strategy = world(name)
        strategy.sample(1, generation=1)
        assert all(isinstance(value, float) for value in strategy.metrics().values())

    def test_a_strategy_is_not_over_before_its_samples_are_used(self, world, name):
        assert world(name).over == ""

    def test_a_state_of_another_strategy_is_refused(self, world, name):
        with pytest.raises((CorruptDataError, KeyError)):
            world(name).load_state_dict({"kind": "another"})


def file_of(tmp_path, name):
    return write_job(tmp_path / "file.toml", job_of(data={"strategy": name}))


def test_a_job_file_may_name_a_strategy_of_another_package(tmp_path):
    assert load_config(file_of(tmp_path, "own-newest")).data.strategy == "own-newest"


def test_an_unknown_strategy_is_refused_with_the_closest_name(tmp_path):
    with pytest.raises(ConfigError, match="own-newst") as caught:
        load_config(file_of(tmp_path, "own-newst"))
    assert "own-newest" in caught.value.hint


def test_an_entry_point_that_makes_no_strategy_is_refused(tmp_path):
    config = load_config(file_of(tmp_path, "own-wrong"))
    with pytest.raises(ConfigError, match="makes no SampleStrategy"):
        make_strategy(config, Job.at(tmp_path))


def test_plugins_are_loaded_and_named_by_group():
    found = load_plugins()
    assert found["trainer.sample_strategies"] == ("own-newest", "own-wrong")
    assert found["trainer.losses"] == ("own-reinforce",)
    assert set(SAMPLE_STRATEGY.installed) >= {"fifo", "replay", "mix", "sft", "own-newest"}


def test_a_broken_plugin_is_named_in_the_error(tmp_path, monkeypatch):
    place = tmp_path / "broken-1.0.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (place / "entry_points.txt").write_text("[trainer.losses]\nbroken = no_such_module:loss\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="policy loss broken needs the package no_such_module"):
        load_plugins()
