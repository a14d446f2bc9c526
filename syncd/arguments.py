"""The arguments JOB and STEP, which several command lines share, and how a shell completes them."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from syncd.completion import matching
from syncd.console import UncheckedPath
from syncd.protocol.layout import MAX_STEP, STATE, Job, parse_step_name

F = TypeVar("F", bound=Callable[..., Any])

job_argument = click.argument("job", metavar="JOB", type=UncheckedPath(file_okay=False))
"""The job directory; the command that takes it checks it."""


def step_argument(*, required: bool = True, completes: "StepNames | None" = None) -> Callable[[F], F]:
    """Return a decorator that adds the argument STEP; a shell offers what `completes` returns, else all steps."""
    return click.argument(
        "step",
        metavar="STEP" if required else "[STEP]",
        required=required,
        type=click.IntRange(0, MAX_STEP),
        shell_complete=completes or step_names,
    )


StepNames = Callable[[click.Context, click.Parameter, str], list[CompletionItem[str]]]
"""Returns completions, as click asks for them."""


def step_names(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Return the steps in the job directory that begin with what was typed, the newest first."""
    return _steps_in(_typed_path(ctx, "job"), incomplete)


def pinned_step_names(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Return the pinned steps of the job, as `step_names` does."""
    job = _typed_path(ctx, "job")
    return _steps_in(Job(job, _typed_path(ctx, "state_dir") or f"{job}/{STATE}").pins, incomplete)


def no_step_names(*_: object) -> list[CompletionItem[str]]:
    """Return nothing: the step does not exist yet."""
    return []


def _steps_in(directory: str, incomplete: str) -> list[CompletionItem[str]]:
    names = (name.removesuffix(".json") for name in os.listdir(directory))
    steps = {step for name in names if (step := parse_step_name(name)) is not None}
    return matching(map(str, sorted(steps, reverse=True)), incomplete)


def _typed_path(ctx: click.Context, name: str) -> str:
    """Return a path as the shell will expand it, empty if it was not given."""
    value = ctx.params.get(name)
    if value is None and name == "job":
        value = next(
            iter(ctx.args), None
        )  # click stops at an option whose value is typed now, before the arguments
    return os.path.expanduser(os.path.expandvars(value or ""))
