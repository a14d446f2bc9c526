"""The matrix of hosts, ways and faults, and what each cell is held to (`make test-peers`)."""

import json
import os
import subprocess
from datetime import UTC, datetime

from peer_bed import FAULTS, WAYS, Cell

TARGETS = {
    "none": (1.25, 1.05),
    "killed": (1.6, 1.4),
    "slow": (1.6, 1.4),
    "liar": (1.6, 1.4),
    "late": (1.6, 1.4),
}
"""The most time, in copies through the origin's link, and the most copies. With sixteen hosts and no fault: 1.4."""

WHAT = (
    "hosts that read together, over limited links; time: the last healthy host's, in copies through the link"
)
HOSTS = (2, 4, 8, 16)


def cells():
    """Return all cells.

    Changes are half as many bytes as a step, and all hosts build a model of them on the cores of one machine: the
    origin's link is half as fast for them, so that it is what is measured.
    """
    return [
        Cell(hosts, way, fault, origin=1.0 if way == "delta" else 2.0)
        for fault in FAULTS
        for hosts in HOSTS
        for way in WAYS
        if _has_figure(hosts, way, fault)
    ]


def _has_figure(hosts, way, fault):
    """Return whether a cell says anything: of two hosts one joins, which has the fault; the dead have no step."""
    return way != "join" or (fault != "dead" and (hosts > 2 or fault not in ("killed", "slow")))


def problem_of(row):
    """Return how a row misses its target, empty where it does not."""
    if not row["right"] or row["time"] is None:
        return "wrong bytes, or a host that has not finished"
    if row["fault"] not in TARGETS:
        alone = row["one_copy"] * (1 if row["fault"] == "dead" else row["hosts"])
        return (
            "" if row["seconds"] <= 1.2 * alone else f"slower than alone: {row['seconds']} of {alone:.1f} s"
        )
    most, copies = TARGETS[row["fault"]]
    if row["fault"] == "liar" and row["hosts"] == 2:
        copies = 1.55  # the other one has to read everything, whoever decides
    if row["fault"] == "none" and row["hosts"] > 8:
        most = 1.4
    if row["time"] > most or row["copies"] > copies:
        return f"more than {most} times one copy, or {copies} copies"
    return ""


class Results:
    """The rows of one run, in a file that is written after each."""

    def __init__(self, path):
        self._path, self._rows = path, []

    def add(self, row):
        self._rows.append(row)
        document = {"what": WHAT, "date": datetime.now(UTC).date().isoformat(), "commit": _commit()}
        document |= {"cores": os.cpu_count(), "rows": self._rows}
        with open(f"{self._path}.new", "w") as file:
            json.dump(document, file, indent=1)
            file.write("\n")
        os.replace(f"{self._path}.new", self._path)


def _commit():
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
