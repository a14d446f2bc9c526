"""Gives an optimizer that was loaded from a checkpoint the settings of this start."""

from typing import Any

from trainer.config.model import OptimizerSection


def adopt(optimizer: Any, section: OptimizerSection, scheduler: Any = None) -> None:
    """Set what the state of an optimizer brings along to what the job's file says: a person may have changed it.

    Where nothing has changed this sets every number to itself.

    Args:
        optimizer: AdamW of torch, its state loaded.
        section: The settings.
        scheduler: Its LambdaLR, its state loaded; None for a constant rate.
    """
    factors = [1.0] * len(optimizer.param_groups)
    if scheduler is not None:
        factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
        scheduler.base_lrs = [section.lr] * len(factors)
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        group["lr"] = section.lr * factor
        if scheduler is not None:
            group["initial_lr"] = section.lr
        group["weight_decay"], group["betas"] = section.weight_decay, tuple(section.betas)
    if scheduler is not None:
        scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]  # noqa: SLF001 - what get_last_lr returns
