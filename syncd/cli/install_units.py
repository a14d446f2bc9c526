"""`syncd install-units`: the units for systemd, with the paths of this installation."""

import os

import click

from syncd.cli import unit_files
from syncd.cli.unit_files import OWNER, Fate, UnitFile, Wish
from syncd.console import Place
from syncd.errors import StorageError, UsageError, storage_error
from syncd.protocol.local_disk import LocalDisk


@click.command("install-units")
@click.option("--user", is_flag=True, help="For your own service manager, without root.")
@click.option("--dir", "base", type=Place(), help="Write below this instead of /etc or ~/.config.")
@click.option(
    "--run-as", metavar="USER[:GROUP]", help=f"Whom daemons and followers run as ({OWNER}, who is made)."
)
@click.option("--engine", "engines", multiple=True, metavar="NAME", help="A further follower of this host.")
@click.option("--force", is_flag=True, help="Replace what was changed by hand.")
@click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
def install_units(
    user: bool, base: str | None, run_as: str | None, engines: tuple[str, ...], force: bool, dry_run: bool
) -> None:
    r"""Write the systemd units of syncd with the paths of this installation, and say what to run next.

    Files that are as they should be stay; those that an earlier version wrote are replaced; those that somebody
    has changed since stay and end this with 2, unless --force is given.

    \b
    Examples:
      syncd install-units --dry-run
      syncd install-units --run-as alice:cluster
      syncd install-units --user
    """
    if user and run_as:
        raise UsageError("--run-as is for the system's units", hint="your own run as you")
    wish = Wish(user, unit_files.this_command(), _owner(run_as), engines)
    files = unit_files.wished(wish, os.path.abspath(base or _default_base(user=user)))
    fates = [(file, file.fate()) for file in files]
    if not force and not dry_run:
        _refuse_changed([file.path for file, fate in fates if fate is Fate.CHANGED])
    for file, fate in fates:
        if fate is not Fate.SAME and not dry_run:
            _write(file, wish)
        click.echo(_said(file, fate, force=force, dry_run=dry_run))
    _warn_if_closed(wish)
    click.echo("\n".join(["next:", *(f"  {command}" for command in unit_files.next_commands(wish))]))


def _owner(text: str | None) -> tuple[str, str | None]:
    user, colon, group = (text or f"{OWNER}:{OWNER}").partition(":")
    return user, group if colon else None


def _default_base(*, user: bool) -> str:
    if not user:
        return "/etc"
    return os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")


def _refuse_changed(paths: list[str]) -> None:
    if paths:
        raise UsageError(
            "changed by hand, nothing was written",
            path=", ".join(paths),
            hint="move changes into a drop-in (systemctl edit UNIT), then use --force",
        )


def _said(file: UnitFile, fate: Fate, *, force: bool, dry_run: bool) -> str:
    text = str(fate)
    if fate is Fate.CHANGED:
        text = "replaced" if force else "changed by hand, stays without --force"
    return f"{file.path}: {f'{text} (not written)' if dry_run and fate is not Fate.SAME else text}"


def _write(file: UnitFile, wish: Wish) -> None:
    try:
        os.makedirs(os.path.dirname(file.path), exist_ok=True)
        LocalDisk().replace(file.path, file.text.encode())
        # Whatever the umask: the service manager complains of units that not everybody can read.
        os.chmod(file.path, 0o644)
    except PermissionError as error:
        hint = None if wish.user else f"sudo {unit_files.again(wish)}, or --user for your own"
        raise StorageError("may not be written", path=file.path, hint=hint) from error
    except OSError as error:
        raise storage_error(error, file.path) from error


def _warn_if_closed(wish: Wish) -> None:
    """Say it now if the service could not even start this Python."""
    closed = None if wish.user else unit_files.closed_directory(wish.command[0])
    if closed:
        click.echo(
            f"warning: user {wish.owner[0]} may be unable to enter {closed}, where Python is", err=True
        )
