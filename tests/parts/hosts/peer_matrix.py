"""The matrix of hosts, ways and faults: `python -m peer_matrix --out FILE`. Prints a line of JSON for each cell.

A file that is there is continued: cells that it has are not run again.
"""

import argparse
import json
import os
import subprocess

from links import no_links
from peer_bed import FAULTS, WAYS, Cell, run_cell

TARGETS = {
    "none": (1.25, 1.05),
    "killed": (1.6, 1.4),
    "slow": (1.6, 1.4),
    "liar": (1.6, 1.4),
    "late": (1.6, 1.4),
}
"""The most time, in copies through the origin's link, and the most copies. With sixteen hosts and no fault: 1.4."""


def has_figure(hosts, way, fault):
    """Return whether a cell says anything: of two hosts one joins, which has the fault; the dead have no step."""
    return way != "join" or (fault != "dead" and (hosts > 2 or fault not in ("killed", "slow")))


def problem_of(row, alone):
    """Return how a row misses its target, empty where it does not.

    Args:
        alone: Seconds that as many hosts take which read alone.
    """
    if not row["right"] or row["time"] is None:
        return "wrong bytes, or a host that has not finished"
    if row["fault"] not in TARGETS:
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


def _commit():
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()


def _write(path, rows):
    with open(f"{path}.new", "w") as file:
        json.dump({"what": "hosts that read together, over limited links", "rows": rows}, file, indent=1)
        file.write("\n")
    os.replace(f"{path}.new", path)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--hosts", default="2,4,8,16")
    options.add_argument("--ways", default=",".join(WAYS))
    options.add_argument("--faults", default=",".join(FAULTS))
    options.add_argument("--out", required=True)
    options.add_argument("--origin", type=float, default=2.0, help="MB/s of the origin's link")
    options.add_argument("--mib", type=int, default=24)
    chosen = options.parse_args()
    if why := no_links():
        print(f"skipped: {why}")
        return
    rows = []
    if os.path.exists(chosen.out):
        with open(chosen.out) as file:
            rows = json.load(file)["rows"]
    done = {(row["hosts"], row["way"], row["fault"]) for row in rows}
    for fault in chosen.faults.split(","):
        for hosts in map(int, chosen.hosts.split(",")):
            for way in chosen.ways.split(","):
                if (hosts, way, fault) not in done and has_figure(hosts, way, fault):
                    row = run_cell(Cell(hosts, way, fault, origin=chosen.origin, mib=chosen.mib))
                    alone = row["one_copy"] * (1 if fault == "dead" else hosts)
                    row["problem"] = problem_of(row, alone)
                    rows.append({**row, "commit": _commit()})
                    print(json.dumps(rows[-1]), flush=True)
                    _write(chosen.out, rows)


if __name__ == "__main__":
    main()
