"""What this machine can do: each function returns why a bed cannot be used, or None when it can.

Abilities are tried, never guessed from names or versions; each answer is kept for the session.
"""

import errno
import functools
import os
import shutil
import subprocess
import tempfile

from beds.loop import mounted
from beds.machine import booted
from beds.quota import limited
from beds.silent import silent

BEDS = os.path.dirname(os.path.abspath(__file__))


@functools.cache
def strace_injection() -> str | None:
    """Try to fail one system call of a process: `mkdir` here."""
    if missing := _missing("strace"):
        return missing
    options = ["strace", "-f", "--seccomp-bpf", "-e", "trace=mkdir", "-e", "inject=mkdir:error=ENOSPC:when=1"]
    with tempfile.TemporaryDirectory() as place:
        done = _run([*options, "mkdir", f"{place}/new"])
        if "INJECTED" not in done.stderr or os.path.exists(f"{place}/new"):
            return f"strace cannot inject: {_last_line(done.stderr)}"
    return None


@functools.cache
def root() -> str | None:
    """Say whether this is root."""
    return None if os.geteuid() == 0 else "not root"


@functools.cache
def loop_mount(kind: str) -> str | None:
    """Try to make, mount, cut off and remount a file system of `kind`."""
    if reason := root() or _missing(f"mkfs.{kind}", "mount"):
        return reason
    try:
        with mounted(kind) as loop:
            loop.sync()
            loop.cut_and_remount()
    except OSError as error:
        return f"no loop-mounted {kind}: {error}"
    return None


@functools.cache
def nfs() -> str | None:
    """Try to boot the NFS bed."""
    if reason := root() or _missing("linux.uml", "mkfs.ext4", "ip", "exportfs", "rpcbind", "mount.nfs"):
        return reason
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as script:
        script.write("on_a touch $A/seen && on_b ls $B/seen\n")
        script.flush()
        done = _run([f"{BEDS}/nfs-bed", script.name], LIMIT="60")
    return None if done.returncode == 0 else f"no NFS bed: {_last_line(done.stdout + done.stderr)}"


@functools.cache
def nfs_machines() -> str | None:
    """Try to make the network of three machines, where one machine can be booted."""
    if reason := nfs():
        return reason
    name = f"syncd-probe-{os.getpid()}"
    done = _run(["ip", "netns", "add", name])
    if done.returncode == 0:
        done = _run(["ip", "netns", "exec", name, "ip", "tuntap", "add", "dev", "tap0", "mode", "tap"])
        _run(["ip", "netns", "delete", name])
    return None if done.returncode == 0 else f"no network of machines: {_last_line(done.stderr)}"


@functools.cache
def fuse() -> str | None:
    """Say whether FUSE file systems can be mounted."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no /dev/fuse"
    return _missing("fusermount3")


@functools.cache
def silent_mount() -> str | None:
    """Try to mount what never answers."""
    if reason := root():
        return reason
    try:
        with tempfile.TemporaryDirectory() as place, silent(place):
            return None
    except OSError as error:
        return f"no mount that never answers: {error}"


@functools.cache
def tmpfs(options: str) -> str | None:
    """Try to mount a tmpfs with some options."""
    if reason := root():
        return reason
    with tempfile.TemporaryDirectory() as place:
        done = _run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place])
        if done.returncode == 0:
            _run(["umount", place])
    return None if done.returncode == 0 else f"no tmpfs with {options}: {_last_line(done.stderr)}"


@functools.cache
def quota() -> str | None:
    """Try to use a real quota up."""
    if reason := root() or _missing("mkfs.btrfs", "btrfs", "mount"):
        return reason
    try:
        with limited("1M") as made:
            return _unless_used_up(f"{made.point}/filler")
    except OSError as error:
        return f"no quota of btrfs: {_last_line(str(error))}"


def _unless_used_up(filler: str) -> str | None:
    try:
        with open(filler, "wb", buffering=0) as file:
            file.writelines([b"x" * 65536] * 64)
    except OSError as error:
        return None if error.errno == errno.EDQUOT else f"btrfs's quota fails otherwise: {error}"
    return "btrfs's quota lets everything through"


@functools.cache
def slurm() -> str | None:
    """Try to run one task in the Slurm bed."""
    if reason := root() or _missing("slurmctld", "slurmd", "srun", "munged", "ip", "unshare"):
        return reason
    done = _run([f"{BEDS}/slurm-bed", "srun", "true"], LIMIT="60")
    return None if done.returncode == 0 else f"no Slurm bed: {_last_line(done.stdout + done.stderr)}"


@functools.cache
def systemd() -> str | None:
    """Try to boot a machine with systemd."""
    if reason := root() or _missing("systemd-nspawn", "systemctl", "dbus-daemon", "nsenter", "unshare"):
        return reason
    try:
        with booted():
            return None
    except OSError as error:
        return f"no systemd bed: {_last_line(str(error))}"


def _missing(*programs: str) -> str | None:
    absent = [program for program in programs if shutil.which(program) is None]
    return f"{', '.join(absent)} not installed (tests/beds/install.sh)" if absent else None


def _run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False, env=os.environ | environment
    )


def _last_line(text: str) -> str:
    panic = [line for line in text.splitlines() if "panic" in line]
    return (panic or text.strip().splitlines() or ["no output"])[-1]
