"""One stage of a file with [[stages]]: its keys, its directory, and the wait until it begins."""

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import structlog

from explorer_hooks.stopping import Stop
from syncd.errors import ConfigError, TimedOutError
from syncd.jobfile.loader import Layer
from syncd.jobfile.model import JobFile
from syncd.jobfile.stages_file import STAGES, StagesRecord, read_record
from syncd.observe import log
from syncd.protocol.disk import Clock
from syncd.protocol.local_disk import SystemClock

TURN = 0.5  # seconds between two polls of whether a stage has begun
EVERY = 60.0  # seconds between two log lines about the wait


def stage_layers(whole: Layer, stage: str | None) -> list[Layer]:
    entries = list(_entries(whole.table.get("stages")))
    names = [str(entry["name"]) for entry in entries]
    if stage is None and not names:
        return [whole]
    if stage is None:
        commands = ", or ".join(f"explorer run {whole.where} --stage {name}" for name in names)
        raise ConfigError("this file has [[stages]], and --stage names none", path=whole.where, hint=commands)
    if stage not in names:
        hint = (
            f"--stage is one of {', '.join(names)}" if names else "leave --stage out: there are no [[stages]]"
        )
        raise ConfigError(f"no stage is called {stage!r}", path=whole.where, hint=hint)
    return [*whole.of_stage(entries[names.index(stage)])]


def wait_for(file: JobFile, stage: str, clock: Clock | None = None) -> JobFile | str:
    """Wait until a stage has begun; return its file with the model it started from, or why it is not explored."""
    log.configure(file.explorer.log, sys.stderr)
    clock, directory = clock or SystemClock(), os.path.dirname(file.job.dir)
    begin, logged_at = clock.monotonic(), float("-inf")
    with Stop().on_signals() as stop:
        while not stop():
            record = read_record(directory)
            if stage in record.done:
                return f"stage {stage} is done"
            if stage in record.models and os.path.isdir(file.job.dir):
                return file.with_values(model={"path": record.models[stage]})
            waited = clock.monotonic() - begin
            if waited >= file.sync.timeout:
                raise TimedOutError(
                    f"stage {stage} has not begun within {file.sync.timeout:g} s",
                    path=f"{directory}/{STAGES}",
                    hint=f"trainer stages {file.job.source}, or give a longer --sync.timeout",
                )
            if clock.monotonic() - logged_at >= EVERY:
                logged_at = clock.monotonic()
                _log_wait(stage, record, directory, waited)
            clock.sleep(TURN)
    return "told to stop"


def _entries(entries: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the stages that have a name; `trainer stages` reports what else is wrong with them."""
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("name"), str):
            yield entry


def _log_wait(stage: str, record: StagesRecord, directory: str, waited: float) -> None:
    structlog.get_logger().warning(
        "stage_awaited",
        stage=stage,
        path=f"{directory}/{STAGES}",
        waited=round(waited, 1),
        begun=[name for name in record.models if name not in record.done],
        done=list(record.done),
    )
