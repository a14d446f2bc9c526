"""The files for systemd that come with syncd: where they are, and what they become on this machine.

They are data (`systemd/` of the source tree, `share/syncd/systemd` of an installation) and valid as they are where
`/usr/bin/syncd` and the user `syncd` exist. Every file that is written says in its first line what the rest of it
was, so that one that nobody has changed since can be replaced by a newer one.
"""

import importlib.metadata
import os
import re
import shlex
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from syncd._version import __version__
from syncd.errors import StorageError, UsageError, storage_error
from syncd.protocol.digest import digest_bytes

OWNER = "syncd"
"""The user and group that the files name."""

_COMMAND = "/usr/bin/syncd"
_WITNESS = "syncd@.service"
_FIRST_LINE = re.compile(r"# Written by syncd install-units \S+, digest (\S+)\.\n")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\$?")
_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
_PLACES = {
    "syncd@.service": "systemd/system",
    "syncd-follow@.service": "systemd/system",
    "sysusers.d/syncd.conf": "sysusers.d",
    "tmpfiles.d/syncd.conf": "tmpfiles.d",
    "syncd.env.example": "syncd",
}
_USER_PLACES = {
    "syncd-user@.service": "systemd/user",
    "syncd-follow-user@.service": "systemd/user",
    "syncd.env.example": "syncd",
}


class Fate(StrEnum):
    """What happens to a file."""

    NEW = "new"
    SAME = "unchanged"
    UPDATED = "updated"
    CHANGED = "changed by hand"


@dataclass(frozen=True, slots=True)
class Wish:
    """What the files are to be made for.

    Args:
        user: For a user's own service manager instead of the system's.
        command: The words that start syncd.
        owner: User of daemons and followers, and group unless it is the user's first; the system's files only.
        engines: Names of further engines on this host, each with a follower's unit of its own.
    """

    user: bool
    command: tuple[str, ...]
    owner: tuple[str, str | None] = (OWNER, OWNER)
    engines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class UnitFile:
    """A file to write.

    Args:
        path: Where, absolute.
        text: What is in it.
    """

    path: str
    text: str

    def fate(self) -> Fate:
        """Look at what is there now.

        Raises:
            StorageError: It cannot be read.
        """
        try:
            there = Path(self.path).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return Fate.NEW
        except OSError as error:
            raise storage_error(error, self.path) from error
        if there == self.text:
            return Fate.SAME
        return Fate.UPDATED if _is_as_written(there) else Fate.CHANGED


def this_command() -> tuple[str, ...]:
    """Return what starts this very installation, whatever PATH and the current directory are."""
    return (sys.executable, "-P", "-m", "syncd")


def wished(wish: Wish, base: str) -> list[UnitFile]:
    """Return the files of a wish below a directory such as /etc.

    Raises:
        StorageError: This installation lacks the files.
        UsageError: A name cannot be one of a user, group or engine.
    """
    for name in (*wish.owner, *wish.engines):
        if name is not None and not _NAME.fullmatch(name):
            raise UsageError(f"{name!r} cannot be the name of a user, group or engine")
    source = source_directory()
    return [
        UnitFile(f"{base}/{place}/{os.path.basename(target)}", _signed(rendered(_read(source, name), wish)))
        for name, place in _names(wish)
        for target in _targets(name, wish.engines)
    ]


def source_directory() -> str:
    """Return where the files lie: in the source tree that this is run from, or where the installation put them.

    Raises:
        StorageError: They are nowhere.
    """
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
    raise StorageError(
        "this installation lacks its files for systemd",
        path=beside,
        hint="pip install --force-reinstall syncd",
    )


def rendered(text: str, wish: Wish) -> str:
    """Return a file for the installation and the user of a wish."""
    user, group = wish.owner
    text = text.replace(_COMMAND, " ".join(map(quoted, wish.command)))
    runs_as = f"User={user}\n" + (f"Group={group}\n" if group else "")
    text = text.replace(f"User={OWNER}\nGroup={OWNER}\n", runs_as)
    return re.sub(rf"(?m)^(d \S+ +\d+) {OWNER} {OWNER} ", rf"\1 {user} {group or '-'} ", text)


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


def next_commands(wish: Wish) -> list[str]:
    """Return what to run once the files are there."""
    if wish.user:
        unit = '"syncd-user@$(systemd-escape -p /ckpt/job).service"'
        return [
            "systemctl --user daemon-reload",
            f"systemctl --user enable --now {unit}",
            "loginctl enable-linger",
        ]
    users = ["systemd-sysusers"] if wish.owner[0] == OWNER else []
    unit = '"syncd@$(systemd-escape -p /ckpt/job).service"'
    return [
        *users,
        "systemd-tmpfiles --create",
        "systemctl daemon-reload",
        f"systemctl enable --now {unit}",
    ]


def again(wish: Wish) -> str:
    """Return the command line that asks for the same once more, for a hint."""
    return shlex.join([*wish.command, "install-units", *(["--user"] if wish.user else [])])


def _names(wish: Wish) -> list[tuple[str, str]]:
    places = _USER_PLACES if wish.user else _PLACES
    return [
        (name, place)
        for name, place in places.items()
        if wish.owner[0] == OWNER or not name.startswith("sysusers.d")
    ]


def _targets(name: str, engines: tuple[str, ...]) -> list[str]:
    more = [name.replace("@", f"-{engine}@") for engine in engines] if "-follow" in name else []
    return [name, *more]


def _read(directory: str, name: str) -> str:
    try:
        return Path(directory, name).read_text(encoding="utf-8")
    except OSError as error:
        raise storage_error(error, f"{directory}/{name}") from error


def _signed(text: str) -> str:
    return f"# Written by syncd install-units {__version__}, digest {digest_bytes(text.encode())}.\n{text}"


def _is_as_written(text: str) -> bool:
    first = _FIRST_LINE.match(text)
    return first is not None and first[1] == digest_bytes(text[first.end() :].encode())
