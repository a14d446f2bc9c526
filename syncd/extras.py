"""Which extra of the package brings a module that is not installed."""

from collections.abc import Mapping

from syncd.errors import ConfigError

EXTRAS: Mapping[str, frozenset[str]] = {
    "trainer": frozenset(
        {
            "numpy",
            "pyarrow",
            "pydantic",
            "ray",
            "safetensors",
            "tensordict",
            "tomli_w",
            "torch",
            "transformers",
            "verl",
        }
    ),
    "explorer": frozenset({"pyarrow", "pydantic", "tokenizers"}),
    "transformers": frozenset({"numpy", "safetensors", "torch", "transformers"}),
    "plot": frozenset({"matplotlib"}),
    "metrics": frozenset({"prometheus_client"}),
    "experience": frozenset({"pyarrow"}),
    "tensorboard": frozenset({"tensorboard"}),
    "wandb": frozenset({"wandb"}),
    "mlflow": frozenset({"mlflow"}),
    "trackio": frozenset({"trackio"}),
}
"""Each extra with the modules that it brings; of several that bring a module, the first here is named."""

_OF_PROGRAM: Mapping[str, tuple[str, ...]] = {
    "trainer": ("trainer",),
    "explorer": ("explorer", "transformers"),
    "syncd": ("explorer", "transformers", "metrics"),
}
"""The extras that a program's own verbs need: these are named before others."""


def extra_of(module: str, program: str) -> str | None:
    """Return the extra that brings a module, None where none does; a program's own extras come first."""
    root = module.partition(".")[0]
    order = (*_OF_PROGRAM.get(program, ()), *EXTRAS)
    return next((extra for extra in order if root in EXTRAS[extra]), None)


def not_installed(error: ModuleNotFoundError, program: str) -> ConfigError | None:
    """Return what to say of a module that is missing, None where no extra of the package brings it."""
    name = error.name or ""
    extra = extra_of(name, program)
    if extra is None:
        return None
    return ConfigError(f"{name.partition('.')[0]} is not installed", hint=f"pip install 'syncd[{extra}]'")
