"""`syncd doctor --security`: collects who may do what around a job, judges it, and reports; writes nothing."""

import contextlib
import glob
import os
import re
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from syncd.errors import ConfigError, JobMissingError, plain
from syncd.parts.doctor.probe import STUCK, answering, bounded
from syncd.parts.doctor.security_rules import (
    AccessFinding,
    AccessSnapshot,
    AclEntry,
    PathAccess,
    Role,
    SystemdUnit,
    judge,
    verdict,
)
from syncd.protocol.disk import list_if_there
from syncd.protocol.documents import PROTOCOL
from syncd.protocol.layout import CONFIG, STATE, Job, parse_step_name, read_config_file
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.mount import Mount, mount_of
from syncd.protocol.path_trust import weak_level
from syncd.protocol.permissions import modes_of, parse_config, policy_in

ENTRIES = 2000  # the most names that are checked in one directory: a job may have millions of files

_UNITS = ("/etc/systemd/system/syncd*.service", "~/.config/systemd/user/syncd*.service")
_SECRETS = ("/etc/syncd/*.env", "/etc/credstore/hook-token*", "~/.config/syncd/*.env")
_WORDS = ("token", "secret", "password", "passwd", "api_key", "apikey", "credential")
_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]+@")
_ACLS = (("system.posix_acl_access", False), ("system.posix_acl_default", True))
_USER, _GROUP, _MASK = 0x02, 0x08, 0x10


def collect(directory: str, state_dir: str | None = None, secrets: Iterable[str] = ()) -> AccessSnapshot:
    """Return who may do what around a job; `secrets` are further files that hold secrets: files of tokens."""
    job = Job.at(directory, state_dir)
    unread: dict[str, str] = {}
    mount = mount_of(job.root)
    roles = dict(_places(job, mount, unread))
    roles |= dict.fromkeys((os.path.abspath(path) for path in (*_matching(_SECRETS), *secrets)), "secret")
    entries = tuple(entry for path, role in roles.items() if (entry := _entry(path, role, unread)))
    document: dict[str, Any] = {}
    policy: tuple[str, int | None] = "umask", None
    problem = ""
    try:
        document = _config(job, unread)
        permissions, group = policy_in(document, f"{job.root}/{CONFIG}")
        policy = permissions, modes_of(permissions, group).unix_group
    except ConfigError as error:
        problem = error.message
    return AccessSnapshot(
        directory=job.root,
        user=os.geteuid(),
        umask=_umask(),
        entries=entries,
        mount=mount,
        permissions=policy[0],
        unix_group=policy[1],
        policy_problem=problem,
        secrets=tuple(secret_keys(document)),
        weak_config=_weak_config(job),
        units=tuple(map(_unit, _matching(_UNITS))),
        unread=unread,
    )


def _places(job: Job, mount: Mount, unread: dict[str, str]) -> Iterator[tuple[str, Role]]:
    yield from ((path, "parent") for path in _parents(job.root, mount.point))
    yield job.root, "job"
    for name, is_directory in _names(job.root, unread):
        if is_directory and parse_step_name(name) is not None:
            yield f"{job.root}/{name}", "step"
        elif name == CONFIG:
            yield f"{job.root}/{name}", "config"
        elif name in (os.path.basename(job.marker), os.path.basename(job.tracker)):
            yield f"{job.root}/{name}", "file"
    yield from _below(job.state, unread, 4)
    if job.state != f"{job.root}/{STATE}":
        yield from _below(f"{job.root}/{STATE}", unread, 1)


def _below(path: str, unread: dict[str, str], depth: int) -> Iterator[tuple[str, Role]]:
    if not os.path.lexists(path):
        return
    yield path, "state"
    for name, is_directory in _names(path, unread) if depth else ():
        child = f"{path}/{name}"
        if is_directory:
            # What is in the trash is removed soon; the mode of its directory decides who can add to it.
            yield from _below(child, unread, 0 if name == "trash" else depth - 1)
        elif name == "offer.json":
            yield child, "secret"
        else:
            yield child, "appended" if name.startswith(("events.jsonl", "daemon.log")) else "file"


def _names(path: str, unread: dict[str, str]) -> list[tuple[str, bool]]:
    try:
        entries = list_if_there(LocalDisk(), path)
    except OSError as error:
        unread[path] = error.strerror or str(error)
        return []
    if len(entries) > ENTRIES:
        unread[path] = f"only {ENTRIES} of {len(entries)} names were checked"
    return [(entry.name, entry.kind == "directory") for entry in sorted(entries)[:ENTRIES]]


def _parents(path: str, mount_point: str) -> Iterator[str]:
    while path not in ("/", mount_point):
        path = os.path.dirname(path)
        yield path


def _entry(path: str, role: Role | str, unread: dict[str, str]) -> PathAccess | None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        unread[path] = error.strerror or str(error)
        return None
    rights = () if stat.S_ISLNK(status.st_mode) else tuple(_rights(path))
    return PathAccess(path, role, status.st_mode, status.st_uid, status.st_gid, status.st_nlink, rights)  # type: ignore[arg-type]


def _rights(path: str) -> Iterator[AclEntry]:
    for name, default in _ACLS:
        with contextlib.suppress(OSError):
            yield from rights_in(os.getxattr(path, name, follow_symlinks=False), default=default)


def rights_in(data: bytes, *, default: bool) -> Iterator[AclEntry]:
    """Yield what an attribute of POSIX access control lists gives to users and groups by name, less its mask."""
    entries = list(struct.iter_unpack("<HHI", data[4 : 4 + (len(data) - 4) // 8 * 8]))
    mask = next((bits for tag, bits, _ in entries if tag == _MASK), 7)
    for tag, bits, number in entries:
        if tag in (_USER, _GROUP):
            yield AclEntry("user" if tag == _USER else "group", number, bits & mask, default)


def _config(job: Job, unread: dict[str, str]) -> dict[str, Any]:
    path = f"{job.root}/{CONFIG}"
    try:
        return parse_config(read_config_file(path), path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        unread[path] = error.strerror or str(error)
        return {}


def _weak_config(job: Job) -> str:
    with contextlib.suppress(OSError):
        return str(weak_level(f"{job.root}/{CONFIG}") or "")
    return ""


def secret_keys(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of keys whose names say that their text is a secret; never the text."""
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from secret_keys(value, f"{name}.")
        elif isinstance(value, str) and value and (_is_secret(key) or _PASSWORD.search(value)):
            yield name


def _is_secret(key: str) -> bool:
    lowered = key.lower()
    # `token_env` and `token_file` name where a secret is.
    return any(word in lowered for word in _WORDS) and not lowered.endswith(
        ("_env", "_file", "_path", "tokenizer")
    )


def _matching(patterns: Iterable[str]) -> list[str]:
    return [path for pattern in patterns for path in sorted(glob.glob(os.path.expanduser(pattern)))]


def _unit(path: str) -> SystemdUnit:
    settings: dict[str, str] = {}
    for part in (path, *sorted(glob.glob(f"{glob.escape(path)}.d/*.conf"))):
        with contextlib.suppress(OSError, ConfigError):
            settings |= service_settings(read_config_file(part).decode(errors="replace"))
    return SystemdUnit(path, settings)


def service_settings(text: str) -> dict[str, str]:
    section, settings = "", {}
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            section = line
        elif section == "[Service]" and "=" in line and line[0] not in "#;":
            key, _, value = line.partition("=")
            settings[key.strip()] = value.strip()
    return settings


def _umask() -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next((int(line.split()[1], 8) for line in file if line.startswith("Umask:")), 0o022)


SCHEMA = 1  # version of the JSON output: grows when a field changes its meaning or goes

_VERDICTS = {
    "ok": "no permission is too open",
    "warn": "more open than needed",
    "fail": "too open",
}


@dataclass(frozen=True, slots=True)
class AccessReport:
    directory: str  # the job directory, absolute
    permissions: str  # the policy of its configuration
    findings: tuple[AccessFinding, ...]  # the findings, the most severe first

    @property
    def verdict(self) -> str:
        return verdict(self.findings)

    def document(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA,
            "protocol": PROTOCOL,
            "directory": self.directory,
            "permissions": self.permissions,
            "findings": [asdict(finding) for finding in self.findings],
            "verdict": self.verdict,
        }

    def lines(self) -> list[str]:
        lines = [text for finding in self.findings for text in _lines(finding)]
        return [
            *lines,
            f"{plain(self.directory)}: {_VERDICTS[self.verdict]} (permissions = {self.permissions!r})",
        ]


def _lines(finding: AccessFinding) -> list[str]:
    first = f"{finding.severity:<4}  {finding.name:<16}  {plain(finding.where)}: {plain(finding.what)}"
    return [first, *([f"      -> {plain(finding.mend)}"] if finding.mend else [])]


def examine(directory: str, state_dir: str | None = None, secrets: Iterable[str] = ()) -> AccessReport:
    with answering(directory):
        if not bounded(lambda: os.path.isdir(directory), STUCK):
            raise JobMissingError("no such directory", path=directory, hint=f"ls -ld {directory}")
        snapshot = bounded(lambda: collect(directory, state_dir, secrets), STUCK)
    return AccessReport(snapshot.directory, snapshot.permissions, judge(snapshot))
