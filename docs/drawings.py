"""The drawings of the documentation, as SVG that follows the reader's light or dark scheme.

`python docs/drawings.py` writes docs/*.svg again; tests/unit/test_drawings.py compares them
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

DOCS = Path(__file__).parent
COMMAND = "python docs/drawings.py"

STYLE = """
text { font: 14px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #1f2328 }
.small { font-size: 12.5px; fill: #57606a } .title { font-weight: 600 } .step { font-weight: 600; fill: #0a58ca }
.code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 12.5px }
rect { fill: #f6f8fa; stroke: #8c959f; stroke-width: 1.2 } rect.inner { fill: #ffffff }
rect.strong { stroke: #0a58ca; stroke-width: 1.8 }
path { fill: none; stroke: #57606a; stroke-width: 1.6 } path.dash { stroke-dasharray: 5 4 }
path.life { stroke: #d0d7de }
path.bad { stroke: #cf222e } marker path { fill: #57606a; stroke: none } text.bad { fill: #cf222e }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .small { fill: #a3adb8 } .step { fill: #79b8ff }
rect { fill: #161b22; stroke: #6e7681 } rect.inner { fill: #0d1117 } rect.strong { stroke: #79b8ff }
path { stroke: #a3adb8 } path.life { stroke: #30363d } marker path { fill: #a3adb8 } path.bad { stroke: #ff7b72 }
text.bad { fill: #ff7b72 }
}
"""

HEAD = (
    '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
    'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z"/></marker>'
)


class Drawing:
    """Shapes on a sheet, in the order in which they are drawn."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size, self._title, self._shapes = (width, height), title, list[str]()

    def box(self, at: tuple[int, int], size: tuple[int, int], *lines: str, kind: str = "") -> None:
        """Draw a box with centered lines, the first of them bold."""
        (x, y), (width, height) = at, size
        self._shapes.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8"{_class(kind)}/>')
        top = y + height // 2 - 9 * (len(lines) - 1) + 5
        for number, line in enumerate(lines):
            self.text((x + width // 2, top + 18 * number), line, "small" if number else "title", "middle")

    def text(self, at: tuple[int, int], text: str, kind: str = "", anchor: str = "start") -> None:
        """Write one line."""
        x, y = at
        self._shapes.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}"{_class(kind)}>{escape(text)}</text>'
        )

    def line(self, *points: tuple[int, int], kind: str = "", arrow: bool = True) -> None:
        """Draw a line through points, with a head at its end."""
        steps = " L".join(f"{x} {y}" for x, y in points)
        head = ' marker-end="url(#head)"' if arrow else ""
        self._shapes.append(f'<path d="M{steps}"{_class(kind)}{head}/>')

    def svg(self) -> str:
        """Return the file."""
        width, height = self._size
        return "\n".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
                f"<title>{escape(self._title)}</title>",
                f"<style>{STYLE}</style>",
                HEAD,
                *self._shapes,
                "</svg>\n",
            )
        )


@dataclass(frozen=True)
class Message:
    """An arrow between two actors of a sequence; of one actor to itself: a note."""

    source: int
    target: int
    text: str
    kind: str = ""


def overview() -> Drawing:
    """Who writes what, of the whole system."""
    sheet = Drawing(
        900,
        400,
        "A trainer writes steps, syncd watch publishes versions, engines load them",
    )
    sheet.box((10, 60), (170, 96), "trainer", "your loop, or", "trainer train")
    sheet.box((290, 20), (320, 270), kind="strong")
    sheet.text((450, 46), "job directory", "title", "middle")
    sheet.text((450, 64), "on the shared file system", "small", "middle")
    rows = (
        ("global_step_12/", "safetensors, manifest"),
        (".syncd/version.json", "what explorers follow"),
        (".syncd/explorers/", "leases, what each engine runs"),
        ("experiences/", "rollouts"),
    )
    for number, (name, what) in enumerate(rows):
        top = 78 + 52 * number
        sheet.box((306, top), (288, 44), kind="inner")
        sheet.text((318, top + 18), name, "code")
        sheet.text((318, top + 35), what, "small")
    sheet.box((355, 335), (190, 54), "syncd watch", "the daemon, on any host")
    for number, names in enumerate(
        (("follower + vLLM", "syncd follow"), ("follower + SGLang", "explorer run"))
    ):
        sheet.box((720, 60 + 130 * number), (170, 96), *names, "on a GPU host")
    sheet.line((180, 100), (304, 100))
    sheet.text((242, 90), "1 write", "step", "middle")
    sheet.line((420, 335), (420, 292))
    sheet.line((480, 292), (480, 335), kind="dash")
    sheet.text((408, 318), "2 publish", "step", "end")
    sheet.text((492, 318), "verify", "small")
    sheet.line((596, 140), (718, 110), kind="dash")
    sheet.line((596, 152), (718, 225), kind="dash")
    sheet.text((660, 100), "3 load", "step", "middle")
    sheet.line((718, 140), (650, 140), (650, 205), (598, 205))
    sheet.line((718, 255), (598, 255))
    sheet.text((662, 282), "4 report", "step", "middle")
    sheet.line((304, 258), (95, 258), (95, 158), kind="dash")
    sheet.text((200, 248), "5 train on rollouts", "step", "middle")
    return sheet


def sequence(title: str, actors: Sequence[str], messages: Sequence[Message], gap: int = 172) -> Drawing:
    """Actors side by side, and what goes between them from top to bottom."""
    tops = list(_tops(messages))
    height = tops[-1] + 30
    sheet = Drawing(gap * len(actors), height, title)
    middle = [gap * number + gap // 2 for number in range(len(actors))]
    for x, actor in zip(middle, actors, strict=True):
        sheet.line((x, 44), (x, height - 6), kind="life", arrow=False)
        sheet.box((x - 72, 6), (144, 36), actor)
    for top, message in zip(tops, messages, strict=True):
        start, end = middle[message.source], middle[message.target]
        if start == end:
            sheet.text((start + 8, top), message.text, f"small {message.kind}".strip())
            sheet.line((start - 5, top - 4), (start + 4, top - 4), arrow=False)
            continue
        sheet.line((start, top), (end, top), kind=message.kind)
        sheet.text(((start + end) // 2, top - 7), message.text, f"small {message.kind}".strip(), "middle")
    return sheet


def _tops(messages: Sequence[Message]) -> Iterator[int]:
    top = 52
    for message in messages:
        top += 26 if message.source == message.target else 36
        yield top


def sync() -> Drawing:
    """One sync through files."""
    trainer, job, daemon, follower, engine = range(5)
    return sequence(
        "One sync through files",
        ("trainer", "job directory", "syncd watch", "follower", "engine"),
        (
            Message(trainer, trainer, "copy the weights, train on"),
            Message(trainer, job, "shards, receipts, manifest"),
            Message(trainer, job, "one rename seals the step"),
            Message(trainer, job, "marker names the step"),
            Message(job, daemon, "event or poll", "dash"),
            Message(daemon, daemon, "check sizes and headers"),
            Message(daemon, job, "replace version.json"),
            Message(job, follower, "poll sees version.json", "dash"),
            Message(follower, job, "lease, read, check every byte"),
            Message(follower, engine, "pause, load, resume"),
            Message(engine, follower, "label, answers to the probe", "dash"),
            Message(follower, job, "applied = generation.step"),
            Message(daemon, job, "remove superseded steps"),
        ),
        gap=184,
    )


def broadcast() -> Drawing:
    """A broadcast beside the files."""
    trainer, job, explorers = range(3)
    return sequence(
        "A broadcast; files carry the same step",
        ("trainer", "job directory", "explorers"),
        (
            Message(explorers, job, "ask to take part, in their presence"),
            Message(trainer, job, "offer a group: rendezvous/GROUP/EPOCH"),
            Message(explorers, job, "join the epoch"),
            Message(trainer, job, "open a round: step and members"),
            Message(trainer, explorers, "buckets of tensors over NCCL or gloo"),
            Message(explorers, job, "checksum of what arrived"),
            Message(trainer, job, "commit the round, or fail it"),
            Message(explorers, explorers, "load after the commit"),
            Message(trainer, job, "the same step as files, always"),
            Message(explorers, job, "applied, once the daemon has published"),
        ),
        gap=300,
    )


def takeover() -> Drawing:
    """A stand-by replaces a leader that wakes up later."""
    leader, job, standby = range(3)
    return sequence(
        "A stand-by takes over, and the old leader can no longer publish",
        ("leader, term 7", "JOB/.syncd", "stand-by"),
        (
            Message(leader, job, "heartbeat in daemon.lock/7/leader.json"),
            Message(leader, leader, "paused or dead", "bad"),
            Message(standby, job, "15 s of its own clock: no change"),
            Message(standby, job, "rename its claim to daemon.lock/8"),
            Message(standby, job, "remove the directory of term 7 (the fence)"),
            Message(standby, job, "replace version.json"),
            Message(leader, leader, "wakes up"),
            Message(leader, job, "rename out of daemon.lock/7: refused, it is gone", "bad"),
            Message(leader, leader, "becomes the stand-by"),
        ),
        gap=320,
    )


def step_states() -> Drawing:
    """What a step goes through."""
    sheet = Drawing(900, 300, "The states of a step: attempt, sealed, published, removed")
    places = {"attempt": (20, 110), "sealed": (230, 110), "published": (440, 110), "trash": (690, 110)}
    notes = {
        "attempt": "its own directory",
        "sealed": "one rename",
        "published": "in version.json",
        "trash": "deleted after 75 s",
    }
    for name, at in places.items():
        sheet.box(at, (140, 60), name, notes[name], kind="strong" if name == "published" else "")
    sheet.box((230, 230), (140, 56), "damaged", "never published")
    sheet.box((440, 230), (140, 56), "quarantined", "engines fail on it")
    sheet.line((160, 140), (228, 140))
    sheet.line((370, 140), (438, 140))
    sheet.text((404, 132), "verified", "small", "middle")
    sheet.line((580, 140), (688, 140))
    sheet.text((634, 132), "retention", "small", "middle")
    sheet.line((90, 110), (90, 40), (760, 40), (760, 108))
    sheet.text((425, 32), "the writer failed, or another attempt was sealed first", "small", "middle")
    sheet.line((760, 170), (760, 200), (560, 200), (560, 172), kind="dash")
    sheet.text((664, 193), "a lease or pin arrived", "small", "middle")
    sheet.line((300, 170), (300, 228))
    sheet.text((308, 205), "a file is missing or short", "small")
    sheet.line((495, 170), (495, 228))
    sheet.line((525, 228), (525, 172), kind="dash")
    sheet.text((532, 222), "released", "small")
    return sheet


def architecture() -> Drawing:
    """The packages of the core, what lies above what, and the parts."""
    sheet = Drawing(900, 480, "Three packages over one protocol, and the parts that register themselves")
    columns = (
        (10, "trainer/", ("loop.py, rank0.py", "engines/, launch/", "experience/, export/")),
        (310, "syncd/", ("cli/", "views/", "daemon/")),
        (610, "explorer_hooks/", ("run/", "follower/, proof/", "hooks/, tasks/")),
    )
    parts = (
        ("evaluation, importing,", "megatron, tinker, verl_legacy"),
        ("broadcast, doctor, memory,", "page, tinker"),
        ("agents, broadcast,", "evaluation, tinker"),
    )
    for (x, name, rows), names in zip(columns, parts, strict=True):
        sheet.box((x, 10), (280, 68), "parts/", *names)
        sheet.box((x, 102), (280, 190), kind="strong")
        sheet.text((x + 140, 128), name, "title", "middle")
        for number, row in enumerate(rows):
            sheet.box((x + 14, 140 + 48 * number), (252, 40), kind="inner")
            sheet.text((x + 26, 165 + 48 * number), row, "code")
        sheet.line((x + 140, 78), (x + 140, 100), kind="dash")
        sheet.line((x + 140, 292), (x + 140, 314))
    shared = "syncd/client/, syncd/transports/, syncd/jobfile/, syncd/experience/"
    sheet.box(
        (10, 316),
        (880, 52),
        shared,
        "what the programs share: the client, files and deltas, the job file, batches",
    )
    sheet.line((450, 368), (450, 388))
    below = (
        "what lies in the job directory; standard library and xxhash; disk.py is the seam to the file system"
    )
    sheet.box((10, 390), (880, 52), "syncd/protocol/", below)
    note = "Arrows are imports. Parts register by entry points: nothing in the core names one."
    sheet.text((450, 468), note, "small", "middle")
    return sheet


def drawings() -> dict[str, str]:
    """Return the files by their names."""
    made = (overview, sync, step_states, broadcast, takeover, architecture)
    return {f"{make.__name__.replace('_', '-')}.svg": make().svg() for make in made}


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


if __name__ == "__main__":
    for name, text in drawings().items():
        (DOCS / name).write_text(text)
