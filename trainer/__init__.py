"""The trainer: consumes experiences, trains the model, and writes steps by the protocol.

The names that users of Trinity-RFT's trainer know can be imported from here; each is imported when it is used.
"""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.checkpoints import get_latest_hf_checkpoint_path as get_latest_hf_checkpoint_path
    from trainer.engines.base import TrainEngineWrapper as TrainEngineWrapper
    from trainer.loop import Trainer as Trainer
    from trainer.plugins import SAMPLE_STRATEGY as SAMPLE_STRATEGY
    from trainer.plugins import load_plugins as load_plugins
    from trainer.run import get_trainer_wrapper as get_trainer_wrapper

_NAMES = {
    "SAMPLE_STRATEGY": "trainer.plugins",
    "TrainEngineWrapper": "trainer.engines.base",
    "Trainer": "trainer.loop",
    "get_latest_hf_checkpoint_path": "trainer.checkpoints",
    "get_trainer_wrapper": "trainer.run",
    "load_plugins": "trainer.plugins",
}


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve_name(f"{_NAMES[name]}:{name}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
