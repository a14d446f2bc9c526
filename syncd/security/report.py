"""The report of `syncd doctor --security`, as a JSON document and as lines of text."""

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from syncd.doctor.probe import STUCK, answering, bounded
from syncd.errors import JobMissingError, plain
from syncd.protocol.documents import PROTOCOL
from syncd.security.collect import collect
from syncd.security.rules import AccessFinding, judge, verdict

SCHEMA = 1
"""Version of the JSON output: grows when a field changes its meaning or goes."""

_VERDICTS = {
    "ok": "no permission is too open",
    "warn": "more open than needed",
    "fail": "too open",
}


@dataclass(frozen=True, slots=True)
class AccessReport:
    """Which permissions around a job are too open.

    Args:
        directory: The job directory, absolute.
        permissions: The policy of its configuration.
        findings: The findings, the most severe first.
    """

    directory: str
    permissions: str
    findings: tuple[AccessFinding, ...]

    @property
    def verdict(self) -> str:
        return verdict(self.findings)

    def document(self) -> dict[str, Any]:
        """Return the report as the JSON output has it."""
        return {
            "schema_version": SCHEMA,
            "protocol": PROTOCOL,
            "directory": self.directory,
            "permissions": self.permissions,
            "findings": [asdict(finding) for finding in self.findings],
            "verdict": self.verdict,
        }

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        found = [text for finding in self.findings for text in _lines(finding)]
        return [
            *found,
            f"{plain(self.directory)}: {_VERDICTS[self.verdict]} (permissions = {self.permissions!r})",
        ]


def _lines(finding: AccessFinding) -> list[str]:
    first = f"{finding.severity:<4}  {finding.name:<16}  {plain(finding.where)}: {plain(finding.what)}"
    return [first, *([f"      -> {plain(finding.mend)}"] if finding.mend else [])]


def examine(directory: str, state_dir: str | None = None, secrets: Iterable[str] = ()) -> AccessReport:
    """Check the permissions of a job; change nothing.

    Raises:
        JobMissingError: It does not exist, or its server does not answer.
    """
    with answering(directory):
        if not bounded(lambda: os.path.isdir(directory), STUCK):
            raise JobMissingError("no such directory", path=directory, hint=f"ls -ld {directory}")
        snapshot = bounded(lambda: collect(directory, state_dir, secrets), STUCK)
    return AccessReport(snapshot.directory, snapshot.permissions, judge(snapshot))
