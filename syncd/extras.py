"""Which extra of the package installs a missing module, and with which command."""

import json
import shlex
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from syncd.errors import ConfigError

EXTRAS: Mapping[str, str] = {
    "trainer": "numpy pyarrow pydantic ray safetensors tensordict tomli_w torch transformers verl yaml",
    "explorer": "pyarrow pydantic tokenizers",
    "transformers": "numpy safetensors torch transformers",
    "plot": "matplotlib",
    "metrics": "prometheus_client",
    "experience": "pyarrow",
    "delta": "numpy pyarrow",
    "mirror": "obstore",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
}
"""Each extra with the modules that it installs; if several install a module, the first one is named."""

_OF_PROGRAM: Mapping[str, tuple[str, ...]] = {
    "trainer": ("trainer",),
    "explorer": ("explorer", "transformers"),
    "syncd": ("delta", "explorer", "transformers", "metrics", "mirror"),
}
"""The extras of a program's own verbs, which are named before others."""


def extra_of(module: str, program: str) -> str | None:
    """Return the extra that installs a module, None if none does; a program's own extras come first."""
    root = module.partition(".")[0]
    order = (*_OF_PROGRAM.get(program, ()), *EXTRAS)
    return next((extra for extra in order if root in EXTRAS[extra].split()), None)


def missing_packages(extra: str) -> list[str]:
    return [module for module in EXTRAS[extra].split() if find_spec(module) is None]


def install_command(extra: str) -> str:
    """Return the command that adds an extra to this installation, wherever it came from.

    pip records the origin of an installation that is not from an index in `direct_url.json` (PEP 610).
    """
    origin = _origin()
    url = str(origin.get("url", ""))
    if "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f"pip install {editable}{shlex.quote(f'{_path(url)}[{extra}]')}"
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"pip install {shlex.quote(f'syncd[{extra}] @ {url}' if url else f'syncd[{extra}]')}"


def upgrade_command() -> str:
    origin = _origin()
    url = str(origin.get("url", ""))
    if "dir_info" in origin:
        return f"git -C {shlex.quote(_path(url))} pull"
    source = f"syncd @ {origin['vcs_info']['vcs']}+{url}" if "vcs_info" in origin else "syncd"
    return f"pip install --upgrade {shlex.quote(source)}"


def _path(url: str) -> str:
    from urllib.parse import unquote, urlparse  # noqa: PLC0415 - the daemon starts without it

    return unquote(urlparse(url).path)


def _origin() -> dict[str, Any]:
    """Return what pip recorded of the installation's origin; empty for one from an index."""
    import importlib.metadata  # noqa: PLC0415 - the daemon starts without it

    try:
        text = importlib.metadata.distribution("syncd").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return {}
    return dict(json.loads(text)) if text else {}


def not_installed(error: ModuleNotFoundError, program: str) -> ConfigError | None:
    name = error.name or ""
    extra = extra_of(name, program)
    if extra is None:
        return None
    return ConfigError(f"{name.partition('.')[0]} is not installed", hint=install_command(extra))
