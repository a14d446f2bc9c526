"""The exam of an engine: whether its way of loading reaches every tensor.

That does not depend on the version. So before an engine gets work, it loads a copy of its start model in which every
tensor differs by much, and its answers must be those of the copy: a tensor that stayed shows at many times the noise,
whatever the learning rate will be. `exam_model` makes the copy and measures what each kind of tensor does to the
answers. The answers are made once for a start model and dtype and kept in the job; the copy lies beside them while
engines are examined.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from explorer_hooks.hook import ProbeAnswer
from explorer_hooks.proof.start_check import shard_names
from syncd.errors import DOCS, CorruptDataError, LoadFailedError, SyncdError
from syncd.protocol.digest import digest_file
from syncd.protocol.documents import Document, Fields, encode, read_document
from syncd.protocol.file_lock import FileLock, lock_file
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.probe import Probe
from syncd.protocol.receipt import FileRecord
from syncd.protocol.safetensors import read_header
from syncd.protocol.version import Version, engine_label
from syncd.transports.base import WeightDirectory
from syncd.transports.tensors import TensorMeta

SEEN = 10.0
"""How far a kind of tensor must move the answers to be seen, in multiples of the noise."""

NOISE = {True: 1e-5, False: 5e-3}
"""The noise that is reckoned with at the least, in nats, by whether the engine computes in float32."""

LONGEST = 3600.0
"""How many seconds an exam may take to be made, by this process or by another that is waited for."""

ROOM = 1.1
"""How much room the copy needs, in multiples of the start model."""

REMEDY = f"reload=restart starts it on each version, or another flag or release: {DOCS}/proof.md#the-exam"

TIED = "the head, tied to the embedding"
"""The kind of a head that has no tensor of its own."""

_DIGEST = f"sha256:{hashlib.sha256(b'an exam of syncd').hexdigest()}"
LABEL = engine_label((0, 0), _DIGEST)
"""What an engine that is examined runs: the label of no version of any job."""

_ROWS, _LENGTH, _STRIDE = 4, 16, 37
_TICK = 0.25

Rows = tuple[tuple[int, ...], ...]
Values = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Exam:
    """What an engine must answer."""

    start: Probe  # the start model's answers
    exam: Values  # the copy's
    kinds: Mapping[str, Values]  # the copy's if one kind of tensor is left as it was, by kind
    size: int  # bytes of the copy
    seconds: float  # what it took to make it, and to compute the answers

    @staticmethod
    def read(fields: Fields) -> "Exam":
        rows, start = fields.items("tokens"), fields.items("start")
        probe = Probe(tuple(map(tuple, rows)), tuple(map(tuple, start)), fields.text("dtype"), "keep")
        kinds = fields.record("kinds").document
        exam = Exam(
            probe,
            _flat(fields.items("exam")),
            {kind: _flat(values) for kind, values in kinds.items()},
            fields.integer("size"),
            fields.number("seconds"),
        )
        if any(len(values) != probe.count for values in (exam.exam, *exam.kinds.values())):
            raise CorruptDataError("an exam has another number of log-probs", path=fields.path)
        return exam

    def unseen(self, noise: float) -> tuple[str, ...]:
        """Return the kinds of tensors that could stay without being noticed."""
        return tuple(sorted(kind for kind, by in self._distances().items() if by < SEEN * noise))

    def problem(self, answer: ProbeAnswer, noise: float) -> str:
        """Return what an engine has not loaded by its answer, empty if it has loaded all that it shows."""
        seen = {kind: by for kind, by in self._distances().items() if by >= SEEN * noise}
        answers = _flat(answer.logprobs)
        off = _distance(answers, self.exam) if len(answers) == len(self.exam) else math.inf
        if seen and off < min(seen.values()) / 2:
            return ""
        if _distance(answers, _flat(self.start.logprobs)) < off / 2:
            return "it answers as before, so it has loaded nothing"
        near = min(seen, key=lambda kind: _distance(answers, self.kinds[kind]), default="")
        named = near and _distance(answers, self.kinds[near]) < off / 2
        stayed = f"{near} stayed as it was" if named else "tensors of more than one kind stayed as they were"
        return f"{stayed}: its answers are {off:.3g} nats from those of what it loaded"

    def _distances(self) -> dict[str, float]:
        return {kind: _distance(values, self.exam) for kind, values in self.kinds.items()}


def noise_of(mean: float, dtype: str | None) -> float:
    return max(mean, NOISE[dtype == "float32"])


class ExamFiles:
    """The exams of one job, on its own file system, where engines read versions too."""

    def __init__(self, job: Job) -> None:
        self._job = job

    @contextmanager
    def opened(
        self, start: str, dtype: str, baseline: Probe | None
    ) -> Iterator[tuple[Exam, WeightDirectory]]:
        """Yield the exam of a start model and its copy, which stays while the block lasts.

        One process makes them, the others of its host wait for it.

        Raises:
            LoadFailedError: It cannot be made here.
        """
        rows = baseline.tokens if baseline is not None else _spread(start)
        path = f"{self._job.exams}/{_key(start, dtype, rows)}"
        try:
            self._job.disk.make_directory(self._job.exams)
            with _claimed(path) as lock:
                exam = self._made(start, path, dtype, rows)
                lock.share()
                yield exam, target_of(path)
        except OSError as error:
            raise LoadFailedError(f"no exam can be made: {error}", path=path) from error
        finally:
            _remove_unused(path)

    def _made(self, start: str, path: str, dtype: str, rows: Rows) -> Exam:
        kept = self._kept(f"{path}.json")
        if kept is not None and os.path.isdir(path):
            return kept
        size = sum(os.path.getsize(os.path.realpath(f"{start}/{name}")) for name in shard_names(start))
        free = self._job.disk.free(self._job.exams)
        if free < ROOM * size:
            raise LoadFailedError(f"its copy needs {ROOM * size:.3g} bytes, and {free} are free", path=path)
        begun = time.monotonic()
        making = f"{path}.{os.getpid()}.tmp"
        shutil.rmtree(making, ignore_errors=True)
        try:
            document = _run(start, making, dtype, rows)
            os.rename(making, path)
        finally:
            shutil.rmtree(making, ignore_errors=True)
        more = {"tokens": rows, "dtype": dtype, "size": size, "seconds": time.monotonic() - begun}
        self._job.disk.replace(f"{path}.json", encode({**document, **more}))
        return Exam.read(read_document(self._job.disk, f"{path}.json"))

    def _kept(self, path: str) -> Exam | None:
        try:
            return Exam.read(read_document(self._job.disk, path))
        except (OSError, SyncdError):
            return None


def _run(start: str, target: str, dtype: str, rows: Rows) -> Document:
    """Have another process make an exam, which gives its memory back; a process that has a model makes it itself."""
    if "transformers" in sys.modules:
        return _make_here(start, target, dtype, rows)
    command = [sys.executable, "-m", "explorer_hooks.proof.exam_model", start, target, dtype]
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, with paths
            command, input=json.dumps(rows), capture_output=True, text=True, check=False, timeout=LONGEST
        )
    except subprocess.TimeoutExpired as error:
        raise LoadFailedError(f"no exam of {start} was made in {LONGEST:g} s", path=start) from error
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2] or f"it exited with {done.returncode}"
        raise LoadFailedError(f"no exam of {start} can be made: {reason}", path=start)
    document: Document = json.loads(done.stdout)
    return document


def _make_here(start: str, target: str, dtype: str, rows: Rows) -> Document:
    make: Callable[[str, str, str, Rows], Document] = resolve_name("explorer_hooks.proof.exam_model:make")
    try:
        return make(start, target, dtype, rows)
    except (ValueError, RuntimeError, ImportError) as error:
        raise LoadFailedError(f"no exam of {start} can be made: {error}", path=start) from error


@contextmanager
def _claimed(path: str) -> Iterator[FileLock]:
    """Hold the claim to make an exam; once its copy is there, share it with others who use it."""
    lock, limit = _lock(path), time.monotonic() + LONGEST
    while lock is None:
        if time.monotonic() > limit:
            raise LoadFailedError(f"another process has made this exam for {LONGEST:g} s", path=path)
        time.sleep(_TICK)
        lock = _lock(path)
    try:
        yield lock
    finally:
        lock.close()


def _lock(path: str) -> FileLock | None:
    """Take the claim, or a share of a copy that is there; None while another process makes it."""
    lock = lock_file(f"{path}.lock", exclusive=True)
    return lock_file(f"{path}.lock", exclusive=False) if lock is None and os.path.isdir(path) else lock


def _remove_unused(path: str) -> None:
    """Remove a copy that nobody uses now; the answers stay."""
    with contextlib.suppress(OSError):
        if (lock := lock_file(f"{path}.lock", exclusive=True)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            lock.remove()


def _key(start: str, dtype: str, rows: Rows) -> str:
    """Return what tells the exam of one model from others: paths, sizes and times of its files, dtype and tokens."""
    files = [(name, os.stat(os.path.realpath(f"{start}/{name}"))) for name in sorted(shard_names(start))]
    identity = [start, dtype, rows, [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


def target_of(path: str) -> WeightDirectory:
    """Return a directory of whole weights as what a hook loads, with the label of an exam."""
    disk, shards = LocalDisk(), []
    tensors: dict[str, TensorMeta] = {}
    for name in shard_names(path):
        file = os.path.realpath(f"{path}/{name}")
        header = read_header(disk, file)
        content, size = digest_file(disk, file)
        shards.append(FileRecord(name, size, content, len(header.tensors)))
        tensors |= {one.name: TensorMeta(one.dtype, one.shape) for one in header.tensors.values()}
    return WeightDirectory(
        Version(0, 0, "weights", path, _DIGEST), path, tuple(shards), tensors, verified=True
    )


def _spread(start: str) -> Rows:
    """Return rows of token ids at equal distances over a model's vocabulary, in a fixed order."""
    with open(f"{start}/config.json", encoding="utf-8") as file:
        config: Mapping[str, Any] = json.load(file)
    vocabulary = int(config.get("text_config", config).get("vocab_size", 0))
    if vocabulary < 1:
        raise LoadFailedError("its configuration names no vocabulary", path=start)
    count = _ROWS * _LENGTH
    ids = [index * _STRIDE % count * vocabulary // count for index in range(count)]
    return tuple(tuple(ids[row * _LENGTH :][:_LENGTH]) for row in range(_ROWS))


def _flat(rows: Any) -> Values:
    return tuple(float(value) for row in rows for value in row)


def _distance(values: Sequence[float], others: Sequence[float]) -> float:
    off = math.fsum(abs(a - b) for a, b in zip(values, others, strict=False)) / max(len(others), 1)
    return off if math.isfinite(off) else math.inf
