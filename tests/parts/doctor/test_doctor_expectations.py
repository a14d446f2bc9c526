"""What is concluded from a mount, its findings and a peer."""

import dataclasses

import pytest

from syncd.config import DaemonConfig
from syncd.parts.doctor.conclusions import attribute_cache, expectation, wakes
from syncd.parts.doctor.probe import Finding
from syncd.parts.doctor.report import peer_findings
from syncd.parts.doctor.two_hosts import Direction, Peer
from syncd.protocol.mount import Mount

EVENTS = Finding("events", "ok", "", "", {"p50_ms": 0.4, "max_ms": 2.0})
WAY = Direction(
    bound_s=5.0, rounds=39, round_trip_p50_ms=16.0, round_trip_p99_ms=42.0, round_trip_max_ms=42.0,
    write_p50_ms=3.0, stat_ms=2900.0, new_name_ms=None, events=False, flock="excludes", lockf="both acquire",
)  # fmt: skip
PEER = Peer("other", WAY, WAY)
EXT4 = Mount("/", "ext4")
NFS = Mount("/mnt", "nfs4", ("rw", "vers=4.2", "hard"))


@pytest.mark.parametrize(
    ("kind", "options", "seconds"),
    [
        ("ext4", (), 0.0),
        ("lustre", (), 0.0),
        ("nfs4", ("rw",), 60.0),
        ("nfs4", ("noac",), 0.0),
        ("nfs", ("actimeo=1",), 1.0),
        ("nfs", ("acregmax=3", "acdirmax=10"), 10.0),
        ("nfs", ("acregmax=3",), 60.0),
        ("nfs", ("acregmax=120",), 120.0),
        ("nfs", ("actimeo=odd",), 60.0),
        ("cifs", (), 1.0),
        ("fuse.sshfs", (), 60.0),
    ],
)
def test_attribute_cache_lifetime_follows_from_the_mount_options(
    kind: str, options: tuple[str, ...], seconds: float
) -> None:
    assert attribute_cache(Mount("/", kind, options)) == seconds


def test_local_file_systems_wake_by_inotify() -> None:
    found = expectation(EXT4, [EVENTS], None)
    assert (found.wake, found.latency_p50_ms, found.latency_p99_ms) == ("inotify", 0.4, 2.0)
    assert found.advice == ()


def test_network_file_systems_wake_by_polling() -> None:
    found = expectation(NFS, [EVENTS], PEER)
    assert (found.wake, found.poll, found.trash_grace) == ("poll", 0.25, 75.0)
    assert (found.latency_p50_ms, found.latency_p99_ms) == (133.0, 271.0)
    assert any("noac is not needed" in line for line in found.advice)


def test_daemon_defaults_suit_a_default_nfs_mount() -> None:
    found, defaults = expectation(NFS, [EVENTS], None), DaemonConfig()
    assert (found.poll, found.trash_grace) == (defaults.poll, defaults.trash_grace)


def test_slow_round_trips_lengthen_the_poll_interval() -> None:
    slow = Peer("other", dataclasses.replace(WAY, round_trip_p50_ms=2000.0), WAY)
    assert expectation(NFS, [EVENTS], slow).poll == 2.0


@pytest.mark.parametrize(
    ("mount", "findings", "peer", "expected"),
    [
        (EXT4, [EVENTS], None, True),
        (EXT4, [Finding("events", "warn", "")], None, False),
        (NFS, [EVENTS], None, False),
        (EXT4, [EVENTS], PEER, False),
    ],
)
def test_inotify_is_chosen_only_where_events_arrived(
    mount: Mount, findings: list[Finding], peer: Peer | None, expected: bool
) -> None:
    assert wakes(mount, findings, peer) is expected


def test_equal_peer_findings_are_reported_for_both_directions() -> None:
    found = {finding.name: finding for finding in peer_findings(PEER)}
    assert (
        found["peer-tick"].detail
        == "both ways: p50 8 ms, p99 21 ms, writing included (3 ms); half of 39 round trips"
    )
    assert found["peer-stat"].detail == "both ways: 2.9 s"
    assert found["peer-new-name"].detail == "both ways: not within 5 s"
    assert found["peer-events"].detail == "both ways: none in 1 s"
    assert found["peer-locks"].detail == "both ways: flock excludes, lockf both acquire"
    assert {finding.verdict for finding in found.values()} == {"ok"}


def test_unequal_peer_findings_are_reported_per_direction() -> None:
    uneven = Peer("other", WAY, dataclasses.replace(WAY, stat_ms=30.0))
    stat = next(finding for finding in peer_findings(uneven) if finding.name == "peer-stat")
    assert stat.detail == "this host's changes: 2.9 s; other's changes: 30 ms"


def test_stalled_round_trips_warn() -> None:
    stalled = Peer("other", dataclasses.replace(WAY, round_trip_max_ms=14000.0), WAY)
    assert peer_findings(stalled)[0].verdict == "warn"
