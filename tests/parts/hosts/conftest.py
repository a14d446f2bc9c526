"""Hosts of one job as this process has them: each with a stage and a server of its own, on loopback."""

import contextlib
import threading

import pytest
from support.deltas import SmallModel
from support.fake_hook import FakeEngine, FakeHook
from support.jobs import start

import syncd.parts.hosts.pieces
import syncd.protocol.delta
from explorer_hooks.follower.policy import FollowOptions
from explorer_hooks.follower.versions import Fetcher
from syncd.client.client import Client
from syncd.parts.hosts.members import MEMBERS, TOKEN, encode_members, new_token
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk, SystemClock
from syncd.publishing import FollowingDisk, publish_export, read_export
from syncd.transports.delta.publish import publish_delta
from syncd.transports.files.leased_directory import LoadTimings


class CountingDisk(LocalDisk):
    """Counts the bytes that are read of weights, and those for which the kernel may fetch what follows too."""

    read_bytes = ahead_bytes = 0

    def read_at(self, path, offset, length, *, ahead=True):
        data = super().read_at(path, offset, length, ahead=ahead)
        if path.endswith(".safetensors"):
            self.read_bytes += len(data)
            self.ahead_bytes += ahead * len(data)
        return data


class Host:
    """A follower's way to a version."""

    def __init__(self, fleet, number, peers="127.0.0.1:0", *, early=False):
        self.disk, self.told = CountingDisk(), []
        self.client = Client.open(fleet.root, "explorer", f"e{number}", disk=self.disk)
        options = FollowOptions(stage=str(fleet.place / f"stage{number}"), peers=peers, early=early)
        self.fetcher = Fetcher(self.client, FakeHook(FakeEngine()), options, lambda: False, self._tell)
        self.early = self.fetcher._reader if early else None
        self.reader = self.early._behind if early else self.fetcher._reader
        self.reader._is_auto = False
        self.held = self.error = None

    def fetch(self, step=None):
        wanted = self.client.latest_version() if step is None else step
        self.held = self.fetcher.fetch(wanted, LoadTimings(self.client.clock))
        return self.held

    def try_fetch(self):
        try:
            self.fetch()
        except Exception as error:  # noqa: BLE001 - raised by `fetch_all`
            self.error = error

    def events(self):
        return [name for name, _ in self.told]

    def close(self):
        if self.held is not None:
            self.held.close()
        self.fetcher.close()
        self.client.close()

    def _tell(self, level, name, **fields):
        self.told.append((name, fields))


class Fleet:
    """A job and its hosts."""

    def __init__(self, place):
        self.place, self.root = place, str(place / "job")
        (place / "job").mkdir()
        self.job = Job.at(self.root)
        self.daemon, *_ = start(self.job, SystemClock(), keep_last=20)
        self.model, self._stack = SmallModel(), contextlib.ExitStack()
        self.hosts = []
        self.job.disk.make_directory(self.job.state)
        self.job.disk.replace(f"{self.job.state}/{TOKEN}", new_token())

    def whole(self, step):
        export = read_export(FollowingDisk(), self.model.export(self.place / f"export{step}"))
        publish_export(self.job, step, FollowingDisk(), export)
        self.daemon.tick(woken=True)

    def delta(self, step):
        export = read_export(FollowingDisk(), self.model.train().export(self.place / f"export{step}"))
        assert publish_delta(self.job, step, FollowingDisk(), export, step - 1).why_whole == ""
        self.daemon.tick(woken=True)

    def add(self, count=1, **options):
        new = [Host(self, len(self.hosts) + number, **options) for number in range(count)]
        for host in new:
            self._stack.callback(host.close)
        self.hosts += new
        return new

    def list(self, hosts=None, more=()):
        addresses = [host.reader.address for host in (self.hosts if hosts is None else hosts)]
        self.job.disk.replace(f"{self.job.state}/{MEMBERS}", encode_members(sorted([*addresses, *more]), 1))

    def fetch_all(self, hosts=None):
        """Have hosts get the version at once."""
        threads = [threading.Thread(target=host.try_fetch) for host in hosts or self.hosts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for host in hosts or self.hosts:
            assert host.error is None, host.error

    def close(self):
        self._stack.close()
        self.daemon.close()


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    """Return a job of small tiles, so that a small step has many pieces."""
    monkeypatch.setattr(syncd.protocol.delta, "TILE", 8 << 10)
    monkeypatch.setattr(syncd.parts.hosts.pieces, "TILE", 8 << 10)
    monkeypatch.setattr(syncd.parts.hosts.pieces, "_RUN", 1 << 10)
    made = Fleet(tmp_path)
    yield made
    made.close()
