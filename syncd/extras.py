"""Which extra of the package installs a missing module."""

from collections.abc import Mapping

from syncd.errors import ConfigError

EXTRAS: Mapping[str, str] = {
    "trainer": "numpy pyarrow pydantic ray safetensors tensordict tomli_w torch transformers verl yaml",
    "explorer": "pyarrow pydantic tokenizers",
    "transformers": "numpy safetensors torch transformers",
    "plot": "matplotlib",
    "metrics": "prometheus_client",
    "experience": "pyarrow",
    "delta": "numpy pyarrow",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
}
"""Each extra with the modules that it installs; if several install a module, the first one is named."""

_OF_PROGRAM: Mapping[str, tuple[str, ...]] = {
    "trainer": ("trainer",),
    "explorer": ("explorer", "transformers"),
    "syncd": ("delta", "explorer", "transformers", "metrics"),
}
"""The extras of a program's own verbs, which are named before others."""


def extra_of(module: str, program: str) -> str | None:
    """Return the extra that installs a module, None if none does; a program's own extras come first."""
    root = module.partition(".")[0]
    order = (*_OF_PROGRAM.get(program, ()), *EXTRAS)
    return next((extra for extra in order if root in EXTRAS[extra].split()), None)


def not_installed(error: ModuleNotFoundError, program: str) -> ConfigError | None:
    """Return the error for a missing module, None if no extra of the package installs it."""
    name = error.name or ""
    extra = extra_of(name, program)
    if extra is None:
        return None
    return ConfigError(f"{name.partition('.')[0]} is not installed", hint=f"pip install 'syncd[{extra}]'")
