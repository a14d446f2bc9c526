"""Draws the charts of docs/figures.md from the recorded figures in benchmarks/results.

    python benchmarks/charts.py        # writes docs/chart-*.svg and the table of readers; a test compares them

It needs the standard library only, and draws no number that is not in one of these files.
"""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drawing import SERIES, Axis, Bar, Drawing, Line, bars, lines

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parent.parent / "docs"
_READERS = (1, 4, 8)
_WINDOW = 5
_WAYS = ("alone", "stage", "peers", "cp", "load_file", "prime-rl", "libtorrent", "super-seed")
_CURVES = ("orange", "pink", "blue", "green")
TABLE = ("<!-- readers.json -->\n\n", "\n<!-- end -->")
"""What stands around the table of readers in docs/figures.md."""


def main() -> None:
    """Write all charts."""
    for name, text in charts().items():
        (DOCS / name).write_text(text, encoding="utf-8")
        print(f"docs/{name}")
    page = DOCS / "figures.md"
    page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")


def charts() -> dict[str, str]:
    """Return the text of each chart by its name in docs/."""
    return {f"chart-{name}.svg": draw(_recorded(source)) for name, (source, draw) in _CHARTS.items()}


def with_table(page: str) -> str:
    """Return the page of figures with the table of readers as it was recorded."""
    begin, end = TABLE
    head, _, rest = page.partition(begin)
    return head + begin + readers_table(_recorded("readers")) + "\n" + rest[rest.index(end) :]


def _recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _sync(found: Mapping[str, Any]) -> str:
    """A whole sync by its parts, beside a file that is saved, polled and loaded."""
    legend = {"blue": "training is blocked", "orange": "write", "green": "notice and copy", "pink": "load"}
    drawing = Drawing(
        "A whole sync is 1.7 to 3.2 times faster than save, poll and load",
        "From the save until the last reader runs 0.25 GiB; medians, and least to most of the total",
        legend,
    )
    rows = [bar for readers in _READERS for bar in _sync_group(found["rows"], readers)]
    return bars(drawing, rows, Axis("seconds", (0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5)))


def _sync_group(rows: Sequence[Mapping[str, Any]], readers: int) -> Iterator[Bar]:
    yield Bar(f"{readers} reader{'s' if readers > 1 else ''} on one host")
    for row in rows:
        if row["readers"] == readers:
            total = row["total"]
            yield Bar(row["way"], _sync_parts(row), f"{total:.2f} s", (row["least"], row["most"]))


def _sync_parts(row: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the parts of a sync, scaled to its total: medians of parts do not add up to the median of the sum."""
    seconds = row["seconds"]
    is_ours = row["way"].startswith("syncd")
    blocked = seconds["gather"] if is_ours else seconds["write"]
    parts = {
        "blue": blocked,
        "orange": seconds["write"] if is_ours else 0,
        "green": sum(seconds.get(part, 0) for part in ("visibility", "stage", "verify")),
        "pink": sum(seconds.get(part, 0) for part in ("pause", "load", "confirm")),
    }
    scale = row["total"] / sum(parts.values())
    return [(color, value * scale) for color, value in parts.items() if value]


def _delta_bytes(found: Mapping[str, Any]) -> str:
    """How large a delta is, by learning rate and encoding."""
    drawing = Drawing(
        "At a learning rate of 1e-6 a delta is less than 1 % of the step",
        "Stored bytes as a share of a whole step in bfloat16; solid: synthetic AdamW, dashed: a real training",
        {},
    )
    curves = [line for number, series in enumerate(found["series"]) for line in _delta_lines(series, number)]
    rates = Axis("learning rate", (1e-6, 3e-6, 1e-5), _rate, log=True)
    return lines(drawing, curves, rates, Axis("% of a whole step", (0.5, 1, 3, 10, 30), log=True))


def _delta_lines(series: Mapping[str, Any], number: int) -> Iterator[Line]:
    names = {"ulp1": "syncd", "xor + zstd": "XOR + zstd", "positions and values": "positions + values"}
    for color, (encoding, name) in zip(SERIES, names.items(), strict=False):
        points = [
            (row["rate"], 100 / row["times_smaller"][encoding])
            for row in series["rows"]
            if row["rate"] <= 1e-5
        ]
        yield Line("" if number else name, color, points, dashed=bool(number))


def _rate(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-")


def _blocked(found: Mapping[str, Any]) -> str:
    """How long a save stops the training on a GPU."""
    drawing = Drawing(
        "A save stops a GPU's training for 42 ms per 2.2 GB",
        "One H100, host memory as the file system; medians of five saves, and least to most",
        {"blue": "syncd", "orange": "others", "green": "the bound: one copy into pinned memory"},
    )
    rows = [
        Bar("pinned copy", *_median("green", found["save"]["pinned copy"])),
        Bar("syncd, background", *_median("blue", found["save"]["background"])),
        Bar("tensor.cpu()", *_median("orange", found["save"]["tensor.cpu()"])),
        Bar("DCP async_save", *_median("orange", found["save"]["DCP async_save"])),
        Bar("syncd, stream", *_median("blue", found["save"]["stream"])),
    ]
    return bars(drawing, rows, Axis("seconds for which training waits", (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5)))


def _median(color: str, seconds: Sequence[float]) -> tuple[list[tuple[str, float]], str, tuple[float, float]]:
    middle = statistics.median(seconds)
    return [(color, middle)], f"{middle:.3f} s", (min(seconds), max(seconds))


def _visibility(found: Mapping[str, Any]) -> str:
    """How soon another client of NFS sees a version."""
    drawing = Drawing(
        "Over NFS a version is published 20 to 24 ms after the trainer's marker",
        "NFSv4.2, default options; the daemon publishes, then a follower on another client returns",
        {"blue": "until it is published", "orange": "until it is seen"},
    )
    rows = [bar for row in found["rows"] for bar in _visibility_group(row)]
    target = found["target"]["p99"]
    axis = Axis("milliseconds", (0, 50, 100, 150, 200, 250, 300))
    return bars(drawing, rows, axis, (target, f"target, 99th percentile of publishing: {target} ms"))


def _visibility_group(row: Mapping[str, Any]) -> Iterator[Bar]:
    yield Bar(f"{row['run']}, the daemon {row['daemon']}")
    for figure, name in (("p50", "median"), ("p99", "99th percentile")):
        parts = row["published"][figure], row["seen"][figure]
        yield Bar(name, list(zip(SERIES, parts, strict=False)), " + ".join(f"{part} ms" for part in parts))


def _delta_sync(found: Mapping[str, Any]) -> str:
    """Whole steps and deltas over links of two speeds."""
    drawing = Drawing(
        "Over a slow link a delta is 6 to 8 times faster than a whole step",
        "128 MiB, 1.5 % of the values changed, NFSv4.2; until the last reader has checked files",
        {"orange": "whole step", "blue": "delta", "green": "plain copy, without syncd"},
    )
    rows = [bar for gbytes in (0.1, 1) for bar in _link_group(found["rows"], gbytes)]
    return bars(drawing, rows, Axis("seconds", (0, 2, 4, 6, 8, 10, 12, 14)))


def _link_group(rows: Sequence[Mapping[str, Any]], gbytes: float) -> Iterator[Bar]:
    missed = "" if gbytes < 1 else ": 1.0 to 1.5 times faster; the target, 10 times, is missed"
    yield Bar(f"a link of {gbytes:g} GB/s{missed}")
    for row in rows:
        if row["link_gbytes"] == gbytes:
            readers = f"{row['readers']} reader{'s' if row['readers'] > 1 else ''}"
            yield Bar(f"{readers}, copy", [("green", row["copy"])], f"{row['copy']:g} s")
            yield from _form_bars(row)


def _form_bars(row: Mapping[str, Any]) -> Iterator[Bar]:
    for form, color in (("whole", "orange"), ("delta", "blue")):
        taken = row[form]
        end = f"{taken['median']:g} s"
        yield Bar(form, [(color, taken["median"])], end, (taken["least"], taken["most"]))


def _learning(found: Mapping[str, Any]) -> str:
    """The reward of three runs of the demo."""
    drawing = Drawing(
        "The demo learns in each of three seeds",
        "Mean reward of the last five steps, 128 rollouts each; two asynchronous explorers, 330,000 parameters",
        {},
    )
    curves = [
        Line(f"seed {run['seed']}", color, list(enumerate(_smooth(run["rewards"]), _WINDOW)))
        for color, run in zip(SERIES, found["runs"], strict=False)
    ]
    return lines(drawing, curves, Axis("step", (0, 20, 40, 60)), Axis("reward", (0.5, 0.6, 0.7, 0.8)))


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the mean of each five neighbors."""
    return [statistics.fmean(values[end - _WINDOW : end]) for end in range(_WINDOW, len(values) + 1)]


def _readers(found: Mapping[str, Any]) -> str:
    """How long it takes until the last of N readers over limited links has a step, by ways."""
    drawing = Drawing(
        "Alone, N readers take as long as N copies, with peers little more than one",
        f"The server sends {found['simulated'][0]['rate_mb']:g} MB/s, a reader twice that; dashed: computed",
        {},
    )
    shown = (("cp", "whole"), ("libtorrent", "whole"), ("peers", "whole"), ("peers", "delta"))
    curves = [
        line for what, color in zip(shown, _CURVES, strict=True) for line in _reader_lines(found, what, color)
    ]
    readers = Axis("readers", (1, 2, 4, 8, 16, 32, 64), log=True)
    return lines(drawing, curves, readers, Axis("seconds", (1, 3, 10, 30, 100, 300), log=True))


def _reader_lines(found: Mapping[str, Any], what: tuple[str, str], color: str) -> Iterator[Line]:
    measured, computed = (
        [
            (row["readers"], row["seconds"])
            for row in rows
            if ("links", *what) == (row["bed"], row["way"], row["form"])
        ]
        for rows in (found["rows"], found["simulated"])
    )
    label = f"{what[0]}, delta" if what[1] == "delta" else what[0]
    yield Line("" if computed else label, color, measured)
    if computed:
        yield Line(label, color, [measured[-1], *computed], dashed=True)


def readers_table(found: Mapping[str, Any]) -> str:
    """Return the table of readers in docs/figures.md: a row for each way, a column for each number of readers."""
    counts = sorted({row["readers"] for row in found["rows"]})
    computed = found["simulated"][0]["readers"]
    heads = [*(f"{count} reader{'s' if count > 1 else ''}" for count in counts), f"{computed}, computed"]
    lines = [
        f"| over | way | step | {' | '.join(heads)} | CPU s per GB | MiB |",
        "|---" * (len(heads) + 5) + "|",
    ]
    cells: dict[tuple[str, str, str], dict[int, Mapping[str, Any]]] = {}
    for row in (*found["rows"], *found["simulated"]):
        cells.setdefault((row["bed"], row["way"], row["form"]), {})[row["readers"]] = row
    in_order = sorted(cells, key=lambda what: (what[0], _WAYS.index(what[1]), what[2] == "delta"))
    return "\n".join([*lines, *(_reader_row(what, cells[what], [*counts, computed]) for what in in_order)])


def _reader_row(
    what: tuple[str, str, str], rows: Mapping[int, Mapping[str, Any]], counts: Sequence[int]
) -> str:
    """Return a line of the table: processor time and memory are those of the most readers that were measured."""
    most = rows[max(count for count in rows if count != counts[-1])]
    bed = "NFS" if what[0] == "nfs" else what[0]
    cells = [bed, *what[1:], *(_taken(rows.get(count)) for count in counts)]
    # The clock of the machine of NFS counts what other programs of its host take: of it the bytes are shown.
    cells += [
        "-" if bed == "NFS" else f"{most['cpu_per_gb']:.1f}",
        f"{max(most['memory'], 0) / (1 << 20):.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def _taken(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    megabytes = f"{row['server_bytes'] / 1e6:.1f}"
    return megabytes if row["bed"] == "nfs" else f"{row['seconds']:.1f}, {megabytes}"


_CHARTS: dict[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
    "sync": ("sync", _sync),
    "delta-bytes": ("delta_bytes", _delta_bytes),
    "delta-sync": ("delta_sync", _delta_sync),
    "blocked": ("gpu_copies", _blocked),
    "visibility": ("visibility", _visibility),
    "learning": ("learning_demo", _learning),
    "readers": ("readers", _readers),
}


if __name__ == "__main__":
    main()
