"""What other packages add to the trainer, by entry point: engines, monitors, sample strategies and policy losses.

    [project.entry-points."trainer.sample_strategies"]
    newest-first = "mypackage.sampling:newest_first"

The name is what the job's file says (`data.strategy = "newest-first"`). What each group's objects take and return:
docs/training-engines.md, docs/algorithms.md and docs/experience.md. An entry point is imported when it is used, or by
`load_plugins`.
"""

from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint
from typing import Any

from syncd.errors import ConfigError
from syncd.extras import install_command
from syncd.jobfile.problems import nearest_name
from syncd.registered import registered

_OURS = "trainer."


class Registry:
    """The objects of one entry point group, by name.

    Args:
        noun: What one of them is called in errors.
        key: The key of the job's file that names one.
    """

    def __init__(self, group: str, noun: str, key: str) -> None:
        self.group, self.noun, self.key = group, noun, key

    @property
    def installed(self) -> Mapping[str, EntryPoint]:
        """Return the entry points of all installed packages by name."""
        return registered(self.group)

    def get(self, name: str) -> Any:
        """Import and return the object of a name.

        Raises:
            ConfigError: There is none, a package that it needs is missing, or its import fails.
        """
        points = self.installed
        if name not in points:
            raise unknown_name(f"no {self.noun} is called {name!r}", name, points)
        try:
            return points[name].load()
        except ModuleNotFoundError as error:
            ours = points[name].value.startswith(_OURS)
            hint = install_command(name) if ours else f"install {error.name}"
            message = f"{self.noun} {name} needs the package {error.name}, which is not installed"
            raise ConfigError(message, hint=hint) from error
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{self.noun} {name} cannot be loaded: {reason}", hint=self.key) from error


MONITORS = Registry("trainer.monitors", "monitor", "monitor.kinds")
SAMPLE_STRATEGY = Registry("trainer.sample_strategies", "sample strategy", "data.strategy")
POLICY_LOSSES = Registry("trainer.losses", "policy loss", "algorithm.loss")
ENGINES = Registry("trainer.engines", "engine", "engine.name")
REGISTRIES = (ENGINES, MONITORS, SAMPLE_STRATEGY, POLICY_LOSSES)


def load_plugins(registries: Iterable[Registry] = REGISTRIES) -> dict[str, tuple[str, ...]]:
    """Import what other packages registered, so that a broken plugin is found before a run; return names by group.

    Raises:
        ConfigError: A plugin cannot be loaded.
    """
    names: dict[str, tuple[str, ...]] = {}
    for registry in registries:
        others = [name for name, point in registry.installed.items() if not point.value.startswith(_OURS)]
        for name in others:
            registry.get(name)
        names[registry.group] = tuple(sorted(others))
    return names


def unknown_name(message: str, name: str, installed: Iterable[str]) -> ConfigError:
    """Return the error for a name that is not known, with the nearest name and all others."""
    names = sorted(installed)
    near = nearest_name(name, names)
    choices = f"there are {', '.join(names)}" if names else "there are none"
    return ConfigError(message, hint=f"did you mean {near!r}? {choices}" if near else choices)
