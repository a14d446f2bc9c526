"""`syncd doctor`: check whether a directory can hold jobs, and how fast it is."""

import json

import click

from syncd.cli.options import exit_on_sigterm, json_option, seconds_option, state_dir_option
from syncd.console import UncheckedPath
from syncd.errors import StorageError, TooOpenError

AFTER = "rollback"  # the verb behind which `--help` lists this one


@click.command(
    epilog="Exit codes: 0 nothing failed, 4 no peer came, 74 something that syncd relies on does not work, "
    "77 something is too open (--security).",
)
@click.argument("directory", metavar="DIR", type=UncheckedPath(file_okay=False))
@click.option("--peer", is_flag=True, help="Measure together with a second host that runs the same command.")
@seconds_option("--wait", "With --peer: wait this many seconds for the second host.", 60.0)
@seconds_option(
    "--seconds",
    "Limit each measurement to this many seconds; 40 shows how long NFS caches an absent name.",
    5.0,
    0.1,
    600,
)
@click.option(
    "--security", is_flag=True, help="Report permissions of the job DIR that are too open; change nothing."
)
@click.option(
    "--token-file",
    "secrets",
    multiple=True,
    type=UncheckedPath(),
    metavar="FILE",
    help="With --security: check this file, which holds a secret, too.",
)
@state_dir_option
@json_option
def doctor(
    directory: str,
    *,
    peer: bool,
    wait: float,
    seconds: float,
    security: bool,
    secrets: tuple[str, ...],
    state_dir: str | None,
    as_json: bool,
) -> None:
    r"""Check whether DIR can hold jobs: which guarantees its file system gives, and how fast it is.

    All probes run in a directory .syncd-doctor-* below DIR (with --peer also in .syncd-doctor-peer), which is removed
    at the end. The report ends with the latency to expect and the settings to use.

    With --security, find permissions of the job DIR that are too open instead, and print the command that fixes each.

    \b
    Exit codes:
      0   nothing failed; warnings do not count
      4   with --peer: no peer came
      74  something that syncd relies on does not work
      77  with --security: something is too open

    \b
    Examples:
      syncd doctor /mnt/jobs
      syncd doctor /mnt/jobs --peer        (at about the same time on two hosts)
      syncd doctor /mnt/jobs --json | jq .verdict
      syncd doctor /mnt/jobs/a --security
    """
    if security:
        _secure(directory, state_dir, secrets, as_json=as_json)
        return
    from syncd.parts.doctor.report import examine  # noqa: PLC0415

    if peer:
        click.echo(f"waiting for: syncd doctor {directory} --peer   (on the other host)", err=True)
    exit_on_sigterm()
    report = examine(directory, seconds, wait if peer else None)
    if as_json:
        click.echo(json.dumps(report.document(), indent=2))
    else:
        from rich.console import Console  # noqa: PLC0415

        from syncd.parts.doctor.report import show  # noqa: PLC0415

        show(report, Console())
    if report.missed is not None:
        raise report.missed
    if report.verdict == "fail":
        click.get_current_context().exit(StorageError.exit_code)


def _secure(directory: str, state_dir: str | None, secrets: tuple[str, ...], *, as_json: bool) -> None:
    from syncd.parts.doctor.security_report import examine  # noqa: PLC0415

    report = examine(directory, state_dir, secrets)
    click.echo(json.dumps(report.document()) if as_json else "\n".join(report.lines()))
    if report.verdict == "fail":
        click.get_current_context().exit(TooOpenError.exit_code)
