"""Rules that find permissions that are too open in a snapshot; pure functions of the snapshot."""

import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from shlex import quote
from typing import Literal

from syncd.protocol.mount import UNKNOWN_MOUNT, Mount

Role = Literal["job", "parent", "state", "file", "step", "secret", "appended", "config"]
"""job: the job directory. parent: one above it. state: a directory of `.syncd/`. file: something in one that is read.
step: a step's directory. secret: holds a secret. appended: a log. config: `config.toml`."""


@dataclass(frozen=True, slots=True)
class AclEntry:
    """One entry of an access control list: who, beside owner, group and others, may do what."""

    kind: str  # `user` or `group`
    number: int
    bits: int  # 4 to read, 2 to write, 1 to enter; what the mask leaves of it
    default: bool = False  # whether it is what new files get


@dataclass(frozen=True, slots=True)
class PathAccess:
    path: str  # absolute
    role: Role  # its role in the job
    mode: int  # as `lstat` has it, with the kind
    uid: int  # its owner
    gid: int  # its group
    links: int = 1  # number of names of the file
    rights: tuple[AclEntry, ...] = ()  # its access control list

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.mode)

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)


@dataclass(frozen=True, slots=True)
class SystemdUnit:
    path: str  # its file
    settings: Mapping[str, str]  # the last value of each key of `[Service]`


@dataclass(frozen=True, slots=True)
class AccessSnapshot:
    directory: str  # the job directory, absolute
    user: int  # number of the user that runs the check
    umask: int
    entries: tuple[PathAccess, ...] = ()  # every path that was checked
    mount: Mount = UNKNOWN_MOUNT  # the mount that holds the job
    permissions: str = "umask"  # the policy of the job's configuration
    unix_group: int | None = None  # number of the policy's group, None if it has none
    policy_problem: str = ""  # why the policy cannot be read, empty if it can
    secrets: tuple[str, ...] = ()  # keys in `config.toml` that hold what looks like a secret
    weak_config: str = ""  # where others could change what `config.toml` leads to, and how; empty if nowhere
    units: tuple[SystemdUnit, ...] = ()  # the units of this host
    # Paths that could not be checked, each with the reason.
    unread: Mapping[str, str] = field(default_factory=dict)


Severity = Literal["fail", "warn", "info"]
"""fail: others can change what explorers load, or read a secret. warn: more open than needed. info: good to know."""

_READ, _WRITE = 4, 2
_ROOT = 0
_OWN = ("state", "file", "step", "appended", "config", "secret")


@dataclass(frozen=True, slots=True)
class AccessFinding:
    """One permission that is too open, or a fact worth knowing."""

    name: str  # the rule, a stable word
    severity: Severity  # how much it matters
    what: str  # what was found, and its consequence
    where: str  # a path, or what else it is about
    mend: str = ""  # the command that fixes it; empty if there is none


def judge(seen: AccessSnapshot) -> tuple[AccessFinding, ...]:
    """Return all findings, the most severe first."""
    findings = [finding for entry in seen.entries for rule in _RULES for finding in rule(seen, entry)]
    findings += [*_process(seen), *_policy(seen), *_mount(seen)]
    findings += [finding for unit in seen.units for finding in _unit(unit)]
    findings += [AccessFinding("unread", "info", why, path) for path, why in seen.unread.items()]
    order = ("fail", "warn", "info")
    return tuple(sorted(findings, key=lambda finding: order.index(finding.severity)))


def verdict(findings: Iterable[AccessFinding]) -> str:
    """Return the most severe of `fail`, `warn` and `ok`; findings of severity info do not count."""
    severities = {finding.severity for finding in findings}
    return "fail" if "fail" in severities else "warn" if "warn" in severities else "ok"


def _at(entry: PathAccess, name: str, severity: Severity, what: str, command: str) -> AccessFinding:
    """Return a finding about a path, which a command fixes that takes the path as its last argument."""
    return AccessFinding(name, severity, what, entry.path, f"{command} {quote(entry.path)}")


def _link(_: AccessSnapshot, entry: PathAccess) -> Iterator[AccessFinding]:
    if entry.is_link and entry.role not in ("parent", "config"):
        what = "a symbolic link in place of a file of the job: nothing is written through it"
        yield _at(entry, "link", "fail", what, "rm")


def _second_name(_: AccessSnapshot, entry: PathAccess) -> Iterator[AccessFinding]:
    if entry.role == "appended" and entry.links > 1 and not entry.is_directory:
        what = f"the file has {entry.links} names: nothing is appended to it"
        yield _at(entry, "second-name", "fail", what, "rm")


def _owner(seen: AccessSnapshot, entry: PathAccess) -> Iterator[AccessFinding]:
    job = next((other for other in seen.entries if other.role == "job"), entry)
    if entry.is_link or entry.uid in _trusted(seen) or entry.role not in ("parent", "state", "secret"):
        return
    if entry.role == "state" and seen.permissions == "group" and entry.gid == seen.unix_group:
        return
    what = f"user {entry.uid} owns it, and can replace what is in it"
    yield _at(entry, "owner", "warn", what, f"chown {_ROOT if entry.role == 'parent' else job.uid}")


def _everybody_writes(seen: AccessSnapshot, entry: PathAccess) -> Iterator[AccessFinding]:
    if entry.is_link or not entry.mode & stat.S_IWOTH:
        return
    if entry.role == "parent" and _is_sticky(seen, entry):
        return
    what = {
        "parent": "everybody can put another directory in the place of the job",
        "job": "everybody can add steps and replace the marker",
    }.get(entry.role, "everybody can change it")
    yield _at(entry, "world-writable", "fail", what, "chmod o-w")


def _is_sticky(seen: AccessSnapshot, entry: PathAccess) -> bool:
    """Return whether others cannot touch what leads from a directory on to the job, as in /tmp."""
    below = (other for other in seen.entries if other.path.rpartition("/")[0] == entry.path.rstrip("/"))
    trusted = _trusted(seen)
    return bool(entry.mode & stat.S_ISVTX) and all(
        other.uid in trusted for other in below if other.role in ("parent", "job")
    )


def _trusted(seen: AccessSnapshot) -> set[int]:
    """Return the users who may change the job."""
    return {_ROOT, seen.user, *(entry.uid for entry in seen.entries if entry.role == "job")}


def _group_writes(seen: AccessSnapshot, entry: PathAccess) -> Iterator[AccessFinding]:
    if entry.is_link or not entry.mode & stat.S_IWGRP or (entry.role == "parent" and entry.gid == _ROOT):
        return
    if seen.permissions == "group" and entry.gid == seen.unix_group:
        return
    if entry.role == "parent" and _is_sticky(seen, entry):
        return
    what = f"group {entry.gid} can change it, and the job's policy is {seen.permissions!r}"
    severity: Severity = "fail" if entry.role in ("secret", "config") else "warn"
    yield _at(entry, "group-writable", severity, what, "chmod g-w")


def _secret(_: AccessSnapshot, entry: PathAccess) -> Iterator[AccessFinding]:
    if entry.role == "secret" and not entry.is_link and entry.mode & (stat.S_IRGRP | stat.S_IROTH):
        who = "everybody" if entry.mode & stat.S_IROTH else f"group {entry.gid}"
        what = f"it holds a secret, and {who} can read it"
        yield _at(entry, "readable-secret", "fail", what, "chmod 600")


def _readable(seen: AccessSnapshot, entry: PathAccess) -> Iterator[AccessFinding]:
    others = stat.S_IROTH | stat.S_IXOTH
    if entry.role == "job" and seen.permissions == "umask" and entry.mode & others:
        what = "everybody on every host that mounts it can read the job"
        mend = f'chmod o-rwx {quote(entry.path)}; and permissions = "private" or "group" in [job]'
        yield AccessFinding("world-readable", "warn", what, entry.path, mend)


def _against_policy(seen: AccessSnapshot, entry: PathAccess) -> Iterator[AccessFinding]:
    if entry.is_link or entry.role == "parent" or seen.permissions == "umask":
        return
    closed = 0o077 if seen.permissions == "private" else 0o007
    if entry.mode & closed & ~stat.S_IWOTH:
        what = f"mode {stat.S_IMODE(entry.mode):o}, and the job's policy is {seen.permissions!r}"
        yield _at(
            entry, "against-policy", "fail", what, f"chmod {'go' if seen.permissions == 'private' else 'o'}="
        )
    if seen.permissions == "group" and entry.is_directory and not entry.mode & stat.S_ISGID:
        what = "no setgid: new files in it do not belong to the job's group"
        yield _at(entry, "no-setgid", "warn", what, "chmod g+s")


def _rights(seen: AccessSnapshot, entry: PathAccess) -> Iterator[AccessFinding]:
    for right in entry.rights:
        if right.kind == "user" and right.number in (_ROOT, seen.user, entry.uid):
            continue
        if right.kind == "group" and seen.permissions == "group" and right.number == seen.unix_group:
            continue
        reads_secret = entry.role == "secret" and right.bits & _READ
        if not right.bits & _WRITE and not reads_secret:
            continue
        what = f"an access control list lets {right.kind} {right.number} {'write' if right.bits & _WRITE else 'read'}"
        listed = f"{'default:' if right.default else ''}{right.kind}:{right.number}"
        yield _at(entry, "acl", "fail", what, f"setfacl -x {listed}")


_RULES: tuple[Callable[[AccessSnapshot, PathAccess], Iterator[AccessFinding]], ...] = (
    _link, _second_name, _owner, _everybody_writes, _group_writes, _secret, _readable, _against_policy, _rights,
)  # fmt: skip


def _process(seen: AccessSnapshot) -> Iterator[AccessFinding]:
    if seen.user == _ROOT:
        what = "this is root: run trainer, daemon and explorers as a user of the cluster"
        yield AccessFinding("root", "warn", what, "user 0", "sudo syncd install-units --run-as USER:GROUP")
    if seen.permissions == "umask" and not seen.umask & stat.S_IWOTH:
        what = f"umask {seen.umask:04o}: everybody can change the files that this user makes"
        yield AccessFinding("umask", "fail", what, "umask", "umask 022")
    elif seen.permissions == "umask" and not seen.umask & stat.S_IWGRP:
        what = f"umask {seen.umask:04o}: the group can change the files that this user makes"
        yield AccessFinding("umask", "info", what, "umask", 'permissions = "group" in [job] says which group')


def _policy(seen: AccessSnapshot) -> Iterator[AccessFinding]:
    config = f"{seen.directory}/config.toml"
    if seen.policy_problem:
        yield AccessFinding("policy", "fail", seen.policy_problem, config, f"less {quote(config)}")
    if seen.weak_config:
        what = f"others could have written it ({seen.weak_config}): programs run no code that it names"
        yield AccessFinding(
            "untrusted-config", "info", what, config, "--trust-job-file, where you know what is in it"
        )
    for key in seen.secrets:
        what = f"{key} looks like a secret, in a file that stays in the job"
        mend = f"take {key} out of {quote(config)}; give it by the environment, or by a credential of systemd"
        yield AccessFinding("secret-in-config", "fail", what, config, mend)


def _mount(seen: AccessSnapshot) -> Iterator[AccessFinding]:
    mount, point = seen.mount, seen.mount.point
    missing = ",".join(name for name in ("nosuid", "nodev") if mount.option(name) is None)
    if missing and mount.is_network:
        what = f"mounted without {missing}; jobs need neither set-uid programs nor devices"
        yield AccessFinding("mount", "info", what, point, f"mount -o remount,{missing} {quote(point)}")
    if mount.type.startswith("nfs"):
        what = "only the server shows no_root_squash: with it root of any host owns all jobs"
        mend = "on the server: exportfs -v | grep no_root_squash"
        yield AccessFinding("root-squash", "info", what, mount.source, mend)
        if mount.option("sec") in (None, "sys"):
            what = "sec=sys: the server trusts each host to say which user it is"
            yield AccessFinding("nfs-security", "info", what, point, "sec=krb5p, where hosts are not trusted")


def _unit(unit: SystemdUnit) -> Iterator[AccessFinding]:
    drop_in = f"systemctl edit {unit.path.rpartition('/')[2]}"
    user = unit.settings.get("User", "root")
    if "/user/" not in unit.path and user in ("root", "0"):
        mend = f"{drop_in}   # [Service] User="
        yield AccessFinding("unit-root", "fail", "the service runs as root", unit.path, mend)
    if unit.settings.get("NoNewPrivileges", "no").lower() not in ("yes", "true", "1", "on"):
        mend = f"{drop_in}   # [Service] NoNewPrivileges=yes"
        yield AccessFinding("unit-privileges", "warn", "the service may gain privileges", unit.path, mend)
    if unit.settings.get("UMask", "0022") in ("0000", "000", "00", "0"):
        what = "UMask=0: everybody can change the files that it makes"
        yield AccessFinding("unit-umask", "fail", what, unit.path, drop_in)
