"""Imports one file: reads it, maps it, has our own loader read the result, and only then writes it."""

import contextlib
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from syncd.errors import DOCS, ConfigError, UsageError, storage_errors
from syncd.experience.table import MAX_ROWS
from syncd.jobfile.loader import COMMAND_LINE, Layer, parse_overrides
from syncd.jobfile.model import KEYS, JobFile
from trainer.config.algorithms import SFT
from trainer.config.load import LOADER, resolved
from trainer.parts.importing.apply import Entry, Outcome, Refusal, apply, is_below
from trainer.parts.importing.job_text import job_text
from trainer.parts.importing.read_source import read_setting, read_source, resolve
from trainer.parts.importing.start import enter_start
from trainer.parts.importing.table import Table, table_of
from trainer.parts.importing.tasks import TASKS

_SERVERS = {
    "vllm": "env VLLM_SERVER_DEV_MODE=1 vllm serve {model} --host {host} --port {port} --enable-scale-out",
    "sglang": "python -m sglang.launch_server --model-path {model} --host {host} --port {port}",
}
NEEDED = ("job.dir", "model.path")


@dataclass(frozen=True, slots=True)
class Imported:
    table: Table  # the source
    outcome: Outcome  # what became of each key
    text: str  # the job's file; empty if keys cannot be mapped


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
        to: Where the job's file goes; None to return its text alone.
        source: The project; None to tell by the keys.
        overrides: Our keys as on the command line, `--section.key value`.
        settings: Their keys, `KEY=VALUE`, above those of the file.
        without: Their keys, or tables of them, to leave out.
        checkpoint: A step's directory of the other project: its weights are exported beside the job's file, and
            training starts from them.
        resume: With `checkpoint`: make the step a full checkpoint of the new job instead, with its training state.
    """
    if to is not None and os.path.lexists(to):
        raise UsageError("the job file exists already", path=to, hint="name another one with --to")
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
    _drop_explorer(outcome)
    outcome.by_hand |= {} if checkpoint and not resume else _elsewhere(outcome, to)
    outcome.by_hand |= _taskless(outcome) | _served(outcome) | _warm(outcome)
    _make_room(outcome)
    export = enter_start(outcome, checkpoint, to, resume=resume)
    if outcome.refusals:
        return Imported(table, outcome, "")
    text = job_text(outcome.entries, _head(table, path))
    config = _checked(text, to or "job.toml")
    if to is not None:
        with _new_file(to) as file:
            if export is not None:
                export(config)
            file.write(text)
    return Imported(table, outcome, text)


def flat(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    values = dict[str, Any]()
    for name, value in table.items():
        below = flat(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
        values |= below
    return values


def _check_without(without: Sequence[str], values: Mapping[str, Any], table: Table) -> None:
    for name in without:
        if not any(is_below(key, (name,)) for key in (*values, *table.defaults)):
            raise UsageError(f"--without {name}: neither the file nor a default of {table.title} sets it")


def _missing(outcome: Outcome) -> list[Refusal]:
    refused = {key for refusal in outcome.refusals for key in refusal.instead.split()}
    return [
        Refusal(key, "is needed here, and the file does not give it", f"--{key} DIR")
        for key in NEEDED
        if key not in outcome.entries and f"--{key}" not in refused
    ]


def _taken(outcome: Outcome, to: str | None) -> Iterator[Refusal]:
    """Yield a refusal of a job directory that has files, unless the user names it: it is probably the other job's."""
    entry = outcome.entries.get("job.dir")
    if entry is None or entry.origin == COMMAND_LINE or not isinstance(entry.value, str):
        return
    path = _seen_from(to, entry.value)
    with contextlib.suppress(OSError):
        if os.listdir(path):
            yield Refusal(
                entry.origin, f"{path} is not empty, and a job has a directory of its own", "--job.dir DIR"
            )


def _seen_from(to: str | None, path: str) -> str:
    """Return where a path of the job's file leads."""
    return os.path.join(os.path.dirname(to or ""), os.path.expanduser(path))


def _elsewhere(outcome: Outcome, to: str | None) -> dict[str, str]:
    entry = outcome.entries.get("model.path")
    if entry is None or not isinstance(entry.value, str) or os.path.isdir(_seen_from(to, entry.value)):
        return {}
    command = f"hf download {entry.value} --local-dir DIR, then --model.path DIR"
    return {entry.origin: f"{entry.value} is no directory here; if it is a name on the hub: {command}"}


def _taskless(outcome: Outcome) -> dict[str, str]:
    if outcome.value("algorithm.name") == SFT or any(key in outcome.entries for key in TASKS):
        return {}
    return {
        "the tasks": f"--explorer.tasks FILE, or a data set, a generator, an environment: {DOCS}/tasks.md"
    }


def _served(outcome: Outcome) -> dict[str, str]:
    server = _SERVERS.get(str(outcome.value("explorer.engine.kind")))
    if server is None or any(f"explorer.engine.{name}" in outcome.entries for name in ("address", "command")):
        return {}
    start = f"--explorer.engine.command '{server}' has each explorer start one"
    return {"the server": f"{start}, --explorer.engine.address URL names one that runs"}


def _warm(outcome: Outcome) -> dict[str, str]:
    temperature = outcome.entries.get("algorithm.temperature")
    if (
        temperature is None
        or temperature.value == 1
        or str(outcome.value("explorer.engine.kind")) not in _SERVERS
    ):
        return {}
    server = "start the server with log-probs at that temperature (vLLM: --logprobs-mode processed_logprobs)"
    return {temperature.origin: f"{server}, and give --explorer.engine.processed_logprobs true"}


def _drop_explorer(outcome: Outcome) -> None:
    """Leave out what defaults say of explorers where only examples are learnt."""
    if outcome.value("algorithm.name") == SFT:
        entries = outcome.entries.items()
        outcome.entries = {
            key: entry for key, entry in entries if entry.is_given or not key.startswith("explorer.")
        }


def _make_room(outcome: Outcome) -> None:
    """Let as many experiences wait as two steps have, where that is more than by default."""
    groups, size = outcome.value("data.groups"), outcome.value("data.group_size")
    if isinstance(groups, int) and isinstance(size, int):
        if groups * size > KEYS.all["data.max_waiting"].default:
            room = Entry(2 * groups * size, "the experiences of two steps")
            outcome.entries.setdefault("data.max_waiting", room)
        _share_out(outcome, groups, size)


def _share_out(outcome: Outcome, groups: int, size: int) -> None:
    """Let several explorers write the batches of a step that is larger than a batch."""
    is_open = "explorer.engine.kind" in outcome.entries and "explorer.groups" not in outcome.entries
    if not is_open or not size <= MAX_ROWS < groups * size:
        return
    own = max(number for number in range(1, MAX_ROWS // size + 1) if groups % number == 0)
    outcome.entries["explorer.groups"] = Entry(own, f"a batch has {MAX_ROWS} rollouts at most")
    count = groups // own
    note = f"a step is {count} batches of {own} groups: start {count} explorers, or a multiple of them"
    outcome.by_hand["the explorers"] = note


def _head(table: Table, path: str) -> str:
    return (
        f"Imported by `trainer import {os.path.basename(path)}` from {table.title}; behind each key, its origin.\n"
        "Relative paths are relative to this file."
    )


def _checked(text: str, path: str) -> JobFile:
    try:
        return resolved(
            LOADER.load([Layer(tomllib.loads(text), path, os.path.dirname(os.path.abspath(path)))], path)
        )
    except ConfigError as error:
        hint = f"give --section.key VALUE; {error.hint}" if error.hint else "give --section.key VALUE"
        raise ConfigError(f"what the file says cannot be trained here: {error.message}", hint=hint) from error


@contextlib.contextmanager
def _new_file(path: str) -> Iterator[TextIO]:
    """Yield a new file, which is removed if it cannot be written or what its job starts from cannot be exported."""
    with storage_errors(path):
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(path, "x", encoding="utf-8") as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                os.unlink(path)
                raise
