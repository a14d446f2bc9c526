"""One contract for all policy losses: those of verl that the trainer offers, and one of another package."""

from pathlib import Path

import pytest
from support.job_file import job_of, write_job
from support.needed import need

pytestmark = pytest.mark.slow

torch = pytest.importorskip("torch", reason="the trainer needs torch")
need("verl", "losses are verl's")

from support.verl_release import USABLE_LOSSES  # noqa: E402

from syncd.errors import ConfigError  # noqa: E402
from syncd.jobfile.model import JobFile  # noqa: E402
from syncd.jobfile.trainer_sections import AlgorithmSection  # noqa: E402
from trainer.config.algorithms import find_loss, loss_names, with_published  # noqa: E402
from trainer.config.load import load_config  # noqa: E402

INSTALLED = Path(__file__).parent / "installed"
OWN = "own-reinforce"


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Have the other package installed."""
    monkeypatch.syspath_prepend(str(INSTALLED))


@pytest.fixture(scope="module")
def verl():
    """Return verl's losses; its import warns of engines that are not used."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trainer.engines.verl import platform

        platform.install()
        from verl.trainer.ppo import core_algos

        from trainer.engines.verl import losses, settings
    return losses, settings, core_algos


def algorithm_of(loss):
    options = {"policy_loss": {"dro_beta": 0.1}} if loss == "dro" else {}
    return with_published(AlgorithmSection(advantage="grpo", loss=loss, options=options))


@pytest.mark.parametrize("name", [*USABLE_LOSSES, OWN])
def test_a_loss_is_a_finite_scalar_with_a_gradient_and_figures(verl, name):
    losses, settings, core_algos = verl
    algorithm = algorithm_of(name)
    config = JobFile.model_validate(
        {"job": {"dir": "j"}, "model": {"path": "m"}, "algorithm": algorithm.model_dump(exclude_none=True)}
    )
    losses.register_own_loss(name, {})
    actor = settings.actor_config(config, algorithm, 4)
    generator = torch.Generator().manual_seed(3)
    old = -torch.rand(3, 5, generator=generator) - 0.1
    now = (old + 1e-5 * torch.randn(3, 5, generator=generator)).requires_grad_()
    mask = torch.ones(3, 5)
    mask[1, 3:] = 0
    advantages = torch.tensor([[1.0], [-1.0], [0.5]]) * mask
    actor.global_batch_info.update(dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=3)
    loss, figures = core_algos.get_policy_loss_fn(name)(
        old, now, advantages, mask, actor.loss_agg_mode, actor, None
    )
    loss.backward()
    assert loss.ndim == 0
    assert torch.isfinite(loss)
    assert torch.isfinite(now.grad).all()
    assert now.grad.abs().sum() > 0
    assert isinstance(figures, dict)


def test_a_loss_of_another_package_is_called_with_its_own_options(verl):
    losses, _, core_algos = verl
    now, ones = torch.full((1, 2), -1.0), torch.ones(1, 2)
    values = []
    for options in ({}, {"scale": 3.0}):
        losses.register_own_loss(OWN, options)
        found, _ = core_algos.get_policy_loss_fn(OWN)(
            old_log_prob=now, log_prob=now, advantages=ones, response_mask=ones,
            loss_agg_mode="token-mean", config=None, rollout_is_weights=None,
        )  # fmt: skip
        values.append(float(found))
    assert values == [1.0, 3.0]
    with pytest.raises(ConfigError, match="scail") as refused:
        losses.register_own_loss(OWN, {"scail": 3.0})
    assert "algorithm.loss_options" in refused.value.hint
    with pytest.raises(ConfigError, match="advantages"):
        losses.register_own_loss(OWN, {"advantages": 1})


def test_a_job_file_may_name_a_loss_of_another_package(tmp_path):
    job = job_of(algorithm={"loss": OWN, "loss_options": {"scale": 2}})
    config = load_config(write_job(tmp_path / "file.toml", job))
    assert config.algorithm.loss == OWN
    assert config.algorithm.loss_options == {"scale": 2}
    assert config.algorithm.clip_ratio == 0.2
    assert find_loss(OWN) is not None
    assert find_loss("no-loss") is None
    assert OWN in loss_names()
