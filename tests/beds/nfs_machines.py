"""Three machines, an NFS server and two clients, each a kernel of its own: to be killed, booted again and cut off.

Each is a user-mode Linux that sees all files of the host read-only. They share a bridge in a network namespace of
their own. The server's disk is a file of the host: what the server has made durable there outlives it.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
ADDRESSES = {"server": "10.98.0.1", "a": "10.98.0.2", "b": "10.98.0.3"}
STILL = 60.0
"""Seconds without a sign of life after which a machine stands still: no verdict on what runs in it."""


class StoodStillError(Exception):
    """A machine of the bed itself stands still."""


class Machines:
    """The three machines.

    Args:
        place: A directory of the host for all that they need; short, and empty.
        scripts: What each machine runs, by its name.
        options: Of the mount.
    """

    def __init__(self, place: Path, scripts: dict[str, str], options: str = "vers=4.2") -> None:
        self.place, self.out, self._options = place, place / "out", options
        self._namespace = f"syncd-nfs-{os.getpid()}"
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._signs: dict[str, tuple[str, float]] = {}
        for name in ("out", "disk", "mnt"):
            (place / name).mkdir()
        for name, text in scripts.items():
            (place / f"{name}.sh").write_text(text)
        self._disk = place / "disk.img"
        _run("truncate", "-s", "512M", str(self._disk))
        _run("mkfs.ext4", "-qF", str(self._disk))
        # Processors with AMX need help; without a compiler it is tried without.
        library, compiler = (
            place / "xstate.so",
            shutil.which("cc") or shutil.which("gcc") or shutil.which("tcc"),
        )
        if compiler:
            source = str(HERE / "xstate.c")
            _tried(compiler, "-shared", "-fPIC", "-nostdlib", "-o", str(library), source)
        self._preload = [f"LD_PRELOAD={library}"] if library.exists() else []

    def wire(self) -> None:
        """Make the network."""
        _run("ip", "netns", "add", self._namespace)
        self._inside("ip", "link", "add", "bridge0", "type", "bridge")
        self._inside("ip", "link", "set", "bridge0", "up")
        for name in ADDRESSES:
            self._inside("ip", "tuntap", "add", "dev", f"tap-{name}", "mode", "tap")
            self._inside("ip", "link", "set", f"tap-{name}", "master", "bridge0", "up")

    def boot(self, name: str) -> None:
        """Switch a machine on."""
        role = "server" if name == "server" else "client"
        words = [
            "env", "-i", f"HOME={self.place}", "TMPDIR=/dev/shm", *self._preload,
            "linux.uml", "mem=512M", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro",
            f"init={HERE}/nfs-machine-init", "con=null", "con0=null,fd:1", "ssl=null", "quiet",
            f"umid={name}", f"vec0:transport=tap,ifname=tap-{name},depth=128,gro=1",
            *([f"ubd0={self._disk}"] if role == "server" else []),
            f"ROLE={role}", f"NAME={name}", f"ADDRESS={ADDRESSES[name]}", f"NFSOPT={self._options}",
            f"BED={self.place}", f"SCRIPT={self.place}/{name}.sh",
        ]  # fmt: skip
        with open(self.place / f"{name}.console", "ab") as console:
            self._running[name] = subprocess.Popen(
                ["ip", "netns", "exec", self._namespace, *words],
                stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True,
            )  # fmt: skip
        self._signs.pop(name, None)

    def kill(self, name: str) -> float:
        """Take a machine's power away; return when, in seconds since the epoch."""
        machine, at = self._running.pop(name), time.time()
        for pid in _session(machine.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        machine.wait(30)
        return at

    def cut(self, name: str) -> float:
        """Cut a machine off the network; return when."""
        self._inside("ip", "link", "set", f"tap-{name}", "nomaster")
        return time.time()

    def heal(self, name: str) -> float:
        """Put a machine back on the network; return when."""
        self._inside("ip", "link", "set", f"tap-{name}", "master", "bridge0")
        return time.time()

    def tell(self, name: str) -> None:
        """Make the file that a script waits for."""
        (self.out / name).touch()

    def until(self, holds: Callable[[], object], what: str, seconds: float = 120.0) -> None:
        """Wait for something.

        Raises:
            StoodStillError: A machine does not run any more, though nobody has ended it.
            AssertionError: It has not come.
        """
        ends = time.monotonic() + seconds
        while not holds():
            self._check()
            assert time.monotonic() < ends, f"waited in vain for {what}\n{self.report()}"
            time.sleep(0.1)

    def report(self) -> str:
        """Return the ends of all logs."""
        logs = [*sorted(self.place.glob("*.console")), *sorted(self.out.glob("*.log"))]
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2500:]}" for log in logs)

    def close(self) -> None:
        """End all machines, and the network."""
        for name in list(self._running):
            self.kill(name)
        _tried("ip", "netns", "delete", self._namespace)
        self._disk.unlink(missing_ok=True)

    def _check(self) -> None:
        for name in self._running:
            if (self.out / f"{name}.rc").exists():
                continue
            path = self.out / f"{name}.heartbeat"
            sign = path.read_text() if path.exists() else ""
            before, since = self._signs.get(name, (None, 0.0))
            if sign != before:
                self._signs[name] = sign, time.monotonic()
            elif time.monotonic() - since > STILL:
                raise StoodStillError(f"machine {name}: no sign of life after {sign!r}")

    def _inside(self, *command: str) -> None:
        _run("ip", "netns", "exec", self._namespace, *command)


@contextlib.contextmanager
def machines(place: Path, scripts: dict[str, str]) -> Iterator[Machines]:
    """Boot three machines, and leave nothing of them behind but files."""
    made = Machines(place, scripts)
    try:
        made.wire()
        for name in ADDRESSES:
            made.boot(name)
        yield made
    finally:
        made.close()


def _session(leader: int) -> list[int]:
    """Return the processes of a machine: its kernel leads their session."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file,
        ):
            fields = file.read().rpartition(")")[2].split()
            if leader in (int(pid), int(fields[3])):
                found.append(int(pid))
    return found


def _tried(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
