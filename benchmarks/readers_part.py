"""A reader of benchmarks/readers.py, in a network namespace of its own: it takes a step in the way that is named.

Its import has the product cut a step that is small for slow links as it cuts a large one for fast links.
"""

import ctypes
import hashlib
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import readers_mount
from safetensors.numpy import load_file

import syncd.protocol.delta

PIECE = 256 << 10
syncd.protocol.delta.TILE = PIECE

from support.fake_hook import FakeEngine, FakeHook  # noqa: E402 - what is imported now sees the small pieces

import syncd.protocol.safetensors  # noqa: E402
import syncd.transports.delta.chain  # noqa: E402
from explorer_hooks.follower.policy import FollowOptions  # noqa: E402
from explorer_hooks.follower.versions import Fetcher  # noqa: E402
from syncd.client.client import Client  # noqa: E402
from syncd.parts.hosts import pieces  # noqa: E402
from syncd.transports.files.leased_directory import HeldDirectory, LoadTimings  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

Found = dict[str, Any]
_LIBC, _NEW_MOUNTS = ctypes.CDLL(None, use_errno=True), 0x00020000
OURS = ("alone", "stage", "peers")


syncd.protocol.safetensors._FIRST_READ = 2 << 10  # noqa: SLF001
syncd.transports.delta.chain._AHEAD = PIECE // 2  # noqa: SLF001
assert pieces._RUN == PIECE // 8, "imported with large pieces"  # noqa: SLF001


class Reader:
    """Takes steps.

    Args:
        settings: Name and address of the reader, the job as it sees it, a directory for what it has, the bed.
    """

    def __init__(self, settings: Found) -> None:
        self._settings = settings
        self._place = Path(settings["place"])
        self._fetchers: dict[str, tuple[Fetcher, Client]] = {}
        self._held: dict[str, HeldDirectory] = {}
        self._loaded: list[Any] = []
        self._warned: list[str] = []
        self._ways: dict[str, Callable[[Found], Found]] = {
            **dict.fromkeys(OURS, self._fetch),
            "cp": self._copy,
            "load_file": self._load,
            "libtorrent": self._torrent,
            "super-seed": self._torrent,
        }

    def prepare(self, work: Found) -> Found:
        """Get ready to take a step, which is there already."""
        if "origin" in self._settings:
            name = f"global_step_{work['step']}"
            readers_mount.mount(f"{self._settings['job']}/{name}", self._settings["origin"], f"/{name}")
        if work["way"] in OURS and work["way"] not in self._fetchers:
            self._fetchers[work["way"]] = self._opened(work["way"])
        if "torrent" in work:
            self._start_torrent(work)
        return {}

    def take(self, work: Found) -> Found:
        """Take the step, and return what that took and what came."""
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        before, processor = _memory("VmRSS"), time.process_time()
        found = self._ways[work["way"]](work)
        found.setdefault("ended", time.monotonic())
        found.setdefault("cpu", time.process_time() - processor)
        found.setdefault("memory", _memory("VmHWM") - before)
        return {**found, "files": self._digests(work["way"], found["at"], work["shards"])}

    def _opened(self, way: str) -> tuple[Fetcher, Client]:
        name = self._settings["name"]
        client = Client.open(self._settings["job"], "explorer", f"{name}-{way}")
        stage = str(self._place / way) if way != "alone" else None
        peers = f"{self._settings['ip']}:7410" if way == "peers" else None
        options = FollowOptions(stage=stage, peers=peers)
        fetcher = Fetcher(client, FakeHook(FakeEngine()), options, lambda: False, self._tell)
        if peers:
            fetcher._reader._is_auto = False  # type: ignore[attr-defined]  # noqa: SLF001 - it reads what is small alone
        return fetcher, client

    def _tell(self, level: str, name: str, **fields: object) -> None:
        if level == "warning":
            self._warned.append(f"{name} {fields}")

    def _fetch(self, work: Found) -> Found:
        self._warned = []
        fetcher, client = self._fetchers[work["way"]]
        held = fetcher.fetch(work["step"], LoadTimings(client.clock))
        if work["way"] == "alone":
            self._read(Path(held.directory.path), work["shards"])
        ended = time.monotonic()
        before, self._held[work["way"]] = self._held.get(work["way"]), held
        if before:
            before.release()
            before.lease.close()
        return {"ended": ended, "at": held.directory.path, "warned": self._warned}

    def _load(self, work: Found) -> Found:
        at = Path(self._settings["job"]) / work["folder"]
        self._read(at, work["shards"])
        return {"at": str(at)}

    def _read(self, at: Path, shards: list[str]) -> None:
        self._loaded = [load_file(at / name) for name in shards]

    def _copy(self, work: Found) -> Found:
        target = self._place / "cp"
        target.mkdir(exist_ok=True)
        step = Path(self._settings["job"]) / work["folder"]
        command = ["cp", *(str(step / name) for name in (*work["shards"], *work["others"])), str(target)]
        return {**_watched(subprocess.Popen(command)), "at": str(target)}

    def _start_torrent(self, work: Found) -> None:
        settings = {**work["torrent"], "ip": self._settings["ip"], "target": str(self._place / work["way"])}
        program = str(Path(__file__).with_name("readers_torrent.py"))
        command = [work["torrent"]["python"], program, "get", json.dumps(settings)]
        self._swarm = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._swarm.stdout
        assert self._swarm.stdout.readline() == "ready\n"

    def _torrent(self, work: Found) -> Found:
        found, _ = self._swarm.communicate("\n")
        return {**json.loads(found), "at": str(self._place / work["way"] / "step")}

    def _digests(self, way: str, at: str, shards: list[str]) -> dict[str, str]:
        """Return the digests of what was taken: of arrays where those were, else of files."""
        if way in ("load_file", "alone"):
            arrays = {name: array for shard in self._loaded for name, array in shard.items()}
            self._loaded = []
            return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}
        return {name: hashlib.sha256((Path(at) / name).read_bytes()).hexdigest() for name in shards}


def _watched(process: "subprocess.Popen[bytes]") -> Found:
    """Return what a process took: its peak is looked at each 10 ms; at its end the parent's is in it."""
    memory = 0
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        memory = max(memory, _memory("VmHWM", process.pid))
        time.sleep(0.01)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"{process.args!r}: {process.returncode}"
    return {"ended": time.monotonic(), "cpu": usage.ru_utime + usage.ru_stime, "memory": memory}


def _memory(field: str, pid: object = "self") -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(field)), 0)


def _enter(space: str) -> None:
    """Enter a network namespace, with mounts of one's own."""
    with Path(f"/run/netns/{space}").open() as file:
        for failed in (_LIBC.setns(file.fileno(), 0), _LIBC.unshare(_NEW_MOUNTS)):
            if failed:
                raise OSError(ctypes.get_errno(), "no namespace", space)
    subprocess.run(["mount", "--make-rslave", "/"], check=True)


def _mount_nfs(settings: Found) -> None:
    Path(settings["mount"]).mkdir(parents=True, exist_ok=True)
    where = ["-o", "vers=4.2,nosharecache", f"{settings['nfs']}:/", settings["mount"]]
    subprocess.run(["mount", "-t", "nfs", *where], check=True)


def serve(settings: Found, asked: "Connection") -> None:
    """Do what is asked, until this process is killed."""
    _enter(settings["space"])
    tempfile.tempdir = settings["place"]
    if "nfs" in settings:
        _mount_nfs(settings)
    reader = Reader(settings)
    asked.send({"ready": True})
    while True:
        work = asked.recv()
        asked.send(getattr(reader, work["do"])(work))
