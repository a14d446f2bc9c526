"""`explorer bench`: measure the steps of a job by its evaluation sets, and end."""

import json
import os
from collections.abc import Mapping

import click

from syncd.arguments import job_argument, step_names
from syncd.console import UncheckedPath
from syncd.jobfile.overrides import JobFileCommand, overrides_argument, trust_option
from syncd.protocol.layout import MAX_STEP

AFTER = "run"  # the verb behind which `--help` lists this one

ALL = "all"


def _steps(_: click.Context, __: click.Parameter, text: str) -> tuple[int, ...] | None:
    """Return the steps that a text names, None for all."""
    if text == ALL:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) <= MAX_STEP for word in words):
        raise click.BadParameter(f"{text!r} is neither {ALL} nor steps such as 10,20")
    return tuple(int(word) for word in words)


@click.command(cls=JobFileCommand)
@job_argument
@overrides_argument
@trust_option
@click.option(
    "--steps",
    metavar="STEPS",
    default=ALL,
    callback=_steps,
    shell_complete=step_names,
    help="The steps, or all that are complete.",
)
@click.option(
    "--config",
    metavar="CONFIG",
    type=UncheckedPath(),
    show_default="JOB/config.toml",
    help="The job file, as `explorer run` takes it.",
)
@click.option(
    "--base",
    metavar="DIR",
    type=UncheckedPath(file_okay=False),
    show_default="model.path of CONFIG",
    help="Where the model is that the job started from.",
)
@click.option("--no-base", is_flag=True, help="Do not measure the model that the job started from.")
@click.option(
    "--set", "sets", metavar="NAME", multiple=True, help="Measure this set alone; may be given several times."
)
@click.option("--again", is_flag=True, help="Measure also what was measured before.")
@click.option("--name", metavar="NAME", default="bench", help="The identity under which figures are kept.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def bench(
    job: str,
    overrides: tuple[str, ...],
    steps: tuple[int, ...] | None,
    config: str | None,
    base: str | None,
    no_base: bool,
    sets: tuple[str, ...],
    again: bool,
    name: str,
    as_json: bool,
    trust: bool,
) -> None:
    r"""Measure steps of JOB, and the model that it started from, by its evaluation sets; then end.

    Figures go to JOB/explorers/NAME/evaluations.jsonl, where `trainer plot` finds them. What was measured before with
    the same weights and settings is not measured again. A step that is gone or damaged is named, and the others are
    measured. --section.key value overrides any key of CONFIG.

    \b
    Exit codes:
      0   at least one step was measured, or all were before
      2   another live explorer has the name
      65  nothing could be measured
      69  the engine is dead
      75  a signal ended it: give the same command again
      78  the file, a task or the reward function cannot be used

    \b
    Examples:
      explorer bench /shared/jobs/first
      explorer bench /shared/jobs/first --steps 10,20 --set math --json
      explorer bench /shared/jobs/first --config grpo.toml --explorer.engine.kind transformers
    """
    from explorer_hooks.parts.evaluation.bench import BenchRequest  # noqa: PLC0415
    from explorer_hooks.parts.evaluation.bench import bench as measured  # noqa: PLC0415
    from explorer_hooks.parts.evaluation.bench_report import document, tables  # noqa: PLC0415
    from explorer_hooks.parts.evaluation.load import load_bench_file  # noqa: PLC0415
    from syncd.errors import UsageError  # noqa: PLC0415
    from syncd.jobfile.code_trust import require_own_model  # noqa: PLC0415

    settings = (*overrides, f"--explorer.name={name}", *((f"--model.path={base}",) if base else ()))
    file = load_bench_file(job, config, settings, trust=trust)
    require_own_model(file.model.path, runs_code=file.model.trust_remote_code and not trust)
    evaluation_sets = file.explorer.evaluation.named()
    if unknown := [wanted for wanted in sets if wanted not in evaluation_sets]:
        raise UsageError(f"no evaluation set is called {unknown[0]!r}", hint=_names(evaluation_sets))
    measurements = measured(
        file, BenchRequest(steps, not no_base, sets, again, os.path.realpath(base) if base else "")
    )
    if as_json:
        click.echo(json.dumps(document(file.job.dir, measurements)))
    else:
        click.echo("\n".join(tables(measurements, dict(evaluation_sets))))


def _names(evaluation_sets: Mapping[str, object]) -> str:
    named = [name for name in evaluation_sets if name]
    return f"--set is one of {', '.join(named)}" if named else "leave --set out: no set has a name"
