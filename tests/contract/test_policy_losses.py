"""One contract for all policy losses: those of verl that the trainer offers, and one of another package."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

torch = pytest.importorskip("torch", reason="the trainer needs torch")
pytest.importorskip("verl", reason="losses are verl's")

from support.verl_release import USABLE_LOSSES  # noqa: E402

from trainer.config.algorithms import find_loss, loss_names, with_published  # noqa: E402
from trainer.config.load import load_config  # noqa: E402
from trainer.config.model import AlgorithmSection, JobConfig  # noqa: E402

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
    config = JobConfig.model_validate(
        {"job": {"dir": "j"}, "model": {"path": "m"}, "algorithm": algorithm.model_dump(exclude_none=True)}
    )
    losses.register_own_loss(name)
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


def test_a_job_file_may_name_a_loss_of_another_package(tmp_path):
    path = tmp_path / "file.toml"
    path.write_text(f'[job]\ndir = "j"\n[model]\npath = "m"\n[algorithm]\nloss = "{OWN}"\n')
    config = load_config(str(path))
    assert config.algorithm.loss == OWN
    assert config.algorithm.clip_ratio == 0.2
    assert find_loss(OWN) is not None
    assert find_loss("no-loss") is None
    assert OWN in loss_names()
