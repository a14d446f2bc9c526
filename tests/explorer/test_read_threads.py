"""Threads that read the pieces of several files at once: whatever order they come in, and wherever one fails."""

import errno
import os
import random
import threading
import time

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import save_file  # noqa: E402
from support.held import held  # noqa: E402
from support.targets import target_of  # noqa: E402

from syncd.errors import CorruptDataError  # noqa: E402
from syncd.transports.files import read_file  # noqa: E402
from syncd.transports.files.fill_tensors import LoadJob, offered, read_all, sources_of  # noqa: E402
from syncd.transports.torch_tensors import target_tensors  # noqa: E402

PIECE = 4096
SHARDS = 3
WEIGHTS = {f"w{number}": torch.randn(37 * (number + 1), 11) for number in range(12)}


@pytest.fixture
def target(tmp_path):
    names = list(WEIGHTS)
    for number in range(SHARDS):
        name = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        save_file({key: WEIGHTS[key] for key in names[number::SHARDS]}, tmp_path / name)
    return target_of(tmp_path, (1, 5), verified=False)


@pytest.fixture(params=["cached", "direct"])
def way(request, monkeypatch):
    monkeypatch.setattr(read_file, "cached_share", lambda *_: 1.0 if request.param == "cached" else 0.0)


def job_of(target, tensors, **more):
    return LoadJob(tuple(sources_of(target)), target_tensors(tensors), offered(target), piece=PIECE, **more)


def blank():
    return {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}


class Reads:
    """The calls that read pieces: each takes as long as chance wants, and one of them may fail."""

    def __init__(self, fails_at=None, seed=0):
        self._chance, self._lock, self._fails_at = random.Random(seed), threading.Lock(), fails_at
        self.count = 0

    def __call__(self, descriptor, views, offset):
        with self._lock:
            self.count += 1
            fails, pause = self.count == self._fails_at, self._chance.choice((0, 0, 0.0005, 0.003))
        time.sleep(pause)
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(descriptor, views, offset)


class Os:
    """The module `os`, with other reads."""

    def __init__(self, reads):
        self.preadv = reads

    def __getattr__(self, name):
        return getattr(os, name)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("verify", [True, False])
def test_pieces_read_in_any_order_are_hashed_in_file_order(target, monkeypatch, threads, verify):
    for seed in range(4):
        reads, tensors = Reads(seed=seed), blank()
        monkeypatch.setattr(read_file, "os", Os(reads))
        loaded = read_all(job_of(target, tensors, threads=threads, verify=verify))
        assert all(torch.equal(tensors[name], WEIGHTS[name]) for name in WEIGHTS)
        size = sum(record.size for record in target.shards)
        assert (loaded.bytes == size) == verify
        assert loaded.direct + loaded.cached == SHARDS
        assert reads.count > 3 * 7


@pytest.mark.usefixtures("way")
def test_a_failed_read_at_any_point_ends_all_threads(target, monkeypatch):
    # One that only tries whether the file system takes it may fail.
    monkeypatch.setattr(read_file, "_supports_direct", lambda _: True)
    whole = Reads()
    monkeypatch.setattr(read_file, "os", Os(whole))
    read_all(job_of(target, blank()))
    before = held()
    for number in range(1, whole.count + 1):
        monkeypatch.setattr(read_file, "os", Os(Reads(fails_at=number, seed=number)))
        with pytest.raises(OSError, match="Input/output error"):
            read_all(job_of(target, blank()))
        assert held() <= before


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("number", range(SHARDS))
def test_a_flipped_byte_in_any_shard_is_found(target, number):
    path = f"{target.path}/{target.shards[number].name}"
    with open(path, "r+b") as file:
        file.seek(-3, os.SEEK_END)
        last = file.read(1)
        file.seek(-3, os.SEEK_END)
        file.write(bytes([last[0] ^ 16]))
    before = held()
    with pytest.raises(CorruptDataError, match="does not match") as found:
        read_all(job_of(target, blank()))
    assert path in str(found.value)
    assert held() <= before


@pytest.mark.usefixtures("way")
def test_a_missing_file_ends_all_threads(target):
    job = job_of(target, blank())
    os.unlink(job.sources[-1].path)
    before = held()
    with pytest.raises(FileNotFoundError):
        read_all(job)
    assert held() <= before
