"""`syncd follow`: Keep an inference engine at the newest version."""

import json
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from syncd.console import UncheckedPath
from syncd.errors import ConfigError, StuckError, UsageError
from syncd.protocol.layout import parse_step_name
from syncd.stall.calls import MOUNT_HINT, STUCK_AFTER
from syncd.stall.worker import WorkerThread

if TYPE_CHECKING:
    from explorer_hooks.follower.follower import FollowOptions, TurnOutcome
    from explorer_hooks.hook import Hook

_CREDENTIAL = "hook-token"
"""What systemd/syncd-follow@.service calls the token; used where neither option says otherwise."""

_TOKEN_SIZE = 1 << 16
_LEVELS = ("debug", "info", "warning", "error")
_SECONDS = click.FloatRange(min=0, max=1e9)


def _settings(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    for value in values:
        if "=" not in value:
            raise click.BadParameter(f"{value!r} is not KEY=VALUE")
    return {key: text for key, _, text in (value.partition("=") for value in values)}


@click.command()
@click.argument("job", metavar="JOB", type=UncheckedPath())
@click.argument("argv", metavar="[-- ARGV...]", nargs=-1, type=click.UNPROCESSED)
@click.option("--hook", required=True, metavar="NAME[=ADDRESS]", help="What loads versions into the engine.")
@click.option(
    "--hook-option",
    "settings",
    multiple=True,
    metavar="K=V",
    callback=_settings,
    help="As the hook documents them.",
)
@click.option("--name", metavar="ID", help="This explorer's name in the job; host and process otherwise.")
@click.option("--stage", metavar="DIR", type=UncheckedPath(), help="One copy a host, shared: /dev/shm/syncd.")
@click.option(
    "--policy",
    metavar="P",
    default="newest",
    show_default=True,
    help="newest, every, exact=N or at-least=N.",
)
@click.option(
    "--max-lag", type=click.IntRange(min=0), metavar="N", help="Steps the engine may be behind and ready."
)
@click.option(
    "--verify",
    type=click.Choice(["size", "header", "content"]),
    default="content",
    show_default=True,
    help="What is checked of a version before the engine is touched; content: every byte. A stage always is.",
)
@click.option("--token-env", metavar="VAR", help="Environment variable that holds the engine's token.")
@click.option(
    "--token-file", metavar="FILE", help="File that holds it; systemd's credential `hook-token` unless given."
)
@click.option(
    "--timeout", type=_SECONDS, default=300.0, show_default=True, metavar="S", help="Of one request or load."
)
@click.option(
    "--retries", type=click.IntRange(min=0), default=2, show_default=True, help="Of a load that failed."
)
@click.option("--once", is_flag=True, help="End once the engine runs what the policy names.")
@click.option(
    "--wait", type=_SECONDS, default=3600.0, show_default=True, metavar="S", help="With --once: for how long."
)
@click.option("--stay", is_flag=True, help="Wait for another trainer once one has gone.")
@click.option(
    "--ready-file", type=UncheckedPath(), metavar="PATH", help="There while the engine may be given work."
)
@click.option("--state-dir", type=UncheckedPath(), envvar="SYNCD_STATE_DIR", help="As given to syncd watch.")
@click.option(
    "--ttl", type=_SECONDS, default=60.0, show_default=True, metavar="S", help="Silence that means dead."
)
@click.option("--json", "as_json", is_flag=True, help="Print each outcome as one JSON line.")
@click.option(
    "--log-level", type=click.Choice(_LEVELS), default="info", show_default=True, help="What is logged."
)
@click.option(
    "--log-format",
    type=click.Choice(["auto", "json", "text"]),
    default="auto",
    show_default=True,
    help="JSON unless on a terminal.",
)
def follow(job: str, argv: tuple[str, ...], **given: Any) -> None:
    r"""Keep an inference engine at the newest version of JOB, and publish which version it really runs.

    Each version is leased, checked and, with --stage, copied once a host before the engine is touched. A load that
    fails leaves the engine on the version before. SIGTERM finishes the load in hand and exits 0; exit 69 when the
    engine can neither load nor go back: restart it.

    \b
    Examples:
      syncd follow /ckpt/job --hook vllm=http://127.0.0.1:8000
      syncd follow /ckpt/job --hook vllm=http://127.0.0.1:8000 --stage /dev/shm/syncd --ready-file /run/ready
      syncd follow /ckpt/job --hook command --once -- ./reload.sh {path} {step}
    """
    from explorer_hooks.finding import shown  # noqa: PLC0415
    from explorer_hooks.follower.service import FollowService, log_listener  # noqa: PLC0415

    options, hook = _options(given), _hook(argv, given)
    listener = log_listener(given["log_level"], given["log_format"], sys.stderr)
    hear = _print if given["as_json"] else None
    service = FollowService(listener, hear, once=given["once"], wait=given["wait"])
    service.serve(_place(job), hook, given["name"], options, shown(given["hook"]))


def _print(outcome: "TurnOutcome") -> None:
    generation, step = outcome.pair or (None, None)
    document = {
        "kind": outcome.kind,
        "generation": generation,
        "step": step,
        "reason": outcome.reason,
        "timings": dict(outcome.timings),
    }
    click.echo(json.dumps(document))


def _place(job: str) -> str:
    if not job:
        raise UsageError("JOB is empty", hint="is a shell variable unset?")
    directory, name = os.path.split(_asked(job))
    if parse_step_name(name) is not None:
        raise UsageError(f"{job} is a step", hint=f"its job is {directory}")
    return job


def _asked(job: str) -> str:
    """Return the job's real path; a mount that does not answer at all is not followed.

    Raises:
        StuckError: It does not.
    """

    def look() -> str:
        os.path.isdir(job)
        return os.path.realpath(job)

    looking = WorkerThread(look, "look")
    looking.start()
    if not looking.wait(STUCK_AFTER):
        message = f"the mount has not answered for {STUCK_AFTER:g} s; the engine was left as it is"
        raise StuckError(message, path=os.path.abspath(job), hint=MOUNT_HINT)
    return looking.result()


def _options(given: Mapping[str, Any]) -> "FollowOptions":
    from explorer_hooks.follower.follower import FollowOptions  # noqa: PLC0415

    names = (
        "policy", "max_lag", "stage", "verify", "retries", "state_dir", "ttl", "stay", "ready_file",
    )  # fmt: skip
    return FollowOptions(**{name: given[name] for name in names})


def _hook(argv: tuple[str, ...], given: Mapping[str, Any]) -> "Hook":
    from explorer_hooks.finding import open_hook  # noqa: PLC0415

    token, settings = _token(given["token_env"], given["token_file"]), given["settings"]
    return open_hook(given["hook"], argv=argv, settings=settings, timeout=given["timeout"], token=token)


def _token(variable: str | None, file: str | None) -> str | None:
    if variable is not None and file is not None:
        raise UsageError("the token is given twice: --token-env and --token-file")
    if file is not None:
        return _read_token(file)
    if variable is None:
        return _credential()
    token = os.environ.get(variable)
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
