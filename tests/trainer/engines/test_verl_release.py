"""Which releases of verl run, and what is said to those who have another."""

from importlib import metadata

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")

from support import samples  # noqa: E402

from syncd.errors import ConfigError  # noqa: E402
from trainer.engines.verl import release  # noqa: E402


@pytest.fixture
def installed(monkeypatch):
    """Return a function that installs a release of verl, for all who ask by the packages' records."""

    def install(whole):
        monkeypatch.setattr(release, "version", {"verl": whole}.__getitem__)

    return install


@pytest.mark.parametrize(("whole", "expected"), [("0.8.0", "0.8"), ("0.9.0", "0.9"), ("0.9.1.post2", "0.9")])
def test_supported_releases_are_known_by_their_first_two_numbers(installed, whole, expected):
    installed(whole)
    assert release.installed_release() == expected


@pytest.mark.parametrize("whole", ["0.7.0", "0.7.1", "0.10.0", "0.10.0.dev0", "1.0", "0.90"])
def test_other_releases_are_refused_naming_those_that_run(installed, whole):
    installed(whole)
    with pytest.raises(ConfigError, match=r"0\.8\.x and 0\.9\.x") as caught:
        list(release.release_problems(samples.configured("m")))
    assert whole in str(caught.value)
    legacy = 'engine.name = "verl_legacy"'
    assert caught.value.hint == (legacy if whole == "0.7.1" else "pip install 'verl>=0.8,<0.10'")


def test_without_verl_its_package_is_missing(monkeypatch):
    def none(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(release, "version", none)
    with pytest.raises(ModuleNotFoundError) as caught:
        release.installed_release()
    assert caught.value.name == "verl"


REFUSED = {
    "algorithm.loss": {"algorithm": {"loss": "dro", "options": {"policy_loss": {"dro_beta": 0.1}}}},
    "algorithm.loss_agg_mode": {"algorithm": {"loss_agg_mode": "token-sum"}},
    "engine.options.use_no_sync_for_gradient_accumulation": {
        "engine": {"options": {"use_no_sync_for_gradient_accumulation": False}}
    },
    "critic.enabled": {"algorithm": {"name": "ppo"}, "critic": {"enabled": True}},
    "model.lora.rank": {"model": {"lora": {"rank": 4}}},
    "engine.offload_params": {"engine": {"strategy": "fsdp", "offload_params": True}},
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_only_the_newer_release_has_is_refused_on_the_older_one(installed, key):
    config = samples.configured("m", **REFUSED[key])
    installed("0.9.1")
    assert list(release.release_problems(config)) == []
    installed("0.8.0")
    (problem,) = release.release_problems(config)
    assert problem.key == key
    assert problem.text.startswith("verl 0.8 has no ")
    assert "0.9.1" in problem.hint


def test_gspo_on_the_older_release_takes_the_aggregation_of_its_publication_only(installed):
    installed("0.8.0")
    for mode, count in (("", 0), ("seq-mean-token-mean", 0), ("token-mean", 1)):
        section = {"name": "gspo"} | ({"loss_agg_mode": mode} if mode else {})
        assert len(list(release.release_problems(samples.configured("m", algorithm=section)))) == count, mode


def test_on_a_gpu_the_older_release_does_not_compute_on_processors(installed, monkeypatch):
    installed("0.8.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="takes the GPU that it sees") as caught:
        release.set_processors(torch.cpu, {"current_device": str})
    assert "CUDA_VISIBLE_DEVICES=" in caught.value.hint
