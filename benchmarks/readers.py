"""N readers of one fresh step over limited links or NFS: this product, and what others use.

    python benchmarks/readers.py --readers 1,2,4,8,16 --bed links --json benchmarks/results/readers.json
    python benchmarks/readers.py --readers 1,4 --bed nfs --ways stage,cp --size 12 --json out/readers.json

A link of the file server carries --rate MB/s, each reader's twice that, each way. All ways take turns in one run;
each number of readers begins with another one. The clock runs from when the step is there and all readers are told
until the last one has it:

    alone        this product without a stage: every byte is checked on the mount, then `load_file`
    stage        this product: a checked copy of the host's own
    peers        the same, where hosts read one copy together
    cp           plain `cp` of the files from the mount
    load_file    safetensors' `load_file` of each file on the mount; nothing is checked
    libtorrent   libtorrent 2.1.1 with a plain seed at the server; its hashes are made before and do not count
    super-seed   the same with super-seeding, which gives fewer bytes and takes longer
    prime-rl     the reading side of its file transport, unmodified (readers_prime.py): with --prime, a checkout at
                 commit 559b4477, and --vllm, the Python of an environment with vLLM for CPUs

The bytes are those at the server's port, headers included. Processor time is the readers' own, of all together for
each GB of the version at each; a kernel's or a mount's server is not in it. Memory is the peak of the resident set,
less what the reader had before. Whatever came is compared with the step afterwards. 64 readers are simulated: what
the links allow, times how far the largest number that was measured is from what they allow it.
"""

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "parts" / "hosts")]

import numpy as np  # noqa: E402
import readers_beds  # noqa: E402
import readers_part  # noqa: E402
import report  # noqa: E402
from links import no_links  # noqa: E402
from readers_part import OURS, PIECE  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402
from support.jobs import start  # noqa: E402

from syncd.parts.hosts.members import MEMBERS, TOKEN, encode_members, new_token  # noqa: E402
from syncd.protocol.layout import Job  # noqa: E402
from syncd.protocol.local_disk import SystemClock  # noqa: E402
from syncd.protocol.manifest import read_manifest  # noqa: E402
from syncd.publishing import FollowingDisk, publish_export, read_export  # noqa: E402
from syncd.transports.delta.publish import publish_delta  # noqa: E402

Row = dict[str, Any]
WAYS = (*OURS, "cp", "load_file", "libtorrent", "super-seed", "prime-rl")
SIMULATED = 64
_TORRENTS = ("libtorrent", "super-seed")
_SHARDS = 4
_CHANGED = 0.015  # what AdamW changes of bfloat16 values at a learning rate of 1e-6
_LONG = 600.0
_LIBTORRENT = "libtorrent==2.1.1"
_PRIME = "prime-rl"
_WHY_NO_PRIME = "it needs --prime and --vllm, and over NFS more processor time than its machine has"


def main() -> int:
    """Measure, print a table, write JSON; return 0, also where the reason why nothing could be measured is all."""
    options = _options()
    if why := _why_no_bed(options):
        print(f"skipped: {why}")
        return 0
    if options.bed == "nfs" and not options.inside:
        return _inside_the_bed(options)
    return _kept(options.json, measured(options))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--readers", type=_counts, default=(1, 2, 4, 8, 16), help="1,2,4,8,16")
    parser.add_argument("--ways", type=_names, default=WAYS, help=",".join(WAYS))
    parser.add_argument("--bed", choices=("links", "nfs"), default="links")
    parser.add_argument("--size", type=int, default=24, help="MiB of the step")
    parser.add_argument("--rate", type=float, default=4.0, help="MB/s of the server's link")
    parser.add_argument("--json", default="out/readers.json", help="where to write the figures")
    parser.add_argument(
        "--venv", default=str(ROOT / ".venv-libtorrent"), help="made with libtorrent, if missing"
    )
    parser.add_argument("--prime", default="", help="a checkout of prime-rl")
    parser.add_argument("--vllm", default="", help="a Python with vLLM")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := sorted(set(names) - set(WAYS)):
        raise argparse.ArgumentTypeError(f"no way is called {unknown[0]}: {', '.join(WAYS)}")
    return names


def _why_no_bed(options: argparse.Namespace) -> str:
    if options.inside:
        return ""
    if options.bed == "nfs":
        missing = [name for name in ("linux.uml", "mount.nfs", "rpc.nfsd") if shutil.which(name) is None]
        return f"{', '.join(missing)}: not installed (bash tests/beds/install.sh)" if missing else ""
    if not os.path.exists("/dev/fuse"):
        return "no /dev/fuse, so there is no mount over the links"
    return str(no_links())


def _inside_the_bed(options: argparse.Namespace) -> int:
    """Boot the machine of the NFS bed, and run this program in it."""
    _require_torrent(options)
    with tempfile.TemporaryDirectory(prefix="readers-nfs-", dir="/var/tmp") as bed:
        script, made, log = (Path(bed) / name for name in ("run.sh", "out/readers.json", "out/log"))
        again = shlex.join([sys.executable, __file__, *sys.argv[1:], "--inside"])
        script.write_text(
            f"export PYTHONDONTWRITEBYTECODE=1\ncd {ROOT}\nmodprobe -a bridge sch_tbf\n"
            f'{again} --json "$OUT/readers.json" >"$OUT/log" 2>&1\n'
        )
        environment = {**os.environ, "BED": bed, "MEM": "3G", "LIMIT": "3500", "STILL": "300"}
        command = [str(ROOT / "tests" / "beds" / "nfs-bed"), "-o", "vers=4.2", str(script)]
        code = subprocess.run(command, env=environment, check=False, stdout=subprocess.DEVNULL).returncode
        if code or not made.exists():
            print(log.read_text()[-3000:] if log.exists() else "", f"the bed: {code}", file=sys.stderr)
            return 1
        return _kept(options.json, json.loads(made.read_text()))


def _kept(path: str, figures: Row) -> int:
    """Show what was measured; keep it beside what the file has of other beds and numbers of readers."""
    print(table(figures["rows"]))
    if Path(path).exists():
        known: Row = json.loads(Path(path).read_text())
        measured = {_what(row) for row in figures["rows"]}
        old = [row for row in known["rows"] if _what(row) not in measured]
        figures = {**figures, "rows": sorted([*old, *figures["rows"]], key=_what)}
    report.keep(path, {**figures, "simulated": list(simulated(figures["rows"]))})
    return 0


def _what(row: Row) -> tuple[str, int, int, str]:
    return row["bed"], row["readers"], WAYS.index(row["way"]), row["form"]


def _require_torrent(options: argparse.Namespace) -> str:
    """Return a Python with libtorrent, in an environment of its own that is made if it is missing."""
    python = Path(options.venv) / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", options.venv], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", _LIBTORRENT], check=True)
    return str(python)


def measured(options: argparse.Namespace) -> Row:
    """Return the figures of every number of readers."""
    left_out = {} if options.prime and options.vllm and not options.inside else {_PRIME: _WHY_NO_PRIME}
    ways = tuple(way for way in options.ways if way not in left_out)
    python = _require_torrent(options) if set(_TORRENTS) & set(ways) else ""
    prime = Prime(options) if _PRIME in ways else None
    rows: list[Row] = []
    loads = [round(os.getloadavg()[0], 1)]
    for turn, count in enumerate(options.readers):
        with tempfile.TemporaryDirectory(prefix="readers-", dir="/dev/shm") as place:
            at = turn % len(ways)
            rows += _with_readers(Path(place), options, count, (*ways[at:], *ways[:at]), python, prime)
        loads.append(round(os.getloadavg()[0], 1))
    return {
        "machine": report.machine(Path("/dev/shm"), load=report.span(loads)),
        "command": "python benchmarks/readers.py " + " ".join(f"--{name} {said}" for name, said in {
            "bed": options.bed, "readers": ",".join(map(str, options.readers)), "size": options.size,
            "rate": f"{options.rate:g}",
        }.items()),
        "piece_kib": PIECE >> 10, "left_out": left_out, "rows": rows,
    }  # fmt: skip


def _with_readers(
    place: Path,
    options: argparse.Namespace,
    count: int,
    ways: tuple[str, ...],
    python: str,
    prime: "Prime | None",
) -> Iterator[Row]:
    shared = Path(os.environ["A"]) if options.inside else place
    trainer = Trainer(Path(tempfile.mkdtemp(prefix="job-", dir=shared)), place, options.size)
    kind = readers_beds.NfsBed if options.bed == "nfs" else readers_beds.LinksBed
    with kind(count, options.rate, trainer.job, place) as bed, _started(bed, count, place) as parts:
        trainer.publish("whole")  # the job's state is there now
        trainer.list_hosts([f"{bed.ip(name)}:7410" for name in parts])
        for way in ways:
            for form in ("whole", "delta") if way in OURS else ("whole",):
                work = {"way": way, **trainer.publish(form)}
                with _seeded(bed, work, parts, place, python):
                    row = _one(bed, parts, work, trainer, prime)
                found = {
                    "bed": options.bed,
                    "rate_mb": options.rate,
                    "readers": count,
                    "way": way,
                    "form": form,
                }
                found |= row
                print(json.dumps(found), file=sys.stderr, flush=True)
                yield found
    trainer.close()


class Trainer:
    """Publishes steps of a model in float16, whole or as changes of the step before.

    Args:
        root: The directory of the job.
        place: For exports.
        size: MiB of the model.
    """

    def __init__(self, root: Path, place: Path, size: int) -> None:
        self.job, self._export, self._step = Job.at(str(root)), place / "export", 0
        self._daemon, *_ = start(self.job, SystemClock(), keep_last=3)
        self._chance = np.random.default_rng(7)
        words = (size << 20) // _SHARDS // 2
        self._model = [
            {f"w{shard}": (self._chance.standard_normal(words) * 0.02).astype(np.float16)}
            for shard in range(_SHARDS)
        ]

    def list_hosts(self, addresses: list[str]) -> None:
        """Write the list of hosts and their token, as the daemon does."""
        state, disk = self.job.state, self.job.disk
        disk.replace(f"{state}/{TOKEN}", new_token())
        disk.replace(f"{state}/{MEMBERS}", encode_members(sorted(addresses), 1))

    def publish(self, form: str) -> Row:
        """Publish the next step; return what of it is read and what has to come of it."""
        self._train()
        self._step += 1
        export = read_export(FollowingDisk(), str(self._export))
        if form == "delta":
            made = publish_delta(self.job, self._step, FollowingDisk(), export, self._step - 1)
            assert not made.why_whole, made.why_whole
        else:
            publish_export(self.job, self._step, FollowingDisk(), export)
        self._daemon.tick(woken=True)
        manifest = read_manifest(self.job.disk, self.job.step(self._step))
        stored = sum(record.size for record in (*manifest.shards, *manifest.files))
        others = [os.path.basename(record.name) for record in manifest.files]
        folder = f"{os.path.basename(self.job.step(self._step))}/{os.path.dirname(manifest.shards[0].name)}"
        return {
            "step": self._step, "folder": folder, "shards": self._names(), "others": others, "stored": stored,
            "tensors": {name: tensor.size for tensors in self._model for name, tensor in tensors.items()},
        }  # fmt: skip

    def expected(self, *, arrays: bool) -> dict[str, str]:
        """Return the digests of the arrays, or of the files, of the last step."""
        shards = {name: self._export / name for name in self._names()}
        if not arrays:
            return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in shards.items()}
        found = (item for path in shards.values() for item in load_file(path).items())
        return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in found}

    def size(self) -> int:
        """Return the bytes of the last step's files, stored whole."""
        return sum(path.stat().st_size for path in self._export.iterdir())

    def close(self) -> None:
        """End the daemon, and remove the job."""
        self._daemon.close()
        shutil.rmtree(self.job.root, ignore_errors=True)

    def _names(self) -> list[str]:
        return [f"model-{shard + 1:05d}-of-{_SHARDS:05d}.safetensors" for shard in range(_SHARDS)]

    def _train(self) -> None:
        shutil.rmtree(self._export, ignore_errors=True)
        self._export.mkdir()
        places = {}
        for name, tensors in zip(self._names(), self._model, strict=True):
            for key, tensor in tensors.items():
                chosen = self._chance.integers(0, tensor.size, int(tensor.size * _CHANGED))
                tensor.view(np.uint16)[chosen] += 1
                places[key] = name
            save_file(tensors, self._export / name, metadata={"format": "pt"})
        (self._export / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        (self._export / "config.json").write_text("{}")


class Part(NamedTuple):
    """A reader: a fork of this process in a namespace of its own, so that sixteen import nothing sixteen times."""

    process: BaseProcess
    ask: Connection

    def answer(self) -> Row:
        """Return what it answers next."""
        if not self.ask.poll(_LONG):
            raise TimeoutError(f"a reader does not answer in {_LONG:g} s")
        answer: Row = self.ask.recv()
        return answer


Parts = dict[str, Part]


@contextmanager
def _started(bed: readers_beds.LinksBed, count: int, place: Path) -> Iterator[Parts]:
    forks, parts = multiprocessing.get_context("fork"), dict[str, Part]()
    with ExitStack() as ends:
        for name in (f"h{number}" for number in range(count)):
            (place / name).mkdir()
            settings = {**bed.settings(name), "place": str(place / name)}
            ours, theirs = forks.Pipe()
            process = forks.Process(target=readers_part.serve, args=(settings, theirs))
            process.start()
            theirs.close()
            parts[name] = Part(process, ours)
            ends.callback(process.join)
            ends.callback(process.kill)
        for part in parts.values():
            part.answer()
        yield parts


def _ask(parts: Parts, work: Row) -> list[Row]:
    for part in parts.values():
        part.ask.send(work)
    return [part.answer() for part in parts.values()]


@contextmanager
def _seeded(bed: readers_beds.LinksBed, work: Row, parts: Parts, place: Path, python: str) -> Iterator[None]:
    """Have the server seed a step while libtorrent reads it."""
    if work["way"] not in _TORRENTS:
        yield
        return
    directory = place / work["way"] / "step"
    shutil.copytree(place / "export", directory)
    settings = {
        "directory": str(directory), "piece": PIECE,
        "torrent": str(place / f"{work['way']}.torrent"), "ip": bed.ip("o"),
        "super": work["way"] == "super-seed",
    }  # fmt: skip
    command = [python, str(HERE / "readers_torrent.py"), "seed", json.dumps(settings)]
    process = bed.popen("o", command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout
        assert process.stdout.readline() == "seeds\n"
        peers = [bed.ip("o"), *(bed.ip(name) for name in parts)]
        work["torrent"] = {
            "torrent": settings["torrent"], "python": python, "peers": peers, "limit": _LONG,
            "end": str(place / f"{work['way']}-has"),
        }  # fmt: skip
        yield
    finally:
        process.kill()
        process.wait()


class Prime:
    """prime-rl's readers: forks of a process with vLLM, each in the namespaces of a reader."""

    def __init__(self, options: argparse.Namespace) -> None:
        command = [options.vllm, str(HERE / "readers_prime.py")]
        environment = {**os.environ, "PYTHONPATH": f"{options.prime}/src", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._await(1)

    def prepare(self, parts: Parts, work: Row, job: str) -> None:
        """Fork the readers."""
        readers = [{"pid": part.process.pid, "path": f"{job}/{work['folder']}"} for part in parts.values()]
        self._count = len(readers)
        self._say(json.dumps({"tensors": work["tensors"], "readers": readers}))
        self._await(self._count)

    def take(self) -> list[Row]:
        """Have all of them read the step."""
        self._say("")
        return [json.loads(self._line()) for _ in range(self._count)]

    def _say(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _line(self) -> str:
        assert self._process.stdout
        while line := self._process.stdout.readline():
            if line.startswith(("ready", "{")):  # vLLM says things too
                return line
        raise RuntimeError("prime-rl's process has ended")

    def _await(self, count: int) -> None:
        for _ in range(count):
            self._line()


def _one(bed: readers_beds.LinksBed, parts: Parts, work: Row, trainer: Trainer, prime: Prime | None) -> Row:
    _ask(parts, {**work, "do": "prepare"})
    take: Callable[[], list[Row]] = partial(_ask, parts, {**work, "do": "take"})
    if work["way"] == _PRIME and prime:
        prime.prepare(parts, work, trainer.job.root)
        take = prime.take
    time.sleep(0.3)
    sent, begun = bed.sent(), time.monotonic()
    answers = take()
    sent = bed.sent() - sent
    expected = trainer.expected(arrays=work["way"] in ("load_file", "alone", _PRIME))
    assert all(answer["files"] == expected for answer in answers), (
        f"{work['way']}: other bytes than the step's"
    )
    for warning in (warning for answer in answers for warning in answer.get("warned", ())):
        print(warning, file=sys.stderr)
    size = trainer.size()
    return {
        "seconds": round(max(answer["ended"] for answer in answers) - begun, 3),
        "server_bytes": sent,
        "stored_bytes": work["stored"],
        "version_bytes": size,
        "cpu_per_gb": round(sum(answer["cpu"] for answer in answers) / (len(answers) * size / 1e9), 2),
        "memory": max(answer["memory"] for answer in answers),
        "load": round(os.getloadavg()[0], 1),
    }


def simulated(rows: list[Row]) -> Iterator[Row]:
    """Yield what 64 readers would take of a whole step: what links allow, times how far the largest run was off."""
    linked = [row for row in rows if row["bed"] == "links" and row["form"] == "whole"]
    most = max((row["readers"] for row in linked), default=0)
    for row in linked:
        if row["readers"] == most and row["way"] not in _TORRENTS:
            far = row["seconds"] / ideal(row, most)
            copies = 1 if row["way"] == "peers" else SIMULATED / most
            yield {
                **{name: row[name] for name in ("bed", "rate_mb", "way", "form")},
                "readers": SIMULATED, "from_readers": most, "seconds": round(ideal(row, SIMULATED) * far, 1),
                "server_bytes": int(row["server_bytes"] * copies),
            }  # fmt: skip


def ideal(row: Row, readers: int) -> float:
    """Return the seconds that links alone allow: N copies through the server's, or one and what an owner gives on."""
    copies = 1 if row["way"] == "peers" else readers
    uploads = 0.0
    if row["way"] == "peers":
        pieces = math.ceil(row["stored_bytes"] / PIECE)
        uploads = math.ceil(pieces / readers) * (readers - 1) / pieces
    return float(row["stored_bytes"] * max(copies, max(uploads, 1) / 2) / row["rate_mb"] / 1e6)


def table(rows: list[Row]) -> str:
    """Return the rows as a table."""
    head = f"{'bed':6} {'readers':>7} {'way':12} {'step':6} {'s':>7} {'MB':>7} {'s/GB':>7} {'MiB':>5}"
    return "\n".join([head, *(
        f"{row['bed']:6} {row['readers']:7} {row['way']:12} {row['form']:6} {row['seconds']:7.1f} "
        f"{row['server_bytes'] / 1e6:7.1f} {row['cpu_per_gb']:7.1f} {row['memory'] / (1 << 20):5.0f}"
        for row in rows
    )])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
