"""Each probe passes on a good file system, and says so when one misbehaves."""

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest

from syncd.parts.doctor import events, files, names
from syncd.parts.doctor.probe import FileSystemProbe, Finding, ProbeTarget
from syncd.parts.doctor.report import PROBES
from syncd.protocol.mount import Mount

_RENAME, _RMDIR = os.rename, os.rmdir


@pytest.fixture
def place(tmp_path: object) -> ProbeTarget:
    return ProbeTarget(str(tmp_path), str(tmp_path), Mount("/", "ext4", ("rw",), "/dev/vda"), seconds=0.1)


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_every_probe_passes_on_a_local_file_system(place: ProbeTarget, probe: FileSystemProbe) -> None:
    found = probe(place)
    assert found.name == probe.name
    assert (
        found.verdict in ("ok", "warn") if probe.name in ("space", "permissions") else found.verdict == "ok"
    )


def test_probe_names_are_unique() -> None:
    assert len({probe.name for probe in PROBES}) == len(PROBES)


def _rmtree(path: str) -> None:
    for name in os.listdir(path):
        os.unlink(f"{path}/{name}")
    _RMDIR(path)


def _replacing_rename(source: str, target: str) -> None:
    if os.path.isdir(target):
        _rmtree(target)
    _RENAME(source, target)


def _raise(number: int) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("probe", [names.rename_over_full, names.rename_to_trash, names.claim_race])
def test_renaming_over_a_full_directory_fails_the_probe(
    place: ProbeTarget, probe: FileSystemProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.rename", _replacing_rename)
    found = probe(place)
    assert found.verdict == "fail"
    assert "another file system" in found.advice


def test_a_claim_race_without_a_winner_fails_the_probe(
    place: ProbeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.rename", _raise(errno.EIO))
    assert names.claim_race(place).verdict == "fail"


def test_removing_a_full_directory_fails_the_probe(
    place: ProbeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.rmdir", _rmtree)
    assert names.rmdir_full(place).verdict == "fail"


def test_creating_in_a_removed_directory_fails_the_probe(
    place: ProbeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.rmdir", lambda _: None)
    assert names.create_in_removed(place).verdict == "fail"


def test_missing_hard_links_only_warn(place: ProbeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.link", _raise(errno.EPERM))
    assert names.hard_links(place).verdict == "warn"


@pytest.mark.parametrize(("number", "verdict"), [(errno.EINVAL, "warn"), (errno.EIO, "fail")])
def test_a_failing_directory_fsync_is_judged_by_its_error(
    place: ProbeTarget, monkeypatch: pytest.MonkeyPatch, number: int, verdict: str
) -> None:
    monkeypatch.setattr("os.fsync", _raise(number))
    assert files.directory_fsync(place).verdict == verdict


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (files.ReadCounts(reads=9), "ok"),
        (files.ReadCounts(reads=9, stale=3), "ok"),
        (files.ReadCounts(reads=9, partial=1), "fail"),
        (files.ReadCounts(reads=9, missing=1), "fail"),
    ],
)
def test_reads_during_replacement_are_judged_by_their_counts(seen: files.ReadCounts, verdict: str) -> None:
    assert files.judge_reads(seen, 4).verdict == verdict


def test_a_reader_counts_partial_missing_and_stale_reads(
    place: ProbeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = f"{place.scratch}/file", files.ReadCounts()
    seen.read(path)
    with open(path, "wb") as file:
        file.write(b"torn")
    seen.read(path)
    monkeypatch.setattr("builtins.open", _raise(errno.ESTALE))
    seen.read(path)
    assert (seen.reads, seen.partial, seen.missing, seen.stale) == (1, 1, 1, 1)


def test_slow_syncs_warn(place: ProbeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_fsync_once", lambda _: 0.9)
    found = files.file_fsync(place)
    assert (found.verdict, found.figures) == ("warn", {"p50_ms": 900.0, "p99_ms": 900.0})


def test_missing_direct_io_passes_with_the_error_named(
    place: ProbeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.pwritev", _raise(errno.EOPNOTSUPP))
    direct, uncached = files.direct_io(place), files.uncached_io(place)
    assert (direct.verdict, uncached.verdict) == ("ok", "ok")
    assert "EOPNOTSUPP" in direct.detail
    assert "EOPNOTSUPP" in uncached.detail


def test_a_private_umask_warns(place: ProbeTarget) -> None:
    before = os.umask(0o077)
    try:
        found = files.permissions(place)
    finally:
        os.umask(before)
    assert found.verdict == "warn"
    assert "umask 022" in found.advice


def test_inotify_limits_are_explained_in_the_advice(
    place: ProbeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "event_delays", _raise(errno.ENOSPC))
    assert "max_user_watches" in events.local_events(place).advice


def test_missing_inotify_events_warn(place: ProbeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PATIENCE", 0.01)
    monkeypatch.setattr(events.Listener, "wait", lambda _self, _seconds=0.0: False)
    assert events.local_events(place).verdict == "warn"


def test_locks_exclude_between_processes_of_one_host(place: ProbeTarget) -> None:
    assert names.local_locks(place).detail.startswith("on this host: flock excludes, lockf excludes")


def test_unsupported_locks_are_named_by_their_error(
    place: ProbeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(names._CALLS, "flock", _raise(errno.ENOLCK))
    assert "flock ENOLCK" in names.local_locks(place).detail
    assert names.try_lock(f"{place.scratch}/file", "flock") == "ENOLCK"


@pytest.mark.parametrize(
    ("kind", "options", "verdict", "words"),
    [
        ("ext4", ("rw",), "ok", "ext4 server:/x on /mnt"),
        ("nfs4", ("rw", "hard", "vers=4.2"), "ok", "vers=4.2"),
        ("nfs4", ("rw", "soft"), "warn", "mount it hard"),
        ("nfs4", ("rw", "noac"), "warn", "not needed"),
        ("nfs", ("rw", "nocto"), "fail", "remove nocto"),
        ("tmpfs", ("rw",), "warn", "next boot"),
        ("unknown", (), "warn", "findmnt"),
    ],
)
def test_harmful_mount_options_are_named_with_advice(
    place: ProbeTarget, kind: str, options: tuple[str, ...], verdict: str, words: str
) -> None:
    place = ProbeTarget(place.directory, place.scratch, Mount("/mnt", kind, options, "server:/x"))
    found = files.mount(place)
    assert found.verdict == verdict
    assert words in found.detail + found.advice


def _room(free: int, total: int, names_free: int, names_total: int) -> os.statvfs_result:
    return os.statvfs_result((1, 1, total, free, free, names_total, names_free, names_free, 0, 255))


@pytest.mark.parametrize(
    ("room", "verdict", "words"),
    [
        (_room(50 << 30, 100 << 30, 10**6, 10**7), "ok", "1,000,000 names"),
        (_room(50 << 30, 100 << 30, 0, 0), "ok", "not counted"),
        (_room(1 << 30, 100 << 30, 10**6, 10**7), "warn", "du -sh"),
        (_room(50 << 30, 100 << 30, 12, 10**7), "warn", "df -i"),
    ],
)
def test_free_space_is_judged_with_advice(room: os.statvfs_result, verdict: str, words: str) -> None:
    found = files.judge_space(room, "/job")
    assert found.verdict == verdict
    assert words in found.detail + found.advice


def test_white_space_in_the_path_warns(place: ProbeTarget) -> None:
    assert files.path(ProbeTarget("/my jobs", place.scratch)).verdict == "warn"


def test_an_unwritable_directory_fails_with_advice() -> None:
    found = files.writable(OSError(errno.EROFS, "Read-only file system"), "/job")
    assert found == Finding("writable", "fail", "EROFS: Read-only file system", found.advice)
    assert "--state-dir" in found.advice
