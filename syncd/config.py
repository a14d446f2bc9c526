"""The daemon's configuration: the `[daemon]` table of a TOML file, overridden by flags. Frozen once it is read."""

import dataclasses
import difflib
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from syncd.errors import ConfigError
from syncd.protocol.layout import read_config_file
from syncd.protocol.permissions import POLICIES, parse_config, policy_in
from syncd.registered import DAEMON_TABLES, registered

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(i?B)?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}

CHOICES: Mapping[str, tuple[str, ...]] = {
    "watch": ("auto", "events", "polling"),
    "verify": ("size", "header", "content"),
    "log_format": ("auto", "json", "console"),
    "permissions": POLICIES,
    "log_level": ("debug", "info", "warning", "error"),
}


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """Every setting of `syncd watch`. Times are seconds on the daemon's own clock.

    Args:
        keep_last: Newest sync steps to keep, at least 1.
        keep_every: Keep each sync step that is a multiple of this; 0 for none.
        keep_full: Newest full checkpoints to keep; 0 for all.
        keep_previous: Keep the version published before, even if it is a full checkpoint beyond `keep_full`.
        max_bytes: Byte budget of all steps together (`"500GiB"` or a number); 0 for none.
        partial_grace: How long a step that nobody will finish must not change before it is removed.
        prune: Whether anything is removed.
        prune_foreign: Allow pruning steps that other frameworks wrote.
        trash_grace: How long removed steps stay readable; longer than the mount's attribute cache.
        poll: Time between two scans where no events arrive; while a step is being written, it looks more often.
        reconcile: Time between two examinations of everything.
        ttl: Silence after which an explorer or trainer counts as dead.
        takeover: Silence after which a stand-by replaces the leading daemon.
        rewind_settle: How long a marker that names an earlier step must not change before it is followed.
        settle: How long a step of another framework without a marker must not change before it is published.
        verify: What is checked before publishing: sizes, headers too, or every byte.
        watch: How changes are noticed: by events of the file system or by polling; auto: by events where they arrive.
        exit_when_left: Stop when every explorer and trainer that was there has left.
        metrics_port: Port of the Prometheus endpoint; 0 for none.
        metrics_host: Address it binds to.
        metrics_textfile: File that the node exporter's textfile collector reads; empty for none.
        events_bytes: Size at which events.jsonl is rotated (`"8MiB"` or a number).
        permissions: Who may read and write what every program makes in the job.
        group: With permissions = "group": name or number of the group.
        log_format: How it logs; auto: JSON unless stderr is a terminal.
        log_level: The lowest level that is logged.
    """

    keep_last: int = 2
    keep_every: int = 0
    keep_full: int = 0
    keep_previous: bool = True
    max_bytes: int = 0
    partial_grace: float = 3600.0
    prune: bool = True
    prune_foreign: bool = False
    trash_grace: float = 75.0
    poll: float = 0.25
    reconcile: float = 60.0
    ttl: float = 60.0
    takeover: float = 15.0
    rewind_settle: float = 1.0
    settle: float = 2.0
    verify: str = "header"
    watch: str = "auto"
    exit_when_left: bool = False
    metrics_port: int = 0
    metrics_host: str = "127.0.0.1"
    metrics_textfile: str = ""
    events_bytes: int = 8 << 20
    permissions: str = "umask"
    group: str = ""
    log_format: str = "auto"
    log_level: str = "info"
    # What the tables of parts below [daemon] say, by the part's name: each as its part reads it.
    parts: Mapping[str, Any] = field(default_factory=dict)


class PartTable(Protocol):
    """The table of a part below `[daemon]`: what is registered under `DAEMON_TABLES` by its name."""

    def read(self, table: Mapping[str, Any], where: str, document: Mapping[str, Any]) -> Any:
        """Return what a table says, checked; `document` is the whole file, as far as it is known."""

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the table."""

    def options(self) -> Iterable[Callable[[Any], Any]]:
        """Return decorators that add to `syncd watch` an option `--NAME-KEY` for each key, named `NAME__KEY`."""


_FIELDS = {item.name: item for item in dataclasses.fields(DaemonConfig) if item.name != "parts"}
_SIZES = frozenset({"max_bytes", "events_bytes"})
_AT_LEAST = {
    "keep_last": 1,
    "poll": 0.005,
    "reconcile": 1.0,
    "takeover": 4.0,
    "ttl": 10.0,
    "events_bytes": 4096,
}
_MAX_PORT = 65535
_MOST = 1 << 53
_MOST_SECONDS = 1e9


REACHING = ("metrics_textfile", "metrics_host")
"""Keys that reach beyond the job: a file anywhere, an address that other hosts see."""


def table_schema() -> dict[str, Any]:
    """Return the JSON Schema of `[daemon]`: every key with what it takes, its default and its meaning."""
    about = dict(re.findall(r"^ {8}(\w+): (.+)$", DaemonConfig.__doc__ or "", re.MULTILINE))
    keys = {
        name: {**_takes(name), "default": field.default, "description": about[name]}
        for name, field in _FIELDS.items()
    }
    tables = {name: point.load().schema() for name, point in daemon_tables().items()}
    return {"type": "object", "properties": {**keys, **tables}, "additionalProperties": False}


def daemon_tables() -> Mapping[str, "EntryPoint"]:
    """Return the tables of parts below [daemon], by name; none is imported."""
    return registered(DAEMON_TABLES)


def _takes(name: str) -> dict[str, Any]:
    if name in CHOICES:
        return {"type": "string", "enum": list(CHOICES[name])}
    kind = {bool: "boolean", int: "integer", float: "number", str: "string"}[type(_FIELDS[name].default)]
    bounds = {"minimum": _AT_LEAST.get(name, 0)} if kind in ("integer", "number") else {}
    number = {"type": kind, **bounds}
    return {"anyOf": [number, {"type": "string"}]} if name in _SIZES else number


def load(
    path: str | None,
    overrides: Mapping[str, Any],
    *,
    trusted: bool = True,
    kept: bool = False,
    document: Mapping[str, Any] | None = None,
) -> DaemonConfig:
    """Return the configuration of a TOML file's `[daemon]` table with overrides on top.

    Args:
        path: The file, None for the defaults.
        overrides: Values by key; None means not given.
        trusted: Whether nobody but this user and root can have written the file.
        kept: Whether it is the job directory's own file, not one that the user has named: that one may be a pipe, and
            is read to its end however long that takes.
        document: The whole file, where no path is given and parts check their tables against others.
    """
    whole = _document(path, read_config_file if kept else _read) if path else document or {}
    table = _table(whole, path) if path else {}
    if not trusted:
        _refuse_reaching(table, path)
    options = {key: value for key, value in overrides.items() if value is not None}
    where = path or "the command line"
    merged = _merged(table, options)
    others = merged.keys() - _FIELDS.keys()
    parts = others & daemon_tables().keys() if others else set()
    values = {key: check_value(key, value, where) for key, value in merged.items() if key not in parts}
    read = {name: _read_part(name, merged[name], where, whole) for name in parts}
    return dataclasses.replace(DaemonConfig(), **values, parts=read)


def _merged(table: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with options on top, and so each table of a part in it."""
    of_parts = {
        key: {**part, **options[key]}
        for key, part in table.items()
        if isinstance(part, Mapping) and isinstance(options.get(key), Mapping)
    }
    return {**table, **options, **of_parts}


def _read_part(name: str, table: Any, where: str, document: Mapping[str, Any]) -> Any:
    if not isinstance(table, Mapping):
        raise ConfigError(f"[daemon.{name}] is not a table", path=where)
    part: PartTable = daemon_tables()[name].load()
    return part.read(table, where, document)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def check_value(key: str, value: Any, where: str = "the command line") -> Any:
    """Return a value as the configuration has it.

    Args:
        where: Where it was given, for the error.
    """
    if key not in _FIELDS:
        near = difflib.get_close_matches(key, _FIELDS, 1)
        raise ConfigError(
            f"unknown key {key!r} in [daemon]",
            path=where,
            hint=f"did you mean {near[0]!r}?" if near else None,
        )
    if key in _SIZES and isinstance(value, str):
        value = parse_size(value)
    kind = _FIELDS[key].type
    if kind is float and type(value) is int and abs(value) <= _MOST:
        value = float(value)
    if type(value) is not kind:
        shown = f"{value!r:.80}"
        raise ConfigError(f"{key} = {shown} is not of type {getattr(kind, '__name__', kind)}", path=where)
    _check_range(key, value, where)
    return value


def parse_size(text: str) -> int:
    """Return the bytes of `"500GiB"`, `"1.5T"` or `"4096"`; units are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"not a size: {text!r}", hint="write it like 500GiB")
    size = float(match[1]) * 1024 ** _POWERS[match[2].upper()]
    if size > _MOST:
        raise ConfigError(f"too large a size: {text[:40]}", hint="write it like 500GiB")
    return int(size)


def _document(path: str, read: Callable[[str], bytes]) -> dict[str, Any]:
    try:
        return parse_config(read(path), path)
    except OSError as error:
        raise ConfigError(
            f"cannot be read ({error.strerror})", path=path, hint=f"ls -lL {shlex.quote(str(path))}"
        ) from error


def _table(document: Mapping[str, Any], path: str) -> dict[str, Any]:
    table = document.get("daemon", {})
    if not isinstance(table, dict):
        raise ConfigError("[daemon] is not a table", path=path)
    permissions, group = policy_in(document, path)
    return {"permissions": permissions, "group": group, **table}


def _refuse_reaching(table: Mapping[str, Any], path: str | None) -> None:
    for key in REACHING:
        if table.get(key, getattr(DaemonConfig(), key)) != getattr(DaemonConfig(), key):
            raise ConfigError(
                f"{key} reaches beyond the job, and others than this user can write the file",
                path=path,
                hint=f"syncd watch ... --{key.replace('_', '-')} VALUE, or --config with your own file",
            )


def _check_range(key: str, value: Any, where: str) -> None:
    if key in CHOICES and value not in CHOICES[key]:
        raise ConfigError(f"{key} = {value!r} is not one of {', '.join(CHOICES[key])}", path=where)
    if type(value) in (int, float) and not _AT_LEAST.get(key, 0) <= value:
        raise ConfigError(f"{key} = {value} is less than {_AT_LEAST.get(key, 0)}", path=where)
    if type(value) in (int, float) and not value <= (_MOST_SECONDS if type(value) is float else _MOST):
        raise ConfigError(f"{key} is too large a number", path=where)
    if key == "metrics_port" and value > _MAX_PORT:
        raise ConfigError(f"{key} = {value} is not a port", path=where)
