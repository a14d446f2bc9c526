"""verl as a training engine: no Ray, ranks from torchrun or `trainer train`."""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from pkgutil import resolve_name

from trainer.config.strategies import strategy_of
from trainer.engines.base import EngineContext, TrainEngineWrapper
from trainer.engines.verl.checks import check


def open_engine(context: EngineContext) -> TrainEngineWrapper:
    """Return verl's engine of this rank. verl is imported here: it asks for its platform while it is imported."""
    check(context.config, context.device.type, context.ranks.world_size)
    with quiet_import():
        if context.device.type == "cpu":
            from trainer.engines.verl import platform  # noqa: PLC0415 -- verl is imported here, not before

            platform.install()
        from trainer.engines.verl.engine import VerlEngine  # noqa: PLC0415 -- after the platform

        strategy = strategy_of(context.config)
        engine: type[VerlEngine] = VerlEngine if strategy is None else resolve_name(strategy.engine)
    return engine(context)


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Suppress verl's messages at import about engines that are not used, and its log below warnings."""
    os.environ.setdefault("VERL_LOGGING_LEVEL", "WARNING")  # each of its modules reads it when it is imported
    # What it warns of is for authors of models, and comes in each process.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* engine is not available", UserWarning)
        yield
