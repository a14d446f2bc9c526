"""The job's file, as `explorer bench` reads it."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

from explorer_hooks.run.load import explorer_loader, file_problems
from syncd.errors import ConfigError
from syncd.jobfile.loader import read_toml, values_at
from syncd.jobfile.model import JobFile
from syncd.jobfile.problems import Problem
from syncd.jobfile.roles import RunnerSection, given_tables


def load_bench_file(
    job: str, config: str | None, overrides: Sequence[str] = (), *, trust: bool = False
) -> JobFile:
    """Return what a file says to `explorer bench`, with the command line's `--section.key value` on top.

    `config` is the file; None for the configuration that the trainer keeps in the job directory.
    """
    path = config or f"{job}/config.toml"
    if config is None and not os.path.exists(path):
        hint = f"explorer bench {job} --config grpo.toml"
        raise ConfigError("no trainer has kept its configuration there", path=path, hint=hint)
    kept = replace(read_toml(path), is_kept=config is None)
    source = path if config is not None else str(next(iter(values_at(kept.table, "job.source")), path))
    layers = [kept.layer(source), LOADER.command_layer(overrides)]
    file = LOADER.load(layers, path, trust=trust)
    return file.with_values(job={"dir": os.path.abspath(job), "source": os.path.abspath(source)})


def _bench_checks(file: JobFile) -> Iterator[Problem]:
    yield from file_problems(file, "bench")
    for table in given_tables(file.explorer, RunnerSection):
        text = f"explorer bench has {table}s play nothing"
        yield Problem(f"explorer.{table}", text, f"leave [explorer.{table}] out")
    if not file.explorer.evaluation.named():
        text = "there is no evaluation set: explorer.evaluation.tasks is missing"
        yield Problem("explorer.evaluation.tasks", text, "it names a JSONL file of tasks")
    if file.stages:
        text = "explorer bench takes no file with stages"
        yield Problem("stages", text, "leave --config out: each stage's directory has its configuration")


LOADER = explorer_loader(_bench_checks)
