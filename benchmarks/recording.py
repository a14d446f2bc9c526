"""Records the terminals of docs/tutorial-vllm.md in a real run, and draws them as an animated SVG.

    python benchmarks/recording.py record      # runs it: a trainer, the daemon, a follower, a real vLLM server
    python benchmarks/recording.py draw        # docs/recording.svg from benchmarks/results/recording.json

`record` writes what each of three terminals showed, and when. `draw` shortens pauses of more than `PAUSE` seconds and
changes nothing else. SYNCD_VLLM_PYTHON names the Python of an environment with vLLM.
"""

import argparse
import http.client
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "benchmarks" / "results" / "recording.json"
DRAWN = ROOT / "docs" / "recording.svg"
PORT = 8000
PROMPTS = ("17+18=", "25+36=", "38+14=")
PAUSE = 0.3
LAST = 4.0
"""Seconds that the last frame stays."""

Screen = dict[str, list[str]]

PANES: dict[str, tuple[int, float, int, int]] = {
    "trainer": (0, 0, 52, 12),
    "vllm": (54, 0, 56, 12),
    "status": (0, 13.4, 110, 14),
}
"""Column, row, width and height of each terminal, in characters."""
COMMANDS = {
    "trainer": "python examples/publish/sums.py base/model job",
    "vllm": "curl 127.0.0.1:8000/v1/completions -d ...",
    "status": "watch syncd status job",
}
GOOD = re.compile(r" proven |17\+18= +35$|25\+36= +61$|38\+14= +52$")
"""What is drawn in another color."""

CELL = (7.8, 18)
STYLE = """
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #c9d1d9; white-space: pre }
.head { fill: #8b949e } .new { fill: #7ee787 } .sheet { fill: #0d1117 } .pane { fill: #161b22; stroke: #30363d }
"""


def main() -> None:
    """Record or draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("record", "draw"))
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    if options.action == "record":
        RECORDED.write_text(json.dumps(_record(options.steps), indent=0) + "\n")
    DRAWN.write_text(draw(json.loads(RECORDED.read_text())))


def _record(steps: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        place = Path(name)
        _run(place, "python", str(ROOT / "examples/arithmetic/make.py"), "base", "--examples", "1")
        (place / "job").mkdir()
        server = os.environ.get("SYNCD_VLLM_PYTHON", str(ROOT / ".venv-vllm/bin/python"))
        serve = [server, "-m", "vllm.entrypoints.openai.api_server", *_server_options()]
        _start(stack, place, "vllm", *serve, PYTHONPATH="")
        _until_served()
        _start(stack, place, "watch", "syncd", "watch", "job")
        follow = f"syncd follow job --name vllm-0 --hook vllm=http://127.0.0.1:{PORT} --stay"
        _start(stack, place, "follow", *follow.split())
        time.sleep(5)
        script = str(ROOT / "examples/publish/sums.py")
        trainer = _start(
            stack, place, "trainer", "python", script, "base/model", "job", "--steps", str(steps)
        )
        return list(_frames(place, trainer))


def _server_options() -> list[str]:
    words = {
        "model": "base/model", "served-model-name": "policy", "host": "127.0.0.1", "port": str(PORT),
        "dtype": "float32", "block-size": "32", "max-num-seqs": "8",
    }  # fmt: skip
    return [word for key, value in words.items() for word in (f"--{key}", value)] + ["--enforce-eager"]


def _start(stack: ExitStack, place: Path, name: str, *argv: str, **more: str) -> subprocess.Popen[bytes]:
    log = stack.enter_context((place / f"{name}.log").open("wb"))
    process = subprocess.Popen(
        _found(argv), cwd=place, env=_environment(more), stdout=log, stderr=subprocess.DEVNULL
    )
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process


def _run(place: Path, *argv: str) -> str:
    return subprocess.run(
        _found(argv), cwd=place, env=_environment({"COLUMNS": str(PANES["status"][2])}),
        check=True, stdout=subprocess.PIPE, text=True,
    ).stdout  # fmt: skip


def _found(argv: tuple[str, ...]) -> list[str]:
    here = Path(sys.executable).parent
    return [str(here / argv[0]) if (here / argv[0]).exists() else argv[0], *argv[1:]]


def _environment(more: dict[str, str]) -> dict[str, str]:
    settings = {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "no_proxy": "*",
    }  # fmt: skip
    return os.environ | settings | more


def _until_served() -> None:
    deadline = time.monotonic() + 900
    while time.monotonic() < deadline:
        with suppress(OSError, KeyError):
            _answer(PROMPTS[0])
            return
        time.sleep(1)
    raise TimeoutError("vLLM does not answer: see its log")


def _answer(prompt: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=30)
    body = {"model": "policy", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return str(json.loads(connection.getresponse().read())["choices"][0]["text"])


def _frames(place: Path, trainer: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Yield what the terminals show, with its time, whenever that changes; until the engine has the last version."""
    begin, before = time.monotonic(), None
    end = float("inf")
    while time.monotonic() < end:
        screen = _screen(place)
        if screen != before:
            yield {"at": round(time.monotonic() - begin, 2), "screen": screen}
            before = screen
        if trainer.poll() is not None and end == float("inf"):
            end = time.monotonic() + 10
        time.sleep(0.2)


def _screen(place: Path) -> Screen:
    said = (place / "trainer.log").read_text().splitlines()
    answers = [f"{prompt:8}{_answer(prompt)}" for prompt in PROMPTS]
    status = _run(place, "syncd", "status", "job").replace(f"{place}/", "").splitlines()
    return {"trainer": said, "vllm": answers, "status": [line.rstrip() for line in status]}


def draw(frames: list[dict[str, Any]]) -> str:
    """Return the animation: each line of each terminal is shown as long as it was there."""
    times, length = _times([frame["at"] for frame in frames])
    columns, rows = 114, 30
    width, height = round(columns * CELL[0]), rows * CELL[1]
    shapes = [
        shape
        for name in PANES
        for shape in _pane(name, [frame["screen"][name] for frame in frames], times, length)
    ]
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
            "<title>A trainer learns sums; syncd gives each version to vLLM, whose answers change</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="sheet" width="{width}" height="{height}" rx="8"/>',
            *shapes,
            "</svg>\n",
        )
    )


def _times(at: list[float]) -> tuple[list[float], float]:
    """Return when each frame begins, without long pauses, and the length of the whole."""
    times = [0.0]
    for before, after in itertools.pairwise(at):
        times.append(round(times[-1] + min(after - before, PAUSE), 2))
    return times, times[-1] + LAST


def _pane(name: str, screens: list[list[str]], times: list[float], length: float) -> Iterator[str]:
    column, row, width, height = PANES[name]
    x, y = round((column + 1.4) * CELL[0], 1), round((row + 0.6) * CELL[1], 1)
    size = f'width="{round((width + 0.6) * CELL[0], 1)}" height="{round((height + 0.9) * CELL[1], 1)}"'
    yield f'<rect class="pane" x="{round(x - 6, 1)}" y="{y}" {size} rx="6"/>'
    yield _text(x, y + CELL[1], f"$ {COMMANDS[name]}", ' class="head"')
    rows = height - 1  # below the command; a program's output scrolls, a table does not
    shown = [screen[:rows] if name == "status" else screen[-rows:] for screen in screens]
    for line in range(rows):
        texts = [screen[line][:width] if line < len(screen) else "" for screen in shown]
        for text, first, last in _runs(texts):
            end = times[last] if last < len(times) else length
            if text:
                kind = ' class="new"' if GOOD.search(text) else ""
                yield _shown(_text(x, y + CELL[1] * (line + 2), text, kind), times[first], end, length)


def _runs(texts: list[str]) -> Iterator[tuple[str, int, int]]:
    """Yield each text that stays over several frames: itself, its first frame, and the first without it."""
    first = 0
    for number in range(1, len(texts) + 1):
        if number == len(texts) or texts[number] != texts[first]:
            yield texts[first], first, number
            first = number


def _shown(text: str, begin: float, end: float, length: float) -> str:
    """Return a text that is there from `begin` to `end` of each round of `length` seconds."""
    if begin == 0 and end == length:
        return text
    times, values = [0.0], ["1" if begin == 0 else "0"]
    if begin:
        times, values = [*times, begin / length], [*values, "1"]
    if end < length:
        times, values = [*times, end / length], [*values, "0"]
    keys = ";".join(f"{moment:.4f}".rstrip("0").rstrip(".") or "0" for moment in times)
    animation = (
        f'<animate attributeName="opacity" dur="{length:.2f}s" repeatCount="indefinite" calcMode="discrete" '
        f'keyTimes="{keys}" values="{";".join(values)}"/>'
    )
    # Where nothing moves, the end is seen.
    return text.replace("</text>", f"{animation}</text>").replace(
        "<text", f'<text opacity="{int(end == length)}"', 1
    )


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{round(y, 1)}"{more}>{escape(text)}</text>'


if __name__ == "__main__":
    main()
