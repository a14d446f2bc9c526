"""Job directories as somebody would build them who can write there and means harm, and a canary beside them."""

import contextlib
import hashlib
import json
import os
import socket
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from support.jobs import shard_bytes, write_step
from syncd.protocol.layout import Job
from syncd.protocol.request import Pin, write_pin

Attack = Callable[[Job, Path], None]
"""Changes a job; the second argument is the canary."""

NAMES = (
    b"line\nfeed", b"esc\x1b[2Jape", b"bell\x07", b"\xff\xfe not text", b"..hidden", b"global_step_7\n",
    b"global_step_07", b"global_step_-1", b"global_step_99999999999999999999", "\u202egnp.exe".encode(), b"%s%n",
    b"$(touch pwned)", b"-rf", b"a" * 255,
)  # fmt: skip
"""Names that are no names of this protocol; some are no text."""

READ = (
    "latest_state_dict_iteration.txt",
    "latest_checkpointed_iteration.txt",
    "global_step_2/manifest.json",
    "global_step_2/actor/model-00001-of-00001.safetensors",
    "global_step_2/actor/.receipts/00001-of-00001.json",
    "global_step_3/actor/.receipts/00001-of-00001.json",
    ".syncd/version.json",
    ".syncd/events.jsonl",
    ".syncd/explorers/e0.json",
    ".syncd/trainers/trainer.json",
    ".syncd/pins/global_step_1.json",
    ".syncd/requests/r.json",
    "experiences/e0/1.parquet",
    "experiences/.consumed/e0.json",
)
"""Files that something reads, in a job with two steps and one that fills."""

DIRECTORIES = (
    ".syncd", ".syncd/daemon.lock", ".syncd/daemon.lock/0000000001", ".syncd/trash", ".syncd/trash/0000000001",
    ".syncd/explorers", ".syncd/trainers", ".syncd/pins", ".syncd/requests", "global_step_2", "global_step_2/actor",
    "global_step_2/actor/.receipts", "global_step_3", "global_step_3/actor", "experiences", "experiences/e0",
    "experiences/.consumed", "experiences/.rejected", "experiences/.writers",
)  # fmt: skip
"""Directories that something lists or writes to."""

PRECIOUS = (
    "0000000001/leader.json", "0000000001/victim.txt", "global_step_1.json", "e0.json", "1.parquet", "bad.parquet",
    ".receipts/00001-of-00001.json", "actor/.receipts/00001-of-00001.json", "e0/1.parquet", "e0/bad.parquet",
    "e0/abc/half", "model-00001-of-00001.safetensors", "stray.safetensors", "actor/stray.safetensors",
    "version.json", "events.jsonl", "daemon.lock/0000000001/leader.json", "trash/0000000001/victim/file",
    "explorers/e0.json", ".e0.json.0123456789ab.tmp", "victim.txt",
)  # fmt: skip
"""What lies outside, by the names that each program looks for."""

GIANT = 400 << 20


def build(root: Path) -> Job:
    """Make a job with a bit of everything: two sealed steps, one that fills, a version, a leader that has gone."""
    root.mkdir()
    job = Job.at(str(root))
    write_step(job, 1)
    write_step(job, 2)
    (root / "global_step_3/actor/.receipts").mkdir(parents=True)
    (root / "global_step_3/actor/model-00001-of-00002.safetensors").write_bytes(shard_bytes({"w": (2,)}))
    write_pin(job, Pin(1, "kept"))
    for name in ("explorers", "trainers", "requests", "trash/0000000001", "daemon.lock/0000000001"):
        (root / ".syncd" / name).mkdir(parents=True)
    for name in ("e0", ".consumed", ".rejected", ".writers"):
        (root / "experiences" / name).mkdir(parents=True)
    _document(root / ".syncd/explorers/e0.json", identity="e0", status="running", beat=1, updated_at=0.0)
    _document(
        root / ".syncd/trainers/trainer.json", identity="trainer", status="running", beat=1, updated_at=0.0
    )
    process = {"boot": "x", "namespace": "x", "pid": 1, "started": 1}
    gone = {"identity": "gone", "host": "h", "process": process, "beat": 1, "released": True}
    _document(root / ".syncd/daemon.lock/0000000001/leader.json", **gone)
    return job


def canary(place: Path) -> Path:
    """Make a tree outside of every job that has what each program looks for, by the names that it looks for."""
    place.mkdir()
    outside = Job.at(str(place / "job"))
    os.mkdir(outside.root)
    write_step(outside, 2)
    for name in PRECIOUS:
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"precious " + name.encode())
    return place


def fingerprint(place: Path) -> dict[str, tuple[int, str]]:
    """Return what a tree is: by name the mode and the content."""
    found = {}
    for parent, directories, files in os.walk(place):
        for name in (*directories, *files):
            path = os.path.join(parent, name)
            status = os.lstat(path)
            data = Path(path).read_bytes() if stat.S_ISREG(status.st_mode) else b""
            found[os.path.relpath(path, place)] = (status.st_mode, hashlib.sha256(data).hexdigest())
    return found


def every_file(put: Callable[[str], None], names: Iterable[str] = READ) -> Attack:
    """Return what puts one thing in the place of each file that is read."""

    def attack(job: Job, _: Path) -> None:
        for name in names:
            path = f"{job.root}/{name}"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            with contextlib.suppress(OSError):
                put(path)

    return attack


def links_out(job: Job, outside: Path) -> None:
    """Lead each file that is read to one outside."""
    every_file(lambda path: os.symlink(f"{outside}/victim.txt", path))(job, outside)


def hard_links_out(job: Job, outside: Path) -> None:
    """Make each file that is read another name of one outside."""
    every_file(lambda path: os.link(f"{outside}/victim.txt", path))(job, outside)


def strange_names(job: Job, _: Path) -> None:
    """Put names that are none into every directory, as files and as directories."""
    for place in ("", *DIRECTORIES):
        for number, name in enumerate(NAMES):
            path = os.fsencode(f"{job.root}/{place}/") + name
            with contextlib.suppress(OSError):
                if number % 2:
                    os.mkdir(path)
                else:
                    Path(os.fsdecode(path)).write_bytes(b"{}")
            with contextlib.suppress(OSError):
                Path(os.fsdecode(path[:-8] + b".json")).write_bytes(b"{}")


def link_directory(name: str) -> Attack:
    """Return what leads one directory outside; what was in it has gone."""

    def attack(job: Job, outside: Path) -> None:
        path = f"{job.root}/{name}"
        os.rename(path, f"{outside.parent}/aside")
        os.symlink(outside, path)

    return attack


def fifo(path: str) -> None:
    os.mkfifo(path)


def unix_socket(path: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    os.chdir(os.path.dirname(path))
    listener.bind(os.path.basename(path))
    listener.close()


def device(path: str) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # zero: it never ends
    except OSError:
        os.symlink("/dev/zero", path)


def directory(path: str) -> None:
    os.mkdir(path)


def giant(path: str) -> None:
    with open(path, "wb") as file:
        file.write(b'{"protocol":1,"a":"')
        file.truncate(GIANT)


def deep(path: str) -> None:
    Path(path).write_bytes(b'{"protocol":1,"info":' + b"[" * 500_000 + b"]" * 500_000 + b"}")


def wide(path: str) -> None:
    Path(path).write_bytes(b'{"protocol":1,"info":[' + b"{}," * 1_500_000 + b"{}]}")


def nested_toml(path: str) -> None:
    Path(path).write_bytes(b"[daemon]\nkeep_last = " + b"[" * 100_000)


def numbers(path: str) -> None:
    Path(path).write_bytes(b'{"protocol":1,"step":' + b"9" * 100_000 + b',"beat":1e999,"generation":NaN}')


def garbage(path: str) -> None:
    Path(path).write_bytes(bytes(range(256)) * 40)


def header(path: str) -> None:
    """A safetensors header that says it describes a billion tensors, and one of a billion numbers."""
    shape = b",".join([b"1"] * 1000)
    entry = b'"t":{"dtype":"F32","shape":[%s],"data_offsets":[0,4]}' % shape
    text = b"{" + b",".join([entry] * 4) + b"}"
    with open(path, "wb") as file:
        file.write((99_000_000).to_bytes(8, "little") + text)
        file.truncate(100_000_000)


FILES = (fifo, unix_socket, device, directory, giant, deep, wide, numbers, garbage, header)


def document(path: Path, **fields: object) -> None:
    """Write a document of the protocol as anybody may."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"protocol": 1, **fields}))


_document = document
