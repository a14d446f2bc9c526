"""verl 0.7.1's worker as a training engine: no Ray, ranks from torchrun or `trainer train`."""

import warnings

from trainer.engines.base import EngineContext, TrainEngineWrapper
from trainer.engines.verl import quiet_import
from trainer.parts.verl_legacy.checks import check


def open_engine(context: EngineContext) -> TrainEngineWrapper:
    """Return the engine of this rank. verl is imported here: it asks for its device while it is imported."""
    check(context.config)
    with quiet_import():
        if context.device.type == "cpu":
            from trainer.engines.verl import platform  # noqa: PLC0415 -- before verl

            platform.before_platforms()
        from trainer.parts.verl_legacy.engine import LegacyVerlEngine  # noqa: PLC0415 -- after the platform
    # In float32 the worker asks for it in each pass, and torch says each time that it is off.
    warnings.filterwarnings("ignore", "In CPU autocast, but the target dtype", UserWarning)
    return LegacyVerlEngine(context)
