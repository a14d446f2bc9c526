"""Which file system a path is on, and what that means for watching it."""

import os
import re
from dataclasses import dataclass

NETWORK = frozenset(
    {
        "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "afs", "ocfs2", "gfs2",
        "orangefs", "pvfs2", "wekafs", "panfs", "daos", "virtiofs", "hostfs", "glusterfs",
    }
)  # fmt: skip
"""File systems on which another host's changes raise no inotify event here."""

_MOUNTINFO = "/proc/self/mountinfo"
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One mounted file system.

    Args:
        point: Where it is mounted.
        type: Its type as the kernel names it; a FUSE file system may carry its own name (`fuse.sshfs`).
        options: Its options, those of the mount and those of the file system.
        source: The device or server.
    """

    point: str
    type: str
    options: tuple[str, ...] = ()
    source: str = ""

    @property
    def is_network(self) -> bool:
        """Say whether other hosts may change it unseen by this kernel. FUSE counts: nothing better is known."""
        return self.type in NETWORK or self.type == "fuse" or self.type.startswith("fuse.")

    def option(self, name: str) -> str | None:
        """Return the value of an option `name=value`, empty for a plain `name`, None without it."""
        for option in self.options:
            key, _, value = option.partition("=")
            if key == name:
                return value
        return None


UNKNOWN = Mount("/", "unknown")


def mount_of(path: str) -> Mount:
    """Return the mount that holds a path, `UNKNOWN` where the kernel does not say."""
    try:
        with open(_MOUNTINFO, encoding="utf-8", errors="surrogateescape") as file:
            return find_mount(os.path.realpath(path), file.read())
    except OSError:
        return UNKNOWN


def find_mount(path: str, mountinfo: str) -> Mount:
    """Return the innermost mount of an absolute path by the text of `/proc/self/mountinfo`."""
    best = UNKNOWN
    for line in mountinfo.splitlines():
        mount = _parse(line)
        # Of two mounts on one point the later one is on top.
        if mount and _holds(mount.point, path) and len(mount.point) >= len(best.point):
            best = mount
    return best


def _holds(point: str, path: str) -> bool:
    return point in ("/", path) or path.startswith(f"{point}/")


def _parse(line: str) -> Mount | None:
    left, separator, right = line.partition(" - ")
    fields, system = left.split(" "), right.split(" ")
    if not separator or len(fields) < 6 or len(system) < 3:  # noqa: PLR2004 - the fixed columns of proc(5)
        return None
    options = tuple(dict.fromkeys([*fields[5].split(","), *system[2].split(",")]))
    return Mount(_unescape(fields[4]), system[0], options, _unescape(system[1]))


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)
