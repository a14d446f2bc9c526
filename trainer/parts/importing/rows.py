"""What a table of another project's keys is made of: rows, and the values that their converters read.

A row belongs to one of four kinds: its keys become keys of ours, are not needed here, are left to the user, or cannot
be mapped. The last kind stops an import unless the value is one that turns the feature off.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

Kind = Literal["mapped", "not needed", "by hand", "unsupported"]


class CannotMapError(Exception):
    """A value has no counterpart here.

    Args:
        why: The reason, in a sentence without a subject and a full stop.
        instead: What to do, best a command's option; empty where the row says it.
    """

    def __init__(self, why: str, instead: str = "") -> None:
        super().__init__(why)
        self.why, self.instead = why, instead


@dataclass(frozen=True, slots=True)
class Unresolved:
    """A value that only the other program knows: `${...}` of something that the file does not have."""

    why: str


class Given:
    """The values of one configuration by their dotted keys, with the other program's defaults below them.

    Args:
        values: What the user gave, without what is null.
        defaults: Defaults of the other program.
        chosen: Our keys that the user gives beside the file.
    """

    def __init__(
        self, values: Mapping[str, Any], defaults: Mapping[str, Any], chosen: Mapping[str, Any]
    ) -> None:
        self.values, self.all, self.chosen = values, {**defaults, **values}, chosen

    def __contains__(self, key: str) -> bool:
        return self.all.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, the default if there is none."""
        value = self.all.get(key)
        if isinstance(value, Unresolved):
            raise CannotMapError(value.why, f"--set {key}=VALUE")
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number; text that is one counts."""
        return as_number(self.get(key, default))

    def whole(self, key: str, default: int | None = None) -> int:
        return as_whole(self.get(key, default))

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return true or false."""
        return as_flag(self.get(key, default))

    def text(self, key: str, default: str = "") -> str:
        return as_text(self.get(key, default))


Convert = Callable[[Given], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Row:
    """Some keys of another project."""

    kind: Kind  # what becomes of them
    theirs: tuple[str, ...]  # the keys; `*` stands for any text, also with dots
    ours: tuple[str, ...] = ()  # the keys that they set, or that stand for them where they cannot be mapped
    # How they are mapped, why they are not needed, what is left to do, or why they cannot be mapped.
    about: str = ""
    convert: Convert | None = None  # returns values by our keys
    off: tuple[Any, ...] = ()  # values that need no counterpart
    instead: str = ""  # what to do where they cannot be mapped

    def matches(self, key: str) -> bool:
        return any(key == one or ("*" in one and fnmatchcase(key, one)) for one in self.theirs)


@dataclass(frozen=True, slots=True)
class Table:
    """All known keys of one project."""

    name: str  # what `--from` calls it
    title: str  # what people call it
    read: str  # the release whose keys these are
    rows: tuple[Row, ...]  # the keys
    defaults: Mapping[str, Any]  # its defaults where a value changes what is trained and is not ours
    # Keys, or beginnings of keys with a dot at the end, by which its files are recognised.
    marks: tuple[str, ...]

    def is_marked(self, values: Mapping[str, Any]) -> bool:
        """Return whether values look like this project's."""
        return any(
            key == mark or (mark[-1] == "." and key.startswith(mark)) for key in values for mark in self.marks
        )


def same(value: Any) -> Any:
    return value


def mapped(theirs: str, ours: str, convert: Callable[[Any], Any] = same, about: str = "") -> Row:
    """Return the row of a key that becomes one of ours."""
    return Row("mapped", (theirs,), (ours,), about, lambda given: {ours: convert(given.get(theirs))})


def joint(theirs: tuple[str, ...], ours: tuple[str, ...], convert: Convert, about: str) -> Row:
    """Return the row of keys that become ours together."""
    return Row("mapped", theirs, ours, about, convert)


def unneeded(why: str, *theirs: str) -> Row:
    """Return the row of keys that change nothing here that is learnt."""
    return Row("not needed", theirs, about=why)


def by_hand(what: str, *theirs: str) -> Row:
    """Return the row of keys whose counterpart needs work: a data set in another format, a function."""
    return Row("by hand", theirs, about=what)


def unsupported(
    why: str, *theirs: str, off: tuple[Any, ...] = (), instead: str = "", ours: tuple[str, ...] = ()
) -> Row:
    """Return the row of keys that change what is learnt and have no counterpart."""
    return Row("unsupported", theirs, ours, why, off=off, instead=instead)


def as_number(value: Any) -> float:
    """Return a number, also one that is written as text, as YAML 1.1 reads `1e-6`."""
    with contextlib.suppress(ValueError, OverflowError):
        number = float(value) if isinstance(value, str) else value
        if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number):
            return number
    raise CannotMapError("is not a number")


def as_whole(value: Any) -> int:
    """Return a whole number."""
    number = as_number(value)
    if number != int(number):
        raise CannotMapError("is not a whole number")
    return int(number)


def as_flag(value: Any) -> bool:
    """Return true or false."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if isinstance(value, bool):
        return value
    raise CannotMapError("is neither true nor false")


def as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise CannotMapError("is not text")


def one_of(**known: Any) -> Callable[[Any], Any]:
    """Return a converter that knows these values, each with ours.

    Args:
        **known: Ours by theirs; `-` in theirs is written `_`.
    """

    def convert(value: Any) -> Any:
        name = as_text(value).lower().replace("-", "_")
        if name in known:
            return known[name]
        raise CannotMapError(f"has a value without a counterpart; known are {', '.join(known)}")

    return convert
