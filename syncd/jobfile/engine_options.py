"""The table [engine.options]: the engine that the file names registers what it takes, and every reader checks it.

An engine registers a `Section` under `syncd.engine_options`, by its name, in a module that needs pydantic alone.
Those of an engine that registers none are free here: `trainer.config.options` compares verl's with verl itself.
"""

from functools import cache

from pydantic import BaseModel, ConfigDict, create_model

from syncd.jobfile.keys import Keys
from syncd.registered import registered

ENGINE_OPTIONS = "syncd.engine_options"  # the group of entry points, by the value of `engine.name`


class _OtherKeysIgnored(BaseModel):
    model_config = ConfigDict(extra="ignore")


@cache
def options_keys(engine: str) -> Keys | None:
    """Return the keys `engine.options.*` of an engine, None if it registers none."""
    point = registered(ENGINE_OPTIONS).get(engine)
    if point is None:
        return None
    table = create_model("EngineTable", __base__=_OtherKeysIgnored, options=(point.load(), ...))
    return Keys(create_model("EngineFile", __base__=_OtherKeysIgnored, engine=(table, ...)))
