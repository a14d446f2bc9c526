"""Tables: the documents of `views.documents` as rich renderables."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from syncd.errors import plain
from syncd.views.documents import has_engine_trouble
from syncd.views.narrow_table import FittingTable

Document = Mapping[str, Any]

_HEARTS = {"alive": "green", "dead": "bold red", "left": "dim", "unknown": "yellow"}
_STATES = {"complete": "green", "filling": "yellow", "damaged": "bold red"}
_ENGINES = {
    "proven": "green",
    "loaded": "green",
    "refused": "yellow",
    "failed": "yellow",
    "stopped": "dim",
    "unreachable": "bold red",
    "wrong": "bold red",
    "dead": "bold red",
}
_ENGINE_COLUMNS = ("engine", "load", "failures", "proof")
_PHASES = {"idle": "green", "canary": "yellow", "rolling": "yellow", "stopped": "bold red"}
_WORKING = ("proven", "loaded", "refused", "failed")
_SEVERITIES = {"critical": "bold red", "warning": "yellow", "notice": "dim"}
_NAMED = 3  # of several problems of a kind so many are shown

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_KIBI = 1024
_BAR = 24
_WIDE = 160
_NOTE = "~ by its own clock: one reading cannot tell who is alive; --look 6 or --watch can"


def console() -> Console:
    """Return a console that takes nothing for markup and does not cut pipes to 80 columns."""
    width = None if sys.stdout.isatty() else _WIDE
    return Console(markup=False, highlight=False, emoji=False, width=width)


def status(document: Document, rows: int = 50, *, problems_first: bool = False) -> RenderableType:
    """Return the tables of a status document.

    Args:
        rows: Explorers to show at most; those that need attention come first.
        problems_first: Show problems above all else: the end of a live view may be below the screen.
    """
    head = _grid(
        job=plain(document["job"]),
        version=_version(document["version"]),
        **({"finished": _finished(document["finished"])} if document["finished"] else {}),
        marker=_marker(document),
        steps=_counts(document),
        daemon=_daemon(document["daemon"]),
        **({"mirror of": plain(source)} if (source := document.get("mirror_of")) else {}),
    )
    parts: list[RenderableType] = [head]
    if document["filling"]:
        parts += [Text(), _filling(document["filling"])]
    if document["explorers"]:
        parts += [Text(), _explorers(document["explorers"], rows, document["at"])]
    if document["rolling"]:
        parts += [Text(), rolling(document["rolling"])]
    if document["trainers"]:
        parts += [Text(), _trainers(document["trainers"])]
    mirrors = document.get("mirrors", [])
    if mirrors:
        parts += [Text(), _mirrors(mirrors)]
    modules = (*document["explorers"], *document["trainers"], *mirrors)
    if any(module["heart"] == "unknown" for module in modules):
        parts.append(Text(_NOTE, "dim"))
    groups = document["problem_groups"]
    if notes := [*map(_problem, groups), *_help(groups), *_next(document["next"])]:
        parts = [*notes, Text(), *parts] if problems_first else [*parts, Text(), *notes]
    return Group(*parts)


def last_report(document: Document) -> RenderableType:
    report = document["known"]
    if report is None:
        nobody = Text("no daemon of this host has reported anything about this job", "yellow")
        return _grid(job=plain(document["job"]), daemon=nobody)
    ended = "" if report["runs"] else ", which has ended since"
    return _grid(
        job=plain(document["job"]),
        daemon=Text(f"pid {report['pid']} of this host{ended}, {age(report['age'])} ago", "yellow"),
        reported=plain(str(report.get("status", ""))),
        mount=_mount(report.get("mount"), document["at"]),
        version=_last(report.get("version"), document["at"]),
    )


def _mount(mount: Any, now: float) -> Text:
    if not isinstance(mount, dict) or not isinstance(mount.get("since"), int | float):
        return Text("unknown", "yellow")
    state, since = str(mount.get("state")), age(max(now - mount["since"], 0.0))
    detail = plain(str(mount.get("detail") or ""))
    text = Text(f"{plain(state)} for {since}", "green" if state == "ok" else "bold red")
    return text.append(f"  {detail}", "default")


def _last(version: Any, now: float) -> Text:
    if not isinstance(version, dict) or not isinstance(version.get("published_at"), int | float):
        return Text("no published version is known", "yellow")
    text = Text(plain(f"{version.get('generation')}.{version.get('step')}"), "bold green")
    return text.append(f"  published {age(max(now - version['published_at'], 0.0))} ago", "default")


def steps(document: Document) -> RenderableType:
    table = _table("step", "state", "shards", "bytes", "kind", "published", "leases", "kept", "by", "why")
    for number in (0, 2, 3):
        table.columns[number].justify = "right"
    for row in document["steps"]:
        table.add_row(
            str(row["step"]),
            Text(row["state"], _STATES.get(row["state"], "")),
            _of(row["shards"], row["shards_expected"]),
            size(row["bytes"]),
            _kind(row),
            row["published"] or "",
            " ".join(row["leases"]),
            Text("yes") if row["keep"] else Text("no", "red"),
            row["rule"],
            _why(row),
        )
    return table


def _why(row: Document) -> str:
    reason = row["detail"] or row["problem"]
    return plain(f"quarantined: {row['quarantined']}" if row["quarantined"] else reason)


def delta(figures: Document) -> str:
    """Return the figures of a delta for people to read: what it saves, and what a late reader must read."""
    chain = "chain broken" if figures["chain"] is None else f"{figures['chain']} after its keyframe"
    return f"delta of {figures['parent']}, {_saving(figures)}, {chain}"


def shortcut(figures: Document) -> str:
    """Return the figures of a shortcut for people to read: what it saves a reader that has its parent."""
    if figures["problem"]:
        return "unusable shortcut"
    return f"shortcut from {figures['parent']}, {_saving(figures)}"


def _saving(figures: Document) -> str:
    ratio = f"{figures['whole_bytes'] / max(figures['bytes'], 1):.1f}x"
    return ratio if figures["density"] is None else f"{ratio}, {figures['density']:.2%} changed"


def size(count: int) -> str:
    value, unit = float(count), 0
    while value >= _KIBI and unit < len(_UNITS) - 1:
        value, unit = value / _KIBI, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{count} B"


def age(seconds: float) -> str:
    """Return a duration for people to read, in its two largest units."""
    whole = int(seconds)
    for unit, name, part, rest in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // part} {rest}"
    return f"{whole} s"


def _grid(**rows: str | Text) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")  # a path that is longer than a line is broken, never cut
    for name, value in rows.items():
        table.add_row(Text(name, "bold"), value)
    return table


def _version(version: Document | None) -> Text:
    if version is None:
        return Text("nothing is published yet", "yellow")
    text = Text(f"{version['generation']}.{version['step']}", "bold green")
    text.append(f"  published {age(version['age'])} ago", "default")
    text.append(f"  {plain(version['path'])}", "dim")
    if version["delta"]:
        text.append(f"  {delta(version['delta'])}", "dim")
    if version["shortcut"]:
        text.append(f"  {shortcut(version['shortcut'])}", "dim")
    if version["held"]:
        text.append("  held after a rollback", "yellow")
    good = version["last_good"]
    if version["quarantine"] and good:
        text.append(f"  last good {_pair(good)}", "yellow")
    return text


def _finished(end: Document) -> Text:
    return Text("yes", "green").append(f"  at step {end['step']}: {plain(end['reason'])}", "default")


def _marker(document: Document) -> Text:
    marker = document["marker"]
    text = Text(str(marker["step"])) if marker["step"] is not None else Text(marker["problem"], "yellow")
    newest = document["newest_complete"]
    return text.append(f"  newest complete {'none' if newest is None else newest}")


def _counts(document: Document) -> str:
    counts, disk = document["steps"], document["disk"]
    parts = ", ".join(f"{counts[state]} {state}" for state in _STATES if counts[state])
    free = "" if disk["free"] is None else f", {size(disk['free'])} free on {disk['type']}"
    return f"{counts['total']}" + (f" ({parts})" if parts else "") + f", {size(counts['bytes'])}{free}"


def _daemon(daemon: Document | None) -> Text:
    if daemon is None:
        return Text("no daemon has led this job yet", "yellow")
    text = Text(daemon["heart"], _HEARTS[daemon["heart"]])
    return text.append(f"  {_where(daemon)}  term {daemon['term']}", "default")


def _filling(filling: Iterable[Document]) -> Table:
    table = _table("filling", "", "shards", "bytes")
    for step in filling:
        bar = ProgressBar(total=step["expected"] or 1, completed=step["present"], width=_BAR)
        table.add_row(str(step["step"]), bar, _of(step["present"], step["expected"]), size(step["bytes"]))
    return table


def _explorers(explorers: list[Document], rows: int, now: float) -> Table:
    engines = _ENGINE_COLUMNS if any(item["engine"] for item in explorers) else ()
    reads = ("read",) if any(item["read"] for item in explorers) else ()
    table = _table(
        "explorer", "heartbeat", "status", *engines, "applied", "loading", "lag", "leases", *reads, "host"
    )
    for item in sorted(explorers, key=_attention)[:rows]:
        table.add_row(
            item["id"],
            _heart(item),
            item["status"],
            *(_engine(item["engine"], now) if engines else ()),
            _pair(item["applied"]),
            _pair(item["loading"]),
            _lag(item["lag"]),
            " ".join(map(str, item["leases"])),
            *(_read(item["read"]) for _ in reads),
            _where(item),
        )
    if len(explorers) > rows:
        table.add_row(Text(f"and {len(explorers) - rows} more", "dim"))
    return table


def _engine(engine: Document | None, now: float) -> tuple[Text, str, Text, str]:
    """Return the cells of `_ENGINE_COLUMNS`."""
    if engine is None:
        return Text(""), "", Text(""), ""
    state, seconds, proof = engine["state"], engine["load_seconds"], engine["proof"]
    shown = Text(f"{state} {age(max(now - engine['since'], 0.0))}", _ENGINES.get(state, ""))
    is_waiting_to_work = state in _WORKING and not engine["ready"]
    return (
        shown.append(", not ready" if is_waiting_to_work else "", "yellow"),
        "" if seconds is None else f"{seconds:.3g} s",
        Text(str(engine["failures"]), "yellow" if engine["failures"] else ""),
        "" if proof is None else f"{proof['mean']:.2g} of {proof['tolerance']:.2g}{_power(proof)}",
    )


def rolling(wave: Document) -> RenderableType:
    """Return who may load which version, and who waits why."""
    word = "  by the word of canaries: there was nothing to prove it by" if wave["by_word"] else ""
    head = _grid(
        rolling=Text(wave["phase"], _PHASES[wave["phase"]]),
        candidate=Text(_pair(wave["candidate"]) or "none"),
        approved=Text(_pair(wave["approved"]) or "none").append(word, "yellow"),
        waiting=Text(_waiting(wave)),
    )
    if not wave["slots"]:
        return head
    table = _table("slot", "version", "for", "")
    for slot in wave["slots"]:
        is_free = "serves nothing" if slot["free"] else ""
        doing = "loads" if slot["loads"] else "may load"
        table.add_row(plain(slot["explorer"]), _pair(slot), age(slot["age"]), f"{doing} {is_free}".strip())
    return Group(head, table)


def _waiting(wave: Document) -> str:
    names, why = wave["waiting"], plain(wave["why"])
    if not names:
        return "nobody"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{plain(', '.join(names[:_NAMED]))}{more}: {why}"


def _read(read: Document | None) -> Text:
    """Return where bytes came from: `1.2 GB, 3.4 GB of peers`."""
    if read is None:
        return Text("")
    shown = f"{size(read['origin'])}, {size(read['peers'])} of peers"
    return Text(shown, "yellow" if read["over_budget"] else "")


def _power(proof: Document) -> str:
    """Return the least part of the model's change whose absence would have been found, empty if that is not known."""
    seen = proof.get("seen")
    return "" if seen is None else f", sees {seen:.0%}"


def _trainers(trainers: Iterable[Document]) -> Table:
    table = _table("trainer", "heartbeat", "status", "step", "host")
    for item in trainers:
        step = "" if item["step"] is None else str(item["step"])
        table.add_row(item["id"], _heart(item), _doing(item), step, _where(item))
    return table


def _mirrors(mirrors: Iterable[Document]) -> Table:
    table = _table("mirror to", "heartbeat", "state", "version", "lag", "left", "host")
    for item in mirrors:
        pair = None if item["step"] is None else item
        left = size(item["left"]) if item["left"] else ""
        table.add_row(
            plain(item["target"]),
            _heart(item),
            plain(item["state"]),
            _pair(pair),
            _lag(item["behind"]),
            left,
            _where(item),
        )
    return table


def _doing(trainer: Document) -> str:
    waiting = trainer["waiting"]
    return f"{trainer['status']}, waits for {plain(waiting['for'])}" if waiting else str(trainer["status"])


def _attention(explorer: Document) -> tuple[bool, bool, int, str]:
    return (
        explorer["heart"] != "dead",
        not has_engine_trouble(explorer),
        -(explorer["lag"] or 0),
        explorer["id"],
    )


def _heart(module: Document) -> Text:
    heart = module["heart"]
    return Text(f"~ {age(module['beat_age'])} ago" if heart == "unknown" else heart, _HEARTS[heart])


def _where(item: Document) -> str:
    return plain(f"{item['host']}:{item['pid']}") if item["host"] else ""


def _problem(problem_group: Document) -> Text:
    """Return a group of problems as a line: `! warning: 9 explorers are dead: e0, e1, e2 and 6 more`."""
    text, details = problem_group["text"], problem_group["details"]
    if len(details) > 1:
        more = f" and {len(details) - _NAMED} more" if len(details) > _NAMED else ""
        text = f"{text}: {'; '.join(details[:_NAMED])}{more}"
    hint = f" ({problem_group['hint']})" if problem_group["hint"] else ""
    return Text(plain(f"! {problem_group['severity']}: {text}{hint}"), _SEVERITIES[problem_group["severity"]])


def _help(groups: list[Document]) -> list[Text]:
    """Return where the documentation says what the most urgent problem means; nothing of what needs no action."""
    return [
        Text(f"help: {plain(group['help'])}", "dim") for group in groups[:1] if group["severity"] != "notice"
    ]


def _next(command: Document | None) -> list[Text]:
    return [Text(plain(f"{command['why']}: {command['command']}"))] if command else []


def _lag(lag: int | None) -> Text:
    return Text("") if lag is None else Text(str(lag), "yellow" if lag > 1 else "")


def _pair(pair: Document | None) -> str:
    return "" if pair is None else f"{pair['generation']}.{pair['step']}"


def _of(there: int, expected: int | None) -> str:
    return f"{there}/{'?' if expected is None else expected}"


def _kind(row: Document) -> str:
    kind = "" if row["kind"] == "weights" else row["kind"]
    if row["delta"]:
        kind = delta(row["delta"])
    if row["shortcut"]:
        kind = shortcut(row["shortcut"])
    return " ".join(
        filter(None, ("full" if row["full"] else "sync", kind, "pinned" if row["pinned"] else ""))
    )


_ORDER = (
    "why", "host", "load", "leases", "loading", "proof", "failures", "kind", "shards", "heartbeat", "published",
    "bytes", "status", "lag",
)  # fmt: skip
"""The columns that a narrow terminal leaves out, the first one first."""


def _table(*columns: str) -> Table:
    return FittingTable(*columns, drop=_ORDER, wraps=("why",))
