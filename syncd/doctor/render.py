"""The report for people."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from syncd.doctor.expect import Expect
from syncd.doctor.finding import Finding
from syncd.doctor.report import Report

_COLORS = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
_VERDICTS = {
    "ok": "fit for syncd jobs",
    "warn": "fit for syncd jobs, with warnings",
    "fail": "not fit for syncd jobs",
}


def show(report: Report, console: Console) -> None:
    """Print a report: the findings, what to expect, the verdict."""
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


def expectations(expect: Expect) -> list[tuple[str, str]]:
    """Return what to expect and to set, as labelled lines."""
    means = "events (inotify)" if expect.wake == "inotify" else f"a tick each {expect.poll:g} s"
    latency = f"{expect.latency_p50_ms:g} ms (p50), {expect.latency_p99_ms:g} ms (p99)"
    settings = f"poll = {expect.poll:g}, trash_grace = {expect.trash_grace:g}"
    cache = f"this host may believe for {expect.attribute_cache:g} s what is no longer so"
    return [
        ("expect", f"a new version is seen {latency} after its publishing began, by {means}"),
        ("set", f"{settings} ({cache})"),
        *(("mount options", text) for text in expect.advice),
    ]


def verdict_line(report: Report) -> str:
    """Return the verdict in one line, with the probes that made it."""
    names = ", ".join(finding.name for finding in report.findings if finding.verdict == report.verdict)
    because = f" ({names})" if report.verdict in ("warn", "fail") else ""
    return f"{report.directory}: {_VERDICTS[report.verdict]}{because}"
