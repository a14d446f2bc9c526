"""Where benchmarks/readers.py runs: hosts with limited links around a stand-in for a file server, or around NFS."""

import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from links import Links

from syncd.protocol.layout import Job

ROOT = Path(__file__).parents[1]
_ORIGIN = ROOT / "tests" / "parts" / "hosts" / "programs" / "bed_origin.py"
_SERVER = "10.99.9.1"


class LinksBed:
    """Namespaces of this machine. The step's files come by a mount of FUSE through the origin's link.

    Args:
        readers: How many.
        rate: Of the origin's link, in MB/s; each reader's is twice that, each way.
        job: What is read.
        place: For files of the bed.
    """

    def __init__(self, readers: int, rate: float, job: Job, place: Path) -> None:
        self._links = Links(readers, rate, 2 * rate, 2 * rate)
        self._job, self._ready, self._place = job, place / "origin.ready", place

    def __enter__(self) -> Self:
        self._links.__enter__()
        log = f"{self._ready}.sent"
        command = [sys.executable, str(_ORIGIN), self._job.root, "8000", str(self._ready), log]
        self._origin = self.popen("o", command, stdout=subprocess.DEVNULL)
        return self

    def __exit__(self, *_: object) -> None:
        self._origin.kill()
        self._origin.wait()
        self._links.__exit__()

    def popen(self, name: str, command: list[str], **more: Any) -> "subprocess.Popen[str]":
        """Start a program at the origin, `o`, or at a reader, `h0` to `hN`."""
        process: subprocess.Popen[str] = self._links.popen(name, command, **more)
        return process

    def ip(self, name: str) -> str:
        """Return the address of an end."""
        return str(self._links.ip(name))

    def sent(self) -> int:
        """Return the bytes that the origin has sent."""
        return int(self._links.sent("o"))

    def settings(self, name: str) -> dict[str, Any]:
        """Return how a reader finds the job."""
        return {
            "name": name, "space": self._links.space(name), "ip": self.ip(name), "job": self._job.root,
            "origin": f"{self.ip('o')}:8000",
        }  # fmt: skip


class NfsBed(LinksBed):
    """Inside of tests/beds/nfs-bed: namespaces around a bridge, each a client of NFS with a mount of its own."""

    def __init__(self, readers: int, rate: float, job: Job, place: Path) -> None:
        self._names = [f"h{number}" for number in range(readers)]
        self._rate, self._job, self._place = rate, job, place

    def __enter__(self) -> Self:
        _run("ip link add br0 type bridge")
        _run(f"ip addr add {_SERVER}/24 dev br0")
        _run("ip link set br0 up")
        for name in self._names:
            self._plug(name)
        self._limit("br0", self._rate)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._names:
            _run(f"ip link del v{name}")  # else it goes with its namespace, some time later
            _run(f"ip netns del {name}")
        _run("ip link del br0")

    def popen(self, name: str, command: list[str], **more: Any) -> "subprocess.Popen[str]":
        """Start a program at the server, `o`, or at a reader."""
        where = [] if name == "o" else ["ip", "netns", "exec", name]
        return subprocess.Popen([*where, *command], **more)

    def ip(self, name: str) -> str:
        """Return the address of an end."""
        return _SERVER if name == "o" else f"10.99.9.{10 + int(name[1:])}"

    def sent(self) -> int:
        """Return the bytes that the server has sent to readers; what they send each other does not pass here."""
        return int(Path("/sys/class/net/br0/statistics/tx_bytes").read_text())

    def settings(self, name: str) -> dict[str, Any]:
        """Return how a reader finds the job."""
        mount = f"/dev/shm/readers/{name}"
        job = f"{mount}/{Path(self._job.root).name}"
        return {"name": name, "space": name, "ip": self.ip(name), "job": job, "nfs": _SERVER, "mount": mount}

    def _plug(self, name: str) -> None:
        _run(f"ip netns add {name}")
        _run(f"ip link add v{name} type veth peer name e0 netns {name}")
        _run(f"ip link set v{name} master br0 up")
        _run(f"ip -n {name} addr add {self.ip(name)}/24 dev e0")
        _run(f"ip -n {name} link set e0 up")
        _run(f"ip -n {name} link set lo up")
        self._limit(f"v{name}", 2 * self._rate)
        self._limit("e0", 2 * self._rate, name)

    def _limit(self, device: str, rate: float, space: str = "") -> None:
        where = f"-n {space}" if space else ""
        bucket = f"tbf rate {int(rate * 8000)}kbit burst 256kb latency 60ms"
        _run(f"tc {where} qdisc replace dev {device} root {bucket}")


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)
