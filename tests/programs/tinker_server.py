"""A tinker server on the processor: SkyRL's, with its JAX engine. Runs in an environment of its own.

SkyRL starts its engine by `uv run`, and has typed dictionaries that pydantic refuses before Python 3.12. Both are
replaced here, in this process and in the engine's.

    tinker_server.py PORT DIRECTORY MODEL RANK
"""

import sys
import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict

_ENGINE = """
import sys
sys.argv[0] = "engine"
import typing, typing_extensions
typing.TypedDict = typing_extensions.TypedDict
from skyrl.tinker.engine import main
main()
"""


def main():
    import uvicorn
    from skyrl.tinker import api
    from skyrl.tinker.config import EngineConfig, config_to_argv

    port, directory, model, rank = sys.argv[1:]
    api._build_uv_run_cmd_engine = lambda _, config: [sys.executable, "-c", _ENGINE, *config_to_argv(config)]
    api.app.state.engine_config = EngineConfig(
        base_model=model,
        backend_config={"max_lora_adapters": 16, "max_lora_rank": int(rank)},
        checkpoints_base=f"{directory}/kept",
        database_url=f"sqlite:///{directory}/tinker.db",
    )
    uvicorn.run(api.app, host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main()
