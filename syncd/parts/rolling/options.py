"""The table `[daemon.rolling]` and the options of `syncd watch` that replace it; read by every program, so light."""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from syncd.errors import ConfigError
from syncd.parts.rolling.admit import Policy
from syncd.protocol.rolling import UNITS

if TYPE_CHECKING:
    import click

    from syncd.daemon.leader import DaemonLeader
    from syncd.daemon.parts import DaemonPart
    from syncd.daemon.report import EventReporter
    from syncd.protocol.disk import Clock
    from syncd.protocol.layout import Job

BROADCASTS = ("nccl", "auto")  # under these a `sync.method` may send weights to all explorers together

_COUNT = re.compile(r"\d{1,7}", re.ASCII)
_SHARE = re.compile(r"(\d{1,3})%", re.ASCII)
_PERCENT, _MOST, _MOST_SECONDS = 100, 1 << 20, 1e9
_SLOTS = 'a number of units, or a share of them such as "25%"'
_ABOUT: Mapping[str, tuple[str, str, str]] = {
    "max_paused": ("UNITS", "1", "units that may pause for a load at once: a number, or a share of all"),
    "canaries": ("N", "1", "engines that must run a version before others get it; 0: none"),
    "wrong": ("N", "1", "engines that must give a version up, as after a failed proof, for it to be stopped"),
    "patience": ("S", "600", "seconds after which a load that has not ended no longer holds up the others"),
    "unit": ("", "engine", "what pauses together: each engine, or all engines of a host"),
    "rollback_paused": ("UNITS", "as max_paused", "units that may pause at once for `syncd rollback`"),
}
"""By key: the name of its value, its default, its meaning."""


class RollingPart:
    """What the daemon's seam asks of this part."""

    table: ClassVar[str] = "rolling"

    def read(self, table: Mapping[str, Any], where: str, document: Mapping[str, Any]) -> Policy:
        """Return the policy of a table.

        Args:
            where: Where it was given, for errors.
            document: The whole file, as far as it is known.
        """
        sync = document.get("sync")
        method = sync.get("method") if isinstance(sync, Mapping) else None
        if str(method).lower() in BROADCASTS:
            raise ConfigError(
                f'[daemon.rolling] has no effect on a broadcast, which sync.method = "{method}" may send: it reaches '
                "all engines at once",
                path=where,
                hint='sync.method = "checkpoint", or remove [daemon.rolling]',
            )
        values = {name: _checked(name, value, where) for name, value in table.items()}
        return Policy(**values)

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the table."""
        keys = {name: {**_takes(name), "description": _ABOUT[name][2]} for name in _ABOUT}
        return {
            "type": "object",
            "description": "Roll versions out: canaries first, then the others, a few at a time.",
            "properties": keys,
            "additionalProperties": False,
        }

    def options(self) -> Iterator[Callable[[Any], Any]]:
        """Yield decorators that add the options of `syncd watch` for the keys of the table."""
        import click  # noqa: PLC0415 - programs that only read the table need none

        for name, (metavar, default, text) in _ABOUT.items():
            kind = {"canaries": int, "wrong": int, "patience": float, "unit": click.Choice(UNITS)}.get(name)
            yield click.option(
                f"--{self.table}-{name.replace('_', '-')}",
                f"{self.table}__{name}",
                type=kind,
                metavar=metavar or None,
                default=None,
                show_default=default,
                callback=_in_range(name),
                help=f"With rolling updates: {text}.",
            )

    def open(
        self, job: "Job", clock: "Clock", leader: "DaemonLeader", reporter: "EventReporter"
    ) -> "DaemonPart":
        """Return what writes the wave of a job."""
        from syncd.parts.rolling.daemon import Rolling  # noqa: PLC0415 - only the daemon needs it

        return Rolling(job, clock, leader, reporter)


def _in_range(name: str) -> Any:
    def check(_: "click.Context", __: "click.Parameter", value: Any) -> Any:
        import click  # noqa: PLC0415

        try:
            if value is not None:
                _checked(name, value, "the command line")
        except ConfigError as error:
            raise click.BadParameter(error.message) from error
        return value

    return check


def _takes(name: str) -> dict[str, Any]:
    default = getattr(Policy(), name)
    if name == "unit":
        return {"type": "string", "enum": list(UNITS), "default": default}
    if name == "patience":
        return {"type": "number", "exclusiveMinimum": 0, "default": default}
    if name in ("canaries", "wrong"):
        return {"type": "integer", "minimum": 0 if name == "canaries" else 1, "default": default}
    slots = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": "^[0-9]{1,3}%$"}]}
    return slots if default is None else {**slots, "default": default}


def _checked(name: str, value: Any, where: str) -> Any:
    if name not in _ABOUT:
        near = difflib.get_close_matches(name, _ABOUT, 1)
        raise ConfigError(
            f"unknown key {name!r} in [daemon.rolling]",
            path=where,
            hint=f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(_ABOUT)}",
        )
    if name in ("max_paused", "rollback_paused"):
        return _slots(name, value, where)
    if name == "unit":
        return _require(name, value, where, f"one of {', '.join(UNITS)}", is_good=value in UNITS)
    if name == "patience":
        is_number = type(value) in (int, float) and 0 < value <= _MOST_SECONDS
        return float(_require(name, value, where, "a number above 0", is_good=is_number))
    least = 0 if name == "canaries" else 1
    is_count = type(value) is int and least <= value <= _MOST
    return _require(name, value, where, f"an integer of at least {least}", is_good=is_count)


def _slots(name: str, value: Any, where: str) -> int | float:
    """Return a number of units, or a share as a fraction."""
    share = _SHARE.fullmatch(value) if isinstance(value, str) else None
    if share is not None and 0 < int(share[1]) <= _PERCENT:
        return int(share[1]) / _PERCENT
    number = int(value) if isinstance(value, str) and _COUNT.fullmatch(value) else value
    is_number = type(number) is int and 1 <= number <= _MOST
    slots: int = _require(name, number, where, _SLOTS, is_good=is_number)
    return slots


def _require(name: str, value: Any, where: str, expected: str, *, is_good: bool) -> Any:
    if not is_good:
        raise ConfigError(f"rolling.{name} = {value!r:.80} is not {expected}", path=where)
    return value


PART = RollingPart()
