"""`syncd follow`: Keep an inference engine at the newest version."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from explorer_hooks.cli.options import health_option
from syncd.arguments import job_argument
from syncd.completion import matching
from syncd.console import UncheckedPath
from syncd.errors import ConfigError, StuckError, UsageError
from syncd.protocol.layout import parse_step_name
from syncd.stall.calls import MOUNT_HINT, STUCK_AFTER
from syncd.stall.worker import WorkerThread

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from explorer_hooks.follower.follower import TurnOutcome

_CREDENTIAL = "hook-token"
"""The token's name in systemd/syncd-follow@.service; the default if neither option is given."""

_TOKEN_SIZE = 1 << 16
_F = TypeVar("_F", bound=Callable[..., Any])


def _settings(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    for value in values:
        if "=" not in value:
            raise click.BadParameter(f"{value!r} is not KEY=VALUE")
    return {key: text for key, _, text in (value.partition("=") for value in values)}


def _seconds(name: str, default: float, text: str, *, may_be_0: bool = True) -> Callable[[_F], _F]:
    kind = click.FloatRange(min=0, min_open=not may_be_0)
    return click.option(name, type=kind, default=default, metavar="S", help=text)


def _count(name: str, text: str, **more: Any) -> Callable[[_F], _F]:
    return click.option(name, type=click.IntRange(min=0), metavar="N", help=text, **more)


def _choice(name: str, default: str, among: Sequence[str], text: str) -> Callable[[_F], _F]:
    return click.option(name, type=click.Choice(among), default=default, help=text)


def _path(name: str, text: str, metavar: str, **more: Any) -> Callable[[_F], _F]:
    kind = UncheckedPath(file_okay=metavar == "FILE")
    return click.option(name, type=kind, metavar=metavar, help=text, **more)


def _hook_names(_: click.Context, __: click.Parameter, incomplete: str) -> "list[CompletionItem[str]]":
    from explorer_hooks.finding import installed_hooks  # noqa: PLC0415

    return matching(installed_hooks(), incomplete)


@click.command()
@job_argument
@click.argument("argv", metavar="[-- ARGV...]", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--hook",
    required=True,
    metavar="NAME[=ADDRESS]",
    shell_complete=_hook_names,
    help="The hook that loads versions into the engine.",
)
@click.option(
    "--hook-option",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    callback=_settings,
    help="A setting of the hook; its documentation lists them.",
)
@click.option(
    "--name", metavar="NAME", show_default="host and process", help="This explorer's name in the job."
)
@_path("--stage", "Directory for one copy per host, such as /dev/shm/syncd.", "DIR")
@click.option(
    "--peers",
    metavar="HOST:PORT",
    help="With --stage: read each version together with the job's other hosts; this one gives its pieces here.",
)
@click.option("--early", is_flag=True, help="With --stage: copy a version while the trainer still writes it.")
@click.option(
    "--policy",
    metavar="POLICY",
    default="newest",
    help="Which versions to load: newest, every, exact=N or at-least=N.",
)
@_count("--max-lag", "Steps that a ready engine may be behind.")
@_choice(
    "--verify",
    "content",
    ("size", "header", "content"),
    "What to check of a version before loading it; content: every byte. With --stage always content.",
)
@click.option("--token-env", metavar="NAME", help="Environment variable with the engine's token.")
@_path("--token-file", "File with the token.", "FILE", show_default="systemd's credential hook-token")
@_seconds("--timeout", 300.0, "Give up one request or load after this many seconds.", may_be_0=False)
@_count("--retries", "Retry a load that failed this many times.", default=2)
@click.option("--once", is_flag=True, help="Exit once the engine runs the version that the policy selects.")
@_seconds("--wait", 3600.0, "With --once: wait this many seconds.")
@click.option("--stay", is_flag=True, help="Wait for another trainer after one is gone.")
@click.option(
    "--reload-test/--no-reload-test",
    default=True,
    help="Have an engine on the job's start model first reload that, to show that it can.",
)
@_choice(
    "--exam",
    "auto",
    ("auto", "on", "off"),
    "Have the engine first load changed weights, to show that it loads every tensor; auto: if nobody else uses it.",
)
@_seconds("--prove-every", 600.0, "Seconds after which a proven engine is asked again; 0: never.")
@_path("--ready-file", "A file that exists while the engine is ready.", "FILE")
@health_option
@_path(
    "--state-dir",
    "The state directory of syncd watch.",
    "DIR",
    envvar="SYNCD_STATE_DIR",
    show_default="JOB/.syncd",
)
@_seconds("--ttl", 60.0, "Count a process as dead after this many seconds without a heartbeat.")
@click.option("--json", "as_json", is_flag=True, help="Print each result as one JSON line.")
@_choice("--log-level", "info", ("debug", "info", "warning", "error"), "The lowest level to log.")
@_choice("--log-format", "auto", ("auto", "json", "text"), "auto: JSON unless stderr is a terminal.")
def follow(job: str, argv: tuple[str, ...], **parsed: Any) -> None:
    r"""Keep one inference engine at the newest version of JOB, and report which version it really runs.

    For each version the command takes a lease, checks the files and, with --stage, copies them once for each host
    before it touches the engine. If a load fails, the engine stays on its version. On SIGTERM the current load ends
    first.

    \b
    Exit codes:
      0   after SIGTERM; with --once: the engine runs the version
      3   with --once: the trainer has gone, and the engine runs no version
      4   with --once: the time is up
      65  with --once: the version was refused
      69  the engine can neither load a version nor roll back: restart the engine
      74  with --once: the load failed; or the mount does not answer at the start
      75  with --once: the engine cannot be reached; or the wanted step was removed

    \b
    Examples:
      syncd follow /ckpt/job --hook vllm=http://127.0.0.1:8000
      syncd follow /ckpt/job --hook vllm=http://127.0.0.1:8000 --stage /dev/shm/syncd --ready-file /run/ready
      syncd follow /ckpt/job --hook command --once -- ./reload.sh {path} {step}
    """
    from explorer_hooks.finding import open_hook, shown  # noqa: PLC0415
    from explorer_hooks.follower.policy import FollowOptions  # noqa: PLC0415
    from explorer_hooks.follower.service import log_listener, serve  # noqa: PLC0415

    options = FollowOptions(
        **{field.name: parsed[field.name] for field in fields(FollowOptions) if field.name in parsed}
    )
    token, settings = _token(parsed["token_env"], parsed["token_file"]), parsed["settings"]
    hook = open_hook(parsed["hook"], argv=argv, settings=settings, timeout=parsed["timeout"], token=token)
    hear: Callable[[TurnOutcome], None] = partial(_print, sys.stdout) if parsed["as_json"] else lambda _: None
    # What a hook's program or function prints is no JSON.
    with redirect_stdout(sys.stderr) if parsed["as_json"] else nullcontext():
        serve(
            _job_directory(job),
            hook,
            parsed["name"],
            options,
            engine=shown(parsed["hook"]),
            listener=log_listener(parsed["log_level"], parsed["log_format"], sys.stderr),
            hear=hear,
            once=parsed["once"],
            wait=parsed["wait"],
            health=parsed["health"],
        )


def _print(stream: TextIO, outcome: "TurnOutcome") -> None:
    generation, step = outcome.pair or (None, None)
    document = {"kind": outcome.kind, "generation": generation, "step": step, "reason": outcome.reason}
    click.echo(json.dumps({**document, "timings": dict(outcome.timings)}), file=stream)


def _job_directory(job: str) -> str:
    if not job:
        raise UsageError("JOB is empty", hint="is a shell variable unset?")
    directory, name = os.path.split(_real_path(job))
    if parse_step_name(name) is not None:
        raise UsageError(f"{job} is a step", hint=f"its job is {directory}")
    return job


def _real_path(job: str) -> str:
    def resolve() -> str:
        os.path.isdir(job)
        return os.path.realpath(job)

    resolving = WorkerThread(resolve, "resolve")
    resolving.start()
    if not resolving.wait(STUCK_AFTER):
        message = f"the mount has not answered for {STUCK_AFTER:g} s; the engine was left as it is"
        raise StuckError(message, path=os.path.abspath(job), hint=MOUNT_HINT)
    return resolving.result()


def _token(variable: str | None, file: str | None) -> str | None:
    if variable is not None and file is not None:
        raise UsageError("the token is given twice: by --token-env and by --token-file")
    if file is not None:
        return _read_token(file)
    if variable is None:
        return _credential()
    token = os.environ.get(variable, "").strip()  # secrets often end with a line feed, in files too
    if not token:
        raise ConfigError(f"the environment has no {variable}", hint=f"export {variable}=...")
    return token


def _credential() -> str | None:
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    path = f"{directory}/{_CREDENTIAL}"
    return _read_token(path) if directory and os.path.isfile(path) else None


def _read_token(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            token = file.read(_TOKEN_SIZE).strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"the token cannot be read: {why}", path=path, hint=f"ls -l {path}") from None
    if not token:
        raise ConfigError("the file of the token is empty", path=path, hint=f"ls -l {path}")
    return token
