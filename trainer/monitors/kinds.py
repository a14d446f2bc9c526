"""Which monitors there are: entry points, and errors for those that are not."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from syncd.errors import ConfigError
from trainer.monitors.base import GROUP, Monitor, Run

Make = Callable[[Run], Monitor]

_OURS = "trainer.monitors."


def installed() -> dict[str, EntryPoint]:
    """Return the registered kinds by name."""
    return {point.name: point for point in entry_points(group=GROUP)}


def find(kind: str) -> Make:
    """Return what makes a monitor of a kind.

    Raises:
        ConfigError: There is no such kind, or the package that it needs is not there.
    """
    points = installed()
    if kind not in points:
        raise unknown(f"no monitor is called {kind!r}", kind, points)
    try:
        return cast("Make", points[kind].load())
    except ModuleNotFoundError as error:
        raise _missing(points[kind], error) from error
    except Exception as error:
        raise ConfigError(f"monitor {kind} cannot be loaded: {type(error).__name__}: {error}") from error


def check_options(options: Mapping[str, Any], known: Mapping[str, type], kind: str) -> None:
    """Check what the configuration has for a kind.

    Raises:
        ConfigError: An option is not known, or of another type.
    """
    for name, value in options.items():
        if name not in known:
            raise unknown(f"monitor.options.{kind} has no {name!r}", name, known)
        if type(value) is not known[name]:
            raise ConfigError(f"monitor.options.{kind}.{name} = {value!r} is not a {known[name].__name__}")


def unknown(message: str, name: str, known: Mapping[str, Any]) -> ConfigError:
    """Return the error of a name that is not known: with those that are, and the nearest."""
    near = get_close_matches(name, known, 1)
    there = f"there are {', '.join(sorted(known))}" if known else "there are none"
    return ConfigError(message, hint=f"did you mean {near[0]!r}? {there}" if near else there)


def _missing(point: EntryPoint, error: ModuleNotFoundError) -> ConfigError:
    ours = point.value.startswith(_OURS)
    hint = f"pip install 'syncd[{point.name}]'" if ours else f"install {error.name}"
    return ConfigError(
        f"monitor {point.name} needs the package {error.name}, which is not installed", hint=hint
    )
