"""Hosts divide a step while the trainer still writes it: one copy from the file system, and never a wrong byte."""

import errno
import os
import threading
from contextlib import closing, suppress

import pytest
import torch
from support.deltas import contents
from support.waiting import until

import syncd.parts.hosts.pieces
import syncd.protocol.delta
from syncd.errors import SyncdError
from syncd.parts.early import copy as early_copy
from syncd.parts.hosts import gather
from syncd.protocol.manifest import read_manifest
from syncd.protocol.presence import read_presences
from syncd.protocol.write_progress import ProgressNotes
from syncd.transports.files.shard import PIECE, NewFile
from syncd.transports.files.step_saver import StepSaver

TILE = 1 << 20
SIZE = 3 * PIECE  # bytes of the weights


class PausedSave:
    """A trainer that saves a step, and stops once the first half is written until it is told to go on."""

    def __init__(self, fleet, step, world_size=1, *, claims=None):
        self.fleet, self.step, self._written = fleet, step, {}
        self._claims, self._half, self.go = claims, threading.Event(), threading.Event()
        self._savers = [StepSaver(fleet.job, rank, world_size) for rank in range(world_size)]
        self._weights = {
            f"layer{number}": torch.randn(
                SIZE // 2 // 8, generator=torch.Generator().manual_seed(step)
            ).bfloat16()
            for number in range(8)
        }

    def note(self, notes, written, note):
        notes._next = 0.0
        note(notes, self._claims or written)
        self._written[notes._progress.name] = written
        if SIZE / len(self._savers) / 3 < written and not self.go.is_set():
            self._half.set()
            self.go.wait(60)

    @property
    def written(self):
        return sum(self._written.values())

    def begin(self):
        for saver in self._savers:
            saver.has_tiles = True
            saver.save(self.step, f"save-{self.step}", self._weights.items())
        assert self._half.wait(60)

    def finish(self):
        self.go.set()
        for saver in self._savers:
            saver.wait()
        self.fleet.daemon.tick(woken=True)

    def close(self):
        self.go.set()
        for saver in self._savers:
            with suppress(SyncdError, OSError):  # its attempt is gone
                saver.close()


@pytest.fixture
def save(fleet, monkeypatch):
    monkeypatch.setattr(syncd.protocol.delta, "TILE", TILE)
    monkeypatch.setattr(syncd.parts.hosts.pieces, "TILE", TILE)
    saves, note = [], ProgressNotes.note
    monkeypatch.setattr(ProgressNotes, "note", lambda notes, written: saves[-1].note(notes, written, note))

    def begin(step=1, **options):
        saves.append(PausedSave(fleet, step, **options))
        return saves[-1]

    yield begin
    for made in saves:
        made.close()


def copied(hosts):
    """Return the bytes of the tiles that each host has copied early."""
    copies = [host.early._held.copy if host.early._held else None for host in hosts]
    return [sum(span.length for file in files_of(copy) for span in list(file.digests)) for copy in copies]


def files_of(copy):
    return list(copy._files.values()) if copy else []


def holds(fleet, hosts, step=1):
    wanted = contents(f"{fleet.job.step(step)}/actor")
    wanted = {name: data for name, data in wanted.items() if not name.startswith(".")}
    return all(contents(host.held.directory.path) == wanted for host in hosts)


def origin(hosts):
    return sum(host.reader.bytes_by_source()["origin"] for host in hosts)


def size_of(fleet, step=1):
    return sum(record.size for record in read_manifest(fleet.job.disk, fleet.job.step(step)).shards)


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_host_copies_its_share_while_the_step_is_written(fleet, save, world_size):
    hosts = fleet.add(3, early=True)
    fleet.list()
    saving = save(world_size=world_size)
    saving.begin()
    until(lambda: min(copied(hosts)) > 0 and sum(copied(hosts)) > saving.written - 4 * TILE * world_size)
    early = copied(hosts)
    assert sum(early) <= saving.written  # no tile twice
    assert max(early) < 0.5 * sum(early)
    saving.finish()
    fleet.fetch_all()
    assert holds(fleet, hosts)
    assert origin(hosts) < 1.02 * size_of(fleet)
    for host, before in zip(hosts, early, strict=True):
        assert host.reader.bytes_by_source()["origin"] >= before
        assert host.reader.bytes_by_source()["peers"] > 0.5 * size_of(fleet)
        assert "early_copy_used" in host.events()
        # What was there already was not read again; the headers were, by their size and a multiple of 64 KiB.
        assert host.disk.read_bytes < 1.1 * size_of(fleet) / len(hosts) - before + TILE


def test_what_a_hint_called_written_too_soon_is_read_again(fleet, save, monkeypatch):
    hosts = fleet.add(2, early=True)
    fleet.list()
    saving, write = save(claims=SIZE), NewFile.write

    def write_late(file, piece, offset):
        if offset >= 2 * PIECE:
            saving.go.wait(60)
        write(file, piece, offset)

    monkeypatch.setattr(NewFile, "write", write_late)
    saving.begin()
    until(lambda: sum(copied(hosts)) > SIZE - 2 * TILE)
    saving.finish()
    fleet.fetch_all()
    assert holds(fleet, hosts)
    assert sum(host.disk.read_bytes for host in hosts) > TILE
    assert not any("peers_removed" in host.events() for host in hosts)


def test_what_was_copied_early_is_no_measure_of_how_quick_other_hosts_are(fleet, save, monkeypatch):
    seen, late_hosts = [], gather.late_hosts

    def judge(hosts, size, *more, **by):
        seen.append(size)
        return late_hosts(hosts, size, *more, **by)

    monkeypatch.setattr(gather, "late_hosts", judge)
    monkeypatch.setattr(gather, "_JUDGE", 0.0)
    hosts = fleet.add(2, early=True)
    fleet.list()
    saving = save()
    saving.begin()
    until(lambda: min(copied(hosts)) > 4 * TILE)
    least = min(copied(hosts))
    saving.finish()
    fleet.fetch_all()
    assert holds(fleet, hosts)
    assert all(size <= size_of(fleet) - least + TILE for size in seen)


def test_a_stage_that_cannot_be_written_early_costs_the_early_copy_only(fleet, save, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(early_copy, "write_all_at", fail)
    hosts = fleet.add(2, early=True)
    fleet.list()
    saving = save()
    saving.begin()
    until(lambda: all("early_copy_dropped" in host.events() for host in hosts))
    saving.finish()
    fleet.fetch_all()
    assert holds(fleet, hosts)


def test_the_share_of_a_host_that_goes_is_read_by_the_others(fleet, save):
    gone, *hosts = fleet.add(3, early=True)
    fleet.list()
    saving = save()
    saving.begin()
    until(lambda: min(copied([gone, *hosts])) > 0)
    gone.close()
    saving.finish()
    fleet.fetch_all(hosts)
    assert holds(fleet, hosts)


def test_a_list_that_changes_meanwhile_costs_at_most_what_was_copied_early(fleet, save):
    listed, late = fleet.add(2, early=True)
    fleet.list([listed])
    saving = save()
    saving.begin()
    until(lambda: copied([listed])[0] > 0)
    assert copied([late]) == [0]
    fleet.list()
    saving.finish()
    fleet.fetch_all()
    assert holds(fleet, [listed, late])
    assert origin([listed, late]) < 1.6 * size_of(fleet)


def test_without_a_list_a_host_copies_all_of_it_early(fleet, save):
    (host,) = fleet.add(1, early=True)
    saving = save()
    saving.begin()
    until(lambda: sum(copied([host])) > saving.written - 2 * TILE)
    saving.finish()
    fleet.fetch_all()
    assert holds(fleet, [host])
    assert origin([host]) < 1.02 * size_of(fleet)


def test_bytes_of_an_attempt_that_is_abandoned_count_as_read(fleet, save):
    (host,) = fleet.add(1, early=True)
    fleet.list()
    saving = save()
    saving.begin()
    until(lambda: sum(copied([host])) > TILE)
    os.rename(fleet.job.attempt(1, "save-1"), fleet.place / "gone")
    until(lambda: "early_copy_dropped" in host.events())
    assert origin([host]) >= TILE


def test_an_explorer_that_divides_steps_has_the_trainer_write_their_tiles(fleet):
    fleet.add(1, early=True)
    presences, _ = read_presences(fleet.job.disk, fleet.job.explorers)
    reads = {name for one in presences.values() for name in one.reads}
    assert reads >= {"early", "tiles"}
    for has_tiles in (False, True):
        with closing(StepSaver(fleet.job, 0, 1)) as saver:
            saver.has_tiles = has_tiles
            saver.save(1 + has_tiles, "save", {"w": torch.ones(8)}.items())
            saver.wait()
        assert bool(read_manifest(fleet.job.disk, fleet.job.step(1 + has_tiles)).root) is has_tiles
