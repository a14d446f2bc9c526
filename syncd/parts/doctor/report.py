"""The report of `syncd doctor`: runs all probes of one directory, and shows what they found."""

import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from syncd.errors import JobMissingError, StorageError, SyncdError, TimedOutError
from syncd.parts.doctor import events, files, names
from syncd.parts.doctor.conclusions import Expectation, expectation
from syncd.parts.doctor.peer import open_link
from syncd.parts.doctor.probe import (
    SILENT,
    STUCK,
    FileSystemProbe,
    Finding,
    ProbeTarget,
    Verdict,
    advice_for,
    answering,
    bounded,
    errno_name,
    milliseconds,
    scratch_directory,
    worst,
)
from syncd.parts.doctor.two_hosts import Direction, Peer, converse
from syncd.protocol.documents import PROTOCOL
from syncd.protocol.mount import Mount, mount_of

SCHEMA = 1  # version of the JSON output: grows when a field changes its meaning or goes

PROBES: tuple[FileSystemProbe, ...] = (
    files.path, files.space, files.permissions, files.replace_under_reader, names.rename_over_full,
    names.claim_race, names.rename_to_trash, names.rmdir_full, names.create_in_removed,
    names.exclusive_create, files.file_fsync, files.directory_fsync, names.hard_links,
    files.direct_io, files.uncached_io, events.local_events, names.local_locks, files.clock,
)  # fmt: skip

_LATE = 1000.0

Ways = tuple[tuple[str, Direction], ...]


@dataclass(frozen=True, slots=True)
class DoctorReport:
    directory: str  # the directory, absolute
    findings: tuple[Finding, ...]  # one for each probe
    peer: Peer | None  # what two hosts measured together, if they did
    expect: Expectation  # what to expect and which settings to use
    missed: SyncdError | None = None  # why there is no peer, if one was waited for

    @property
    def verdict(self) -> Verdict:
        return worst(self.findings)

    def document(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA,
            "protocol": PROTOCOL,
            "directory": self.directory,
            "findings": [asdict(finding) for finding in self.findings],
            "peer": asdict(self.peer) if self.peer else None,
            "expect": asdict(self.expect),
            "verdict": self.verdict,
        }


def examine(directory: str, seconds: float = 5.0, wait: float | None = None) -> DoctorReport:
    """Examine a directory, together with a second host if `wait` is the seconds to wait for one."""
    directory, mount = _find(directory)
    try:
        with answering(directory), scratch_directory(directory) as scratch:
            target = ProbeTarget(directory, scratch, mount, seconds)
            findings = [files.writable(None, directory), *probe_all((files.mount, *PROBES), target)]
            peer, missed = (None, None) if wait is None else _with_peer(target, wait)
        findings += _left_behind(scratch)
    except OSError as error:
        findings, peer, missed = _unwritable(directory, mount, error), None, None
    findings += peer_findings(peer) if peer else []
    return DoctorReport(directory, tuple(findings), peer, expectation(mount, findings, peer), missed)


def _left_behind(scratch: str) -> list[Finding]:
    # On NFS a file that a stuck probe still has open keeps its directory until this process ends.
    if not bounded(lambda: os.path.lexists(scratch), STUCK):
        return []
    return [Finding("scratch", "warn", f"not removed yet: {scratch}", f"rm -r {shlex.quote(scratch)}")]


def _find(directory: str) -> tuple[str, Mount]:
    with answering(directory):
        path = bounded(lambda: os.path.realpath(directory), STUCK)
        there = bounded(lambda: os.path.isdir(path), STUCK)
        mount = mount_of(path)
    if not there:
        raise JobMissingError("no such directory", path=directory, hint=f"mkdir -p {shlex.quote(directory)}")
    return path, mount


def probe_all(probes: tuple[FileSystemProbe, ...], target: ProbeTarget) -> Iterator[Finding]:
    """Run one probe after another; once an essential one gets no answer, skip the rest."""
    stuck = False
    for probe in probes:
        if stuck:
            yield Finding(probe.name, "skip", "the file system does not answer")
            continue
        try:
            yield bounded(partial(probe, target), STUCK + target.seconds)
        except TimedOutError as error:
            stuck = probe.essential
            yield Finding(probe.name, "fail" if stuck else "warn", error.message, SILENT)


def _unwritable(directory: str, mount: Mount, error: OSError) -> list[Finding]:
    target = ProbeTarget(directory, directory, mount)
    seen = files.mount.body(target)
    skipped = [Finding(probe.name, "skip", "cannot write here") for probe in PROBES]
    return [replace(seen, name="mount"), files.writable(error, directory), *skipped]


def _with_peer(target: ProbeTarget, wait: float) -> tuple[Peer | None, SyncdError | None]:
    try:
        with open_link(target.directory, target.scratch) as end:
            return converse(end.find(wait), target.seconds), None
    except TimedOutError as error:
        error.hint = (
            f"at the same time on the other host: syncd doctor {shlex.quote(target.directory)} --peer"
        )
        return None, error
    except OSError as error:
        broken = f"the exchange with the second host failed ({errno_name(error)})"
        hint = advice_for(error, target.directory) or None
        return None, StorageError(broken, path=target.directory, hint=hint)


def peer_findings(peer: Peer) -> list[Finding]:
    """Return what two hosts measured as findings. syncd relies only on the tick."""
    ways = (("this host's", peer.outward), (f"{peer.host}'s", peer.inward))
    late = max(direction.round_trip_max_ms for _, direction in ways) / 2 > _LATE
    advice = "the server or the network stalls: check their load" if late else ""
    texts: dict[str, Callable[[Direction], str]] = {
        "peer-stat": lambda way: _within(way.stat_ms, way.bound_s),
        "peer-new-name": lambda way: _within(way.new_name_ms, way.bound_s),
        "peer-events": lambda way: "raise events" if way.events else "none in 1 s",
        "peer-locks": lambda way: f"flock {way.flock}, lockf {way.lockf}",
    }
    tick = Finding("peer-tick", "warn" if late else "ok", _both(ways, _tick), advice)
    return [tick, *(Finding(name, "ok", _both(ways, word)) for name, word in texts.items())]


def _both(ways: Ways, words: Callable[[Direction], str]) -> str:
    shown = [words(direction) for _, direction in ways]
    if shown[0] == shown[1]:
        return f"both ways: {shown[0]}"
    return "; ".join(f"{whose} changes: {text}" for (whose, _), text in zip(ways, shown, strict=True))


def _tick(way: Direction) -> str:
    halves = [milliseconds(trip / 2000) for trip in (way.round_trip_p50_ms, way.round_trip_p99_ms)]
    writing = milliseconds(way.write_p50_ms / 1000)
    return f"p50 {halves[0]}, p99 {halves[1]}, writing included ({writing}); half of {way.rounds} round trips"


def _within(lag_ms: float | None, bound: float) -> str:
    return f"not within {bound:g} s" if lag_ms is None else milliseconds(lag_ms / 1000)


_COLORS = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
_VERDICTS = {
    "ok": "fit for syncd jobs",
    "warn": "fit for syncd jobs, with warnings",
    "fail": "not fit for syncd jobs",
}


def show(report: DoctorReport, console: Console) -> None:
    console.print(_table(report.findings))
    console.print()
    for label, text in expectations(report.expect):
        console.print(f"[bold]{label:<16}[/] {escape(text)}", soft_wrap=True)
    console.print()
    console.print(verdict_line(report), style=_COLORS[report.verdict], markup=False, soft_wrap=True)


def _table(findings: tuple[Finding, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("probe", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in findings:
        advice = f"\n[bold]-> {escape(finding.advice)}[/]" if finding.advice else ""
        color = _COLORS[finding.verdict]
        table.add_row(finding.name, f"[{color}]{finding.verdict}[/]", escape(finding.detail) + advice)
    return table


def expectations(expect: Expectation) -> list[tuple[str, str]]:
    means = "events (inotify)" if expect.wake == "inotify" else f"a tick each {expect.poll:g} s"
    latency = f"{expect.latency_p50_ms:g} ms (p50), {expect.latency_p99_ms:g} ms (p99)"
    settings = f"poll = {expect.poll:g}, trash_grace = {expect.trash_grace:g}"
    cache = f"this host may see attributes that are up to {expect.attribute_cache:g} s old"
    return [
        ("expect", f"a new version is seen {latency} after publishing began, by {means}"),
        ("set", f"{settings} ({cache})"),
        *(("mount options", text) for text in expect.advice),
    ]


def verdict_line(report: DoctorReport) -> str:
    """Return the verdict in one line, with the probes that decided it."""
    names = ", ".join(finding.name for finding in report.findings if finding.verdict == report.verdict)
    because = f" ({names})" if report.verdict in ("warn", "fail") else ""
    return f"{report.directory}: {_VERDICTS[report.verdict]}{because}"
