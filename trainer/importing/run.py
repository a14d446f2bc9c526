"""Imports one file: reads it, maps it, has our own loader read the result, and only then writes it."""

import contextlib
import math
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tomli_w

from syncd.errors import ConfigError, UsageError, storage_errors
from syncd.jobfile.loader import COMMAND_LINE, layer_of, parse_overrides
from trainer.config.algorithms import SFT
from trainer.config.load import LOADER, load_config, resolved
from trainer.config.model import KEYS, JobConfig
from trainer.importing.apply import Entry, Outcome, Refusal, apply, is_below
from trainer.importing.read_source import read_setting, read_source, resolve
from trainer.importing.rows import Table
from trainer.importing.start import enter_start
from trainer.importing.tables import table_of

_WIDTH = 44
NEEDED = ("job.dir", "model.path")
"""Keys without which no job's file is one."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import found.

    Args:
        table: The source.
        outcome: What became of each key.
        text: The job's file; empty if keys cannot be mapped.
    """

    table: Table
    outcome: Outcome
    text: str


def import_config(
    path: str,
    to: str | None = None,
    *,
    source: str | None = None,
    overrides: Sequence[str] = (),
    settings: Sequence[str] = (),
    without: Sequence[str] = (),
    checkpoint: str | None = None,
    resume: bool = False,
) -> Imported:
    """Return what becomes of a file, and write the job's file if every key that matters has a counterpart.

    Args:
        path: The other project's file.
        to: Where the job's file goes; None to return its text alone.
        source: The project; None to tell by the keys.
        overrides: Our keys as on the command line, `--section.key value`.
        settings: Their keys, `KEY=VALUE`, above those of the file.
        without: Their keys, or tables of them, to leave out.
        checkpoint: A step's directory of the other project: its weights are exported beside the job's file, and
            training starts from them.
        resume: With `checkpoint`: make the step a full checkpoint of the new job instead, with its training state.

    Raises:
        UsageError: The arguments do not fit; the job's file is there.
        ConfigError: The file cannot be read as configuration, or our loader refuses the result.
        StorageError: A file cannot be read or written.
    """
    if to is not None and os.path.lexists(to):
        raise UsageError("the job's file is there already", path=to, hint="name another one with --to")
    values = {**read_source(path), **dict(map(read_setting, settings))}
    table = table_of(values, source, path)
    if resume and checkpoint is None:
        raise UsageError("--resume belongs to --from-checkpoint", hint="--from-checkpoint JOB/global_step_N")
    if checkpoint is not None and not resume and "--model.path" in overrides:
        raise UsageError("--from-checkpoint names the model already", hint="leave out --model.path")
    _check_without(without, values, table)
    ours = flat(parse_overrides(overrides, KEYS))
    outcome = apply(table, resolve(values, table.defaults), ours, without)
    outcome.refusals += _missing(outcome)
    outcome.refusals += _taken(outcome, to)
    outcome.by_hand |= ({} if checkpoint and not resume else _elsewhere(outcome)) | _warm(outcome)
    _drop_explorer(outcome)
    _make_room(outcome)
    start = enter_start(outcome, checkpoint, to, resume=resume)
    if outcome.refusals:
        return Imported(table, outcome, "")
    text = job_text(outcome.entries, _head(table, path))
    config = _checked(text, to or "job.toml")
    if start is not None:
        start.export(config)
    if to is not None:
        _write(text, to)
    return Imported(table, outcome, text)


def flat(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return the values of nested tables by their dotted names."""
    found = dict[str, Any]()
    for name, value in table.items():
        below = flat(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
        found |= below
    return found


def _check_without(without: Sequence[str], values: Mapping[str, Any], table: Table) -> None:
    for one in without:
        if not any(is_below(key, (one,)) for key in (*values, *table.defaults)):
            raise UsageError(f"--without {one}: neither the file nor a default of {table.title} sets it")


def _missing(outcome: Outcome) -> list[Refusal]:
    """Return what no key gave, and no job is without."""
    refused = {key for refusal in outcome.refusals for key in refusal.instead.split()}
    return [
        Refusal(key, "is needed here, and the file says nothing of it", f"--{key} DIR")
        for key in NEEDED
        if key not in outcome.entries and f"--{key}" not in refused
    ]


def _taken(outcome: Outcome, to: str | None) -> Iterator[Refusal]:
    """Yield a refusal of a job directory that has files, unless the user names it: it is probably the other job's."""
    entry = outcome.entries.get("job.dir")
    if entry is None or entry.origin == COMMAND_LINE or not isinstance(entry.value, str):
        return
    path = os.path.join(os.path.dirname(to or ""), os.path.expanduser(entry.value))
    with contextlib.suppress(OSError):
        if os.listdir(path):
            yield Refusal(
                entry.origin, f"{path} is not empty, and a job has a directory of its own", "--job.dir DIR"
            )


def _elsewhere(outcome: Outcome) -> dict[str, str]:
    """Return that the model is still to be downloaded, where there is no such directory."""
    entry = outcome.entries.get("model.path")
    if entry is None or not isinstance(entry.value, str) or os.path.isdir(os.path.expanduser(entry.value)):
        return {}
    command = f"hf download {entry.value} --local-dir DIR, then --model.path DIR"
    return {entry.origin: f"{entry.value} is no directory here; if it is a name on the hub: {command}"}


def _warm(outcome: Outcome) -> dict[str, str]:
    """Return what a server needs whose rollouts are sampled at another temperature than 1."""
    names = ("algorithm.temperature", "explorer.engine.kind")
    temperature, kind = (outcome.entries.get(name) for name in names)
    if temperature is None or kind is None or temperature.value == 1 or kind.value not in ("vllm", "sglang"):
        return {}
    server = "start the server with log-probs at that temperature (vLLM: --logprobs-mode processed_logprobs)"
    return {temperature.origin: f"{server}, and give --explorer.engine.processed_logprobs true"}


def _drop_explorer(outcome: Outcome) -> None:
    """Leave out what defaults say of explorers where only examples are learnt."""
    name = outcome.entries.get("algorithm.name")
    if name is not None and name.value == SFT:
        idle = [
            key
            for key, entry in outcome.entries.items()
            if key.startswith("explorer.") and not entry.is_given
        ]
        for key in idle:
            del outcome.entries[key]


def _make_room(outcome: Outcome) -> None:
    """Let as many experiences wait as two steps have, where that is more than by default."""
    sizes = [outcome.entries.get(f"data.{name}") for name in ("groups", "group_size")]
    if all(size is not None and isinstance(size.value, int) for size in sizes):
        rows = math.prod(size.value for size in sizes if size)
        if rows > KEYS.all["data.max_waiting"].default:
            outcome.entries.setdefault("data.max_waiting", Entry(2 * rows, "the experiences of two steps"))


def _head(table: Table, path: str) -> str:
    return (
        f"Imported by `trainer import {os.path.basename(path)}` from {table.title}; behind each key, its origin.\n"
        "Relative paths are relative to this file."
    )


def _checked(text: str, path: str) -> JobConfig:
    """Return the text as our own loader reads it.

    Raises:
        ConfigError: It refuses it; with all problems.
    """
    try:
        return resolved(LOADER.load([layer_of(tomllib.loads(text), path)], path))
    except ConfigError as error:
        hint = f"give --section.key VALUE; {error.hint}" if error.hint else "give --section.key VALUE"
        raise ConfigError(f"what the file says cannot be trained here: {error.message}", hint=hint) from error


def _write(text: str, path: str) -> None:
    with storage_errors(path), open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    load_config(path)


def job_text(entries: Mapping[str, Entry], head: str) -> str:
    """Return entries as TOML, table by table in the order of docs/configuration.md.

    Args:
        entries: By their dotted names.
        head: The first lines, as comments.
    """
    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    for table in sorted({_table(key) for key in entries}, key=lambda name: (_place(name)[0], name)):
        lines += ["", f"[{table}]"]
        own = [key for key in entries if _table(key) == table]
        lines += [_line(key, entries[key]) for key in sorted(own, key=_place)]
    return "\n".join([*lines, ""])


def _table(key: str) -> str:
    return key.rpartition(".")[0]


def _place(name: str) -> tuple[int, int, str]:
    """Return where a key or table stands: as in the documentation, what is not there last in its section."""
    sections, keys = list(JobConfig.model_fields), list(KEYS.all)
    place = keys.index(name) if name in keys else len(keys)
    return sections.index(name.partition(".")[0]), place, name


def _line(key: str, entry: Entry) -> str:
    name, value = key.rpartition(".")[2], entry.value
    is_list = isinstance(value, list | tuple)
    inline = f"[{', '.join(map(_value, value))}]" if is_list else _value(value)
    origin = entry.origin if entry.is_given else f"default of {entry.origin}"
    return f"{f'{name} = {inline}':{_WIDTH}}  # {origin}"


def _value(value: Any) -> str:
    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()
