"""An optimizer that was loaded from a checkpoint has the settings of this start; unchanged ones stay bit for bit."""

import pytest

pytest.importorskip("torch", reason="the trainer needs torch")

import torch

from syncd.jobfile.trainer_sections import OptimizerSection
from trainer.engines.verl.state import apply_settings

pytestmark = pytest.mark.group("engines")


def made(section):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], section.lr, section.betas, weight_decay=section.weight_decay)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 7))


def stepped(optimizer, scheduler, steps):
    rates = []
    for _ in range(steps):
        optimizer.param_groups[0]["params"][0].grad = torch.full((3,), 0.3)
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return rates


def resumed(before, after):
    """Return optimizer and schedule of `after` with a state that `before` has saved after three updates."""
    optimizer, scheduler = made(before)
    stepped(optimizer, scheduler, 3)
    state = optimizer.state_dict(), scheduler.state_dict()
    again, schedule = made(after)
    again.load_state_dict(state[0])
    schedule.load_state_dict(state[1])
    apply_settings(again, after, schedule)
    return (optimizer, scheduler), (again, schedule)


def test_unchanged_optimizer_settings_resume_bit_for_bit():
    section = OptimizerSection(lr=3.7e-5, weight_decay=0.01)
    old, new = resumed(section, section)
    assert new[0].param_groups[0]["lr"] == old[0].param_groups[0]["lr"]
    assert stepped(*new, 6) == stepped(*old, 6)


def test_a_changed_learning_rate_continues_along_the_schedule():
    _, new = resumed(OptimizerSection(lr=0.07), OptimizerSection(lr=0.7))
    assert new[0].param_groups[0]["lr"] == pytest.approx(0.7 * 4 / 7)
    assert new[1].get_last_lr() == [new[0].param_groups[0]["lr"]]
    assert stepped(*new, 4) == pytest.approx([0.5, 0.6, 0.7, 0.7])
