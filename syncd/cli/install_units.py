"""`syncd install-units`: writes the systemd units of syncd, with the paths of this installation.

The units are data (`systemd/` of the source tree, `share/syncd/systemd` of an installation) and valid as they are if
`/usr/bin/syncd` and the user `syncd` exist. The first line of each written file holds the digest of the rest, so that
a later version can replace a file that nobody has changed.
"""

import importlib.metadata
import os
import re
import shlex
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import click

from syncd._version import __version__
from syncd.console import UncheckedPath
from syncd.errors import StorageError, UsageError, storage_errors
from syncd.protocol.digest import digest_bytes
from syncd.protocol.local_disk import LocalDisk

OWNER = "syncd"  # the user and group that the files name

_COMMAND = "/usr/bin/syncd"
_WITNESS = "syncd@.service"
_FIRST_LINE = re.compile(r"# Written by syncd install-units \S+, digest (\S+)\.\n")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\$?")
_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
_FILES = (
    "syncd@.service", "syncd-follow@.service", "syncd-mirror@.service", "sysusers.d/syncd.conf",
    "tmpfiles.d/syncd.conf", "syncd.env.example",
)  # fmt: skip
_USER_FILES = ("syncd-user@.service", "syncd-follow-user@.service", "syncd.env.example")


class FileState(StrEnum):
    """What a written file is, compared with the one that exists."""

    NEW = "new"
    SAME = "unchanged"
    UPDATED = "updated"
    CHANGED = "changed by hand"


@dataclass(frozen=True, slots=True)
class UnitRequest:
    user: bool  # for a user's service manager instead of the system's
    command: tuple[str, ...]  # the words that start syncd
    # User of daemons and followers, and group unless it is the user's first; the system's files only.
    owner: tuple[str, str | None] = (OWNER, OWNER)
    # Names of further engines on this host, each with a follower's unit of its own.
    engines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class UnitFile:
    path: str  # where, absolute
    text: str

    def state(self) -> FileState:
        with storage_errors(self.path):
            try:
                there = Path(self.path).read_text(encoding="utf-8", errors="replace")
            except FileNotFoundError:
                return FileState.NEW
        if there == self.text:
            return FileState.SAME
        return FileState.UPDATED if _is_as_written(there) else FileState.CHANGED


def this_command() -> tuple[str, ...]:
    """Return the command that starts this installation, whatever PATH and the current directory are."""
    return (sys.executable, "-P", "-m", "syncd")


def unit_files(request: UnitRequest, base: str) -> list[UnitFile]:
    for name in (*request.owner, *request.engines):
        if name is not None and not _NAME.fullmatch(name):
            raise UsageError(f"{name!r} cannot be the name of a user, group or engine")
    source = source_directory()
    return [
        UnitFile(
            f"{base}/{_place(name, user=request.user)}/{os.path.basename(target)}",
            _signed(rendered(Path(source, name).read_text(encoding="utf-8"), request)),
        )
        for name in (_USER_FILES if request.user else _FILES)
        if request.owner[0] == OWNER or not name.startswith("sysusers.d")
        for target in _targets(name, request.engines)
    ]


def source_directory() -> str:
    """Return where the unit files are: in the source tree that this runs from, or where the installation put them."""
    beside = Path(__file__).parents[2] / "systemd"
    if (beside / _WITNESS).is_file():
        return str(beside)
    try:
        installed = importlib.metadata.files("syncd") or []
    except importlib.metadata.PackageNotFoundError:
        installed = []
    for file in installed:
        if file.name == _WITNESS and os.path.isfile(path := os.path.abspath(file.locate())):
            return os.path.dirname(path)
    hint = "pip install --force-reinstall syncd"
    raise StorageError("this installation lacks its systemd units", path=beside, hint=hint)


def rendered(text: str, request: UnitRequest) -> str:
    user, unix_group = request.owner
    text = text.replace(_COMMAND, " ".join(map(quoted, request.command)))
    runs_as = f"User={user}\n" + (f"Group={unix_group}\n" if unix_group else "")
    text = text.replace(f"User={OWNER}\nGroup={OWNER}\n", runs_as)
    return re.sub(rf"(?m)^(d \S+ +\d+) {OWNER} {OWNER} ", rf"\1 {user} {unix_group or '-'} ", text)


def quoted(word: str) -> str:
    """Return a word as ExecStart= reads it back."""
    word = word.replace("%", "%%").replace("$", "$$")
    if _PLAIN.fullmatch(word.replace("%%", "").replace("$$", "")):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def closed_directory(path: str) -> str | None:
    """Return the first directory on the way to a file that only its owner or group can enter, None if all can."""
    for directory in reversed(Path(os.path.realpath(path)).parents):
        if not directory.stat().st_mode & 0o001:
            return str(directory)
    return None


def next_commands(request: UnitRequest) -> list[str]:
    control, unit = ("systemctl --user", "syncd-user") if request.user else ("systemctl", "syncd")
    start = [
        f"{control} daemon-reload",
        f'{control} enable --now "{unit}@$(systemd-escape -p /ckpt/job).service"',
    ]
    if request.user:
        return [*start, "loginctl enable-linger"]
    users = ["systemd-sysusers"] if request.owner[0] == OWNER else []
    return [*users, "systemd-tmpfiles --create", *start]


def _place(name: str, *, user: bool) -> str:
    """Return the directory of a file below /etc or ~/.config."""
    if name.endswith(".service"):
        return "systemd/user" if user else "systemd/system"
    return os.path.dirname(name) or "syncd"


def _targets(name: str, engines: tuple[str, ...]) -> list[str]:
    more = [name.replace("@", f"-{engine}@") for engine in engines] if "-follow" in name else []
    return [name, *more]


def _signed(text: str) -> str:
    return f"# Written by syncd install-units {__version__}, digest {digest_bytes(text.encode())}.\n{text}"


def _is_as_written(text: str) -> bool:
    first = _FIRST_LINE.match(text)
    return first is not None and first[1] == digest_bytes(text[first.end() :].encode())


@click.command("install-units")
@click.option("--user", is_flag=True, help="Write units for your own service manager, without root.")
@click.option(
    "--dir",
    "base",
    type=UncheckedPath(file_okay=False),
    metavar="DIR",
    show_default="/etc, with --user ~/.config",
    help="Write below this directory.",
)
@click.option(
    "--run-as",
    metavar="USER[:GROUP]",
    show_default=f"{OWNER}, which is created",
    help="Run daemons and followers as this user.",
)
@click.option(
    "--engine", "engines", multiple=True, metavar="NAME", help="Write a unit for a further follower."
)
@click.option("--force", is_flag=True, help="Replace files that were changed by hand.")
@click.option("--dry-run", is_flag=True, help="Print what would be written, and write nothing.")
def install_units(
    user: bool, base: str | None, run_as: str | None, engines: tuple[str, ...], force: bool, dry_run: bool
) -> None:
    r"""Write the systemd units of syncd with the paths of this installation, and print what to run next.

    Replaces files that an earlier version wrote. If a file was changed by hand, the command writes nothing unless you
    give --force.

    \b
    Exit codes:
      2   a file was changed by hand: nothing was written

    \b
    Examples:
      syncd install-units --dry-run
      syncd install-units --run-as alice:cluster
      syncd install-units --user
    """
    if user and run_as:
        raise UsageError("--run-as is for the system's units", hint="leave it out: your own units run as you")
    request = UnitRequest(user, this_command(), _owner(run_as), engines)
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    files = unit_files(request, os.path.abspath(base or (config if user else "/etc")))
    states = [(file, file.state()) for file in files]
    changed = [file.path for file, state in states if state is FileState.CHANGED]
    if changed and not force and not dry_run:
        hint = "move changes into a drop-in (systemctl edit UNIT), then use --force"
        raise UsageError("changed by hand, nothing was written", path=", ".join(changed), hint=hint)
    for file, state in states:
        if state is not FileState.SAME and not dry_run:
            _write(file, request)
        click.echo(_line(file, state, force=force, dry_run=dry_run))
    _warn_if_closed(request)
    click.echo("\n".join(["next:", *(f"  {command}" for command in next_commands(request))]))


def _owner(text: str | None) -> tuple[str, str | None]:
    user, colon, unix_group = (text or f"{OWNER}:{OWNER}").partition(":")
    return user, unix_group if colon else None


def _line(file: UnitFile, state: FileState, *, force: bool, dry_run: bool) -> str:
    text = str(state)
    if state is FileState.CHANGED:
        text = "replaced" if force else "changed by hand, stays without --force"
    return f"{file.path}: {f'{text} (not written)' if dry_run and state is not FileState.SAME else text}"


def _write(file: UnitFile, request: UnitRequest) -> None:
    again = f"sudo {shlex.join([*request.command, 'install-units'])}, or --user for your own"
    with storage_errors(file.path):
        try:
            os.makedirs(os.path.dirname(file.path), exist_ok=True)
            LocalDisk().replace(file.path, file.text.encode())
            # Whatever the umask: the service manager complains of units that not everybody can read.
            os.chmod(file.path, 0o644)
        except PermissionError as error:
            hint = None if request.user else again
            raise StorageError("permission denied", path=file.path, hint=hint) from error


def _warn_if_closed(request: UnitRequest) -> None:
    """Warn if the service could not start this Python."""
    closed = None if request.user else closed_directory(request.command[0])
    if closed:
        click.echo(
            f"warning: user {request.owner[0]} may be unable to enter {closed}, where Python is", err=True
        )
