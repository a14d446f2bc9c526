"""Applies a table to the values of one configuration: what becomes of each key, and why."""

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from syncd.jobfile.loader import COMMAND_LINE
from trainer.parts.importing.configuration import CannotMapError, Configuration, Unresolved
from trainer.parts.importing.evaluate import convert
from trainer.parts.importing.table import Row, Table

_FEW = 3
"""Keys that a line names."""


@dataclass(frozen=True, slots=True)
class Entry:
    value: Any  # as TOML has it
    origin: str  # their keys, or the command line
    is_given: bool = True  # whether the user gave one of them, not the other program's default


@dataclass(frozen=True, slots=True)
class Refusal:
    """A key that stops the import."""

    key: str
    why: str  # why it cannot be mapped
    instead: str


@dataclass(slots=True)
class Outcome:
    entries: dict[str, Entry] = field(default_factory=dict)  # ours, by their dotted names
    unneeded: dict[str, str] = field(default_factory=dict)  # theirs that are not needed here, with the reason
    by_hand: dict[str, str] = field(default_factory=dict)  # theirs that are left to the user, with what to do
    refusals: list[Refusal] = field(default_factory=list)  # theirs that cannot be mapped

    def value(self, key: str) -> Any:
        entry = self.entries.get(key)
        return None if entry is None else entry.value


def apply(
    table: Table, values: Mapping[str, Any], ours: Mapping[str, Any], without: Collection[str] = ()
) -> Outcome:
    """Return what becomes of the values of one configuration.

    Args:
        values: What its file gives, by dotted keys.
        ours: Our keys that the user gives, by dotted names; they win, and stand for what cannot be mapped.
        without: Their keys, or tables of them, that are left out as if nobody had set them.
    """
    config = _configuration(table, values, ours, without)
    outcome = Outcome()
    owners = {key: next((row for row in table.rows if row.matches(key)), None) for key in config.all}
    for row in table.rows:
        keys = [
            key
            for key, owner in owners.items()
            if owner is row or (row.kind == "mapped" and row.matches(key))
        ]
        _apply_row(row, keys, config, outcome)
    unknown = [key for key, value in config.values.items() if owners[key] is None and value != {}]
    outcome.refusals = list(dict.fromkeys([*outcome.refusals, *_unknown(unknown, table, config)]))
    outcome.entries |= {key: Entry(value, COMMAND_LINE) for key, value in ours.items()}
    return outcome


def _configuration(
    table: Table, values: Mapping[str, Any], ours: Mapping[str, Any], without: Collection[str]
) -> Configuration:
    kept = {key: value for key, value in values.items() if value is not None and not is_below(key, without)}
    defaults = {key: value for key, value in table.defaults.items() if not is_below(key, without)}
    return Configuration(kept, defaults, ours, table.facts)


def is_below(key: str, tables: Collection[str]) -> bool:
    return any(key == table or key.startswith(f"{table}.") for table in tables)


def _apply_row(row: Row, keys: Sequence[str], config: Configuration, outcome: Outcome) -> None:
    own = [key for key in keys if key in config.values]
    if row.kind == "mapped" and keys:
        _map(row, keys, config, outcome)
    elif row.kind == "not_needed":
        outcome.unneeded |= dict.fromkeys(own, row.about)
    elif row.kind == "by_hand":
        outcome.by_hand |= dict.fromkeys(own, row.about)
    elif row.kind == "unsupported" and not any(is_below(key, row.ours) for key in config.chosen):
        outcome.refusals += [
            Refusal(key, row.about, row.instead or f"--without {key}")
            for key in keys
            if not is_off(config.all[key], row.off)
        ]


def is_off(value: Any, off: Sequence[Any]) -> bool:
    """Return whether a value is one of those that need no counterpart; true is not 1 here."""
    if isinstance(value, str) and value.lower() in ("true", "false", "none", "null"):
        value = {"true": True, "false": False}.get(value.lower())
    return value is None or any(
        value == listed and isinstance(value, bool) == isinstance(listed, bool) for listed in off
    )


def _map(row: Row, keys: Sequence[str], config: Configuration, outcome: Outcome) -> None:
    own = [key for key in keys if key in config.values]
    try:
        values = convert(row, config)
    except CannotMapError as error:
        instead = error.instead or _instead(row)
        if not _is_chosen(row, instead, config.chosen):
            outcome.refusals.append(Refusal(few(own or keys), error.why, instead))
        return
    for key, value in values.items():
        if value is not None:
            _enter(key, Entry(value, few(own or keys), bool(own)), outcome)


def _is_chosen(row: Row, instead: str, ours: Mapping[str, Any]) -> bool:
    """Return whether the user gives all that the row sets, or one that the message names."""
    named = {word.removeprefix("--").rstrip(",") for word in instead.split() if word.startswith("--")}
    return all(key in ours for key in row.ours) or any(key in ours for key in named)


def few(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _FEW} more" if len(keys) > _FEW else ""
    return ", ".join(keys[:_FEW]) + more


def _instead(row: Row) -> str:
    return " ".join(f"--{key} VALUE" for key in row.ours) or f"--without {row.theirs[0]}"


def _enter(key: str, entry: Entry, outcome: Outcome) -> None:
    """Enter one of our keys; what was given wins over a default, and two that were given must agree."""
    there = outcome.entries.get(key)
    if there is None or (entry.is_given and not there.is_given):
        outcome.entries[key] = entry
    elif entry.is_given and there.value != entry.value:
        why = f"differs from {there.origin}, and both set {key}"
        outcome.refusals.append(Refusal(entry.origin, why, f"--without {entry.origin}"))


def _unknown(keys: Iterable[str], table: Table, config: Configuration) -> Iterator[Refusal]:
    known = [key for row in table.rows for key in row.theirs if "*" not in key]
    for key in keys:
        near = difflib.get_close_matches(key, known, 1, 0.8)
        what = f"did you mean {near[0]}? else " if near else ""
        value = config.values[key]
        why = value.why if isinstance(value, Unresolved) else f"is no key of {table.title} that is known here"
        yield Refusal(key, why, f"{what}--without {key}")
