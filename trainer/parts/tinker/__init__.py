"""A tinker server as a training engine: the model is there, and this process sends it batches."""

from syncd.errors import ConfigError
from syncd.jobfile.problems import error_of
from trainer.config.critic import critic_problems
from trainer.config.load import LOADER
from trainer.config.model_files import read_model_config
from trainer.config.schedule import optimizer_problems
from trainer.engines.base import EngineContext, TrainEngineWrapper
from trainer.parts.tinker.config import tinker_problems


def open_engine(context: EngineContext) -> TrainEngineWrapper:
    """Return the engine. The SDK and verl's estimators are imported here, not before."""
    config = context.config
    if problems := [*tinker_problems(config), *critic_problems(config), *optimizer_problems(config)]:
        raise error_of(problems, LOADER.hint)
    if context.ranks.world_size > 1:
        text = f"one process talks to a tinker server, and here are {context.ranks.world_size} ranks"
        raise ConfigError(text, hint="trainer.nproc = 1")
    read_model_config(config.model.path)
    from trainer.parts.tinker.engine import TinkerEngine  # noqa: PLC0415 - it imports verl's estimators

    return TinkerEngine(context)
