"""The exams of one job: made once for a start model and dtype, and kept; the copy stays while engines are examined.

A lock says who makes a copy and who uses it. Not every mount has locks that other hosts see. So nothing that is wrong
without them can come of it: each maker writes into a directory of its own, and an exam whose copy was removed
meanwhile counts as none (`is_whole`).
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any, NamedTuple

from explorer_hooks.parts.exam.exam import Exam, Rows
from explorer_hooks.proof.start_model import shard_names, target_of
from syncd.errors import LoadFailedError, SyncdError
from syncd.protocol.documents import Document, encode, read_document
from syncd.protocol.file_lock import FileLock, lock_file
from syncd.protocol.layout import ADAPTER, ADAPTER_CONFIG, Job
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.probe import Probe
from syncd.protocol.process import host_name
from syncd.protocol.safetensors import read_header
from syncd.transports.base import WeightDirectory

LONGEST = 3600.0
"""How many seconds an exam may take to be made, by this process or by another that is waited for."""

ROOM = 1.1
"""How much room the copy needs, in multiples of what it is a copy of."""

_ROWS, _LENGTH, _STRIDE = 4, 16, 37
_TICK = 0.25


class Subject(NamedTuple):
    """What an engine is examined with: its start model, and an adapter of the kind that it will load, if it does."""

    start: str  # the directory of the model
    adapter: str = ""  # that of the adapter

    @property
    def copied(self) -> str:
        return self.adapter or self.start


class ExamFiles:
    """The exams of one job, on its own file system, where engines read versions too."""

    def __init__(self, job: Job) -> None:
        self._job = job

    @contextmanager
    def opened(
        self, subject: Subject, dtype: str, baseline: Probe | None
    ) -> Iterator[tuple[Exam, WeightDirectory]]:
        """Yield the exam of a model and its copy, which stays in the block; one process makes them, the others wait.

        Raises:
            LoadFailedError: It cannot be made here.
        """
        with contextlib.ExitStack() as held:
            with _making_of(subject):
                rows = baseline.tokens if baseline is not None else _spread(subject.start)
                path = f"{self._job.exams}/{_key(subject, dtype, rows)}"
                held.callback(_remove_unused, path)
                self._job.disk.make_directory(self._job.exams)
                lock = held.enter_context(_claimed(path))
                exam = self._made(subject, path, dtype, rows)
                lock.share()
                copy = target_of(path, "lora" if subject.adapter else "weights")
            yield exam, copy

    def keep_passed(self, engine: str, unseen: Sequence[str]) -> None:
        """Keep that an engine of a kind has passed; on a mount that fails nobody knows after a restart."""
        with contextlib.suppress(OSError):
            self._job.disk.make_directory(self._job.exams)
            self._job.disk.replace(self._passed(engine), encode({"engine": engine, "unseen": list(unseen)}))

    def recall_passed(self, engine: str) -> tuple[str, ...] | None:
        """Return what the exam could not see of an engine of a kind that has passed, None if none has."""
        try:
            return tuple(map(str, read_document(self._job.disk, self._passed(engine)).items("unseen")))
        except (OSError, SyncdError):
            return None

    def _passed(self, engine: str) -> str:
        return f"{self._job.exams}/{hashlib.sha256(engine.encode()).hexdigest()[:32]}.passed.json"

    def _made(self, subject: Subject, path: str, dtype: str, rows: Rows) -> Exam:
        kept = self._kept(f"{path}.json")
        if kept is not None and os.path.isdir(path):
            return kept
        _remove_left(path)
        size = sum(stat.st_size for _, stat in _files(subject.copied))
        free = self._job.disk.free(self._job.exams)
        if free < ROOM * size:
            raise LoadFailedError(f"its copy needs {ROOM * size:.3g} bytes, and {free} are free", path=path)
        begun = time.monotonic()
        document = _make_at(path, subject, dtype, rows)
        more = {"tokens": rows, "dtype": dtype, "size": size, "seconds": time.monotonic() - begun}
        self._job.disk.replace(f"{path}.json", encode({**document, **more}))
        return Exam.read(read_document(self._job.disk, f"{path}.json"))

    def _kept(self, path: str) -> Exam | None:
        try:
            return Exam.read(read_document(self._job.disk, path))
        except (OSError, SyncdError):
            return None


def is_whole(copy: WeightDirectory) -> bool:
    """Return whether a copy is still there: another host may have removed it, where locks do not reach."""
    try:
        return all(os.path.getsize(f"{copy.path}/{shard.name}") == shard.size for shard in copy.shards)
    except OSError:
        return False


@contextmanager
def _making_of(subject: Subject) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LoadFailedError(f"no exam can be made: {error}", path=subject.copied) from error


def _make_at(path: str, subject: Subject, dtype: str, rows: Rows) -> Document:
    """Make a copy and return what it answers; another host may have made the same one meanwhile."""
    making = f"{_own_makings(path)}{uuid.uuid4().hex}.tmp"
    try:
        document = _run(subject, making, dtype, rows)
        _rename_unless_made(making, path)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return document


def _rename_unless_made(making: str, path: str) -> None:
    try:
        os.rename(making, path)
    except OSError:
        if not os.path.isdir(path):
            raise


def _own_makings(path: str) -> str:
    """Return how the directories begin in which this host makes an exam."""
    return f"{path}.{host_name()}."


def _remove_left(path: str) -> None:
    """Remove what makers left that were killed; whoever calls this holds the claim."""
    with os.scandir(os.path.dirname(path)) as entries:
        left = [entry.path for entry in entries if _is_left(entry, _own_makings(path))]
    for making in left:
        shutil.rmtree(making, ignore_errors=True)


def _is_left(entry: os.DirEntry[str], own: str) -> bool:
    """Return whether nobody makes it any more; where the claim does not reach other hosts, its age says so."""
    if not entry.name.endswith(".tmp"):
        return False
    with contextlib.suppress(OSError):
        return entry.path.startswith(own) or entry.stat().st_mtime < time.time() - LONGEST
    return False


def _run(subject: Subject, target: str, dtype: str, rows: Rows) -> Document:
    """Have another process make an exam, which gives its memory back; a process that has a model makes it itself."""
    module = f"explorer_hooks.parts.exam.{'adapter' if subject.adapter else 'model'}"
    asked = [*filter(None, subject), target, dtype]
    if "transformers" in sys.modules:
        return _make_here(module, asked, rows, subject.copied)
    command = [sys.executable, "-m", module, *asked]
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, with paths
            command, input=json.dumps(rows), capture_output=True, text=True, check=False, timeout=LONGEST
        )
    except subprocess.TimeoutExpired as error:
        raise LoadFailedError(f"no exam was made in {LONGEST:g} s", path=subject.copied) from error
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2] or f"it exited with {done.returncode}"
        raise LoadFailedError(f"no exam can be made: {reason}", path=subject.copied)
    document: Document = json.loads(done.stdout)
    return document


def _make_here(module: str, asked: list[str], rows: Rows, path: str) -> Document:
    make: Callable[..., Document] = resolve_name(f"{module}:make")
    try:
        return make(*asked, rows)
    except Exception as error:  # libraries have errors of their own, as safetensors has
        raise LoadFailedError(f"no exam can be made: {error}", path=path) from error


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


def _key(subject: Subject, dtype: str, rows: Rows) -> str:
    """Return what tells one exam from others: the files of the model, dtype, tokens, and the shape of the adapter."""
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in _files(subject.start)]
    identity = [subject.start, dtype, rows, files, _shape(subject.adapter) if subject.adapter else ""]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


def _files(directory: str) -> list[tuple[str, os.stat_result]]:
    return [
        (name, os.stat(os.path.realpath(f"{directory}/{name}"))) for name in sorted(shard_names(directory))
    ]


def _shape(adapter: str) -> list[object]:
    """Return what all adapters of one training have in common: their configuration, and their tensors' shapes."""
    with open(f"{adapter}/{ADAPTER_CONFIG}", encoding="utf-8") as file:
        config = file.read()
    tensors = read_header(LocalDisk(), os.path.realpath(f"{adapter}/{ADAPTER}")).tensors.values()
    return [config, sorted((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)]


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
