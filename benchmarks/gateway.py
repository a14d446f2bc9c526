"""The gateway before an engine that takes no time: turns a second, and the latency that it adds to each turn.

    python benchmarks/gateway.py
    python benchmarks/gateway.py --sessions 64 --turns 8 --tokens 64 --delay 0.2

One process serves the gateway with a generator that answers after `--delay` seconds with so many tokens; another
plays the sessions, each over its own kept connection, one turn after the other, with the whole history in each
request. The journal is in a temporary directory, fsynced as always. The added latency of a turn is its time less the
delay.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Generator as Iterated
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.chat_model import MARKS, TEMPLATE, make_tokenizer

from explorer_hooks.parts.agents.answers import AnswerParser
from explorer_hooks.parts.agents.app import GatewayApp
from explorer_hooks.parts.agents.gateway import Gateway, GatewayLimits
from explorer_hooks.parts.agents.http_thread import HttpThread, listening
from explorer_hooks.parts.agents.journal import NAME, TurnJournal
from explorer_hooks.parts.agents.sessions import Sessions
from explorer_hooks.parts.agents.splice import Splicer
from explorer_hooks.parts.agents.turns import TurnMaker
from explorer_hooks.run.generation import Generator, GroupRequest, GroupResult, Response
from explorer_hooks.run.tokens import TransformersTokens

TOKEN = "secret"


class InstantEngine(Generator):
    """Answers after a delay with so many tokens."""

    def __init__(self, tokens: int, delay: float) -> None:
        self._tokens, self._delay = tokens, delay

    def generate(self, requests: Sequence[GroupRequest]) -> "Iterated[GroupResult | None]":
        time.sleep(self._delay)
        for index, _ in enumerate(requests):
            tokens = [*range(20, 20 + self._tokens - 1), 0]
            yield GroupResult(index, (Response(tokens, [-0.123456789] * len(tokens)),))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--delay", type=float, default=0.2)
    parser.add_argument("--directory", help="of the journal; a temporary one unless given")
    options = parser.parse_args()
    for delay in dict.fromkeys((options.delay, 0.0)):
        _measure(options, delay)


def _measure(options: argparse.Namespace, delay: float) -> None:
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        with _served(directory, options, delay) as (url, pid):
            asyncio.run(_play(url, 1, "warm", options))
            begin, used = time.monotonic(), _used(pid)
            taken = asyncio.run(_play(url, options.sessions, "g", options))
            seconds, used = time.monotonic() - begin, _used(pid) - used
        size = os.path.getsize(os.path.join(directory, NAME))
    added = sorted(1000 * (one - delay) for one in taken)
    p50, p99 = statistics.median(added), added[int(0.99 * (len(added) - 1))]
    print(
        f"{options.sessions} sessions x {options.turns} turns x {options.tokens} tokens, engine {delay:g} s:"
        f" {len(taken) / seconds:.0f} turns/s, added p50 {p50:.1f} ms, p99 {p99:.1f} ms,"
        f" {1000 * used / len(taken):.1f} ms CPU of the gateway a turn,"
        f" journal {size / len(taken) / 1024:.1f} KiB a turn"
    )


def _used(pid: int) -> float:
    """Return the seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _served(directory: str, options: argparse.Namespace, delay: float) -> Iterator[tuple[str, int]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, directory, options, delay))
    process.start()
    try:
        yield ours.recv(), process.pid or 0
    finally:
        ours.send("end")
        process.join()


def _serve(pipe: Any, directory: str, options: argparse.Namespace, delay: float) -> None:
    tokenizer = make_tokenizer()
    sessions, journal = Sessions(), TurnJournal(directory)
    journal.start(sessions.needs, sessions.rest)
    engine = InstantEngine(options.tokens, delay)
    maker = TurnMaker(engine, threads=options.sessions, rows=1, hold=60.0, temperature=1.0)
    tokens = TransformersTokens(tokenizer)
    gateway = Gateway(
        sessions,
        journal,
        tokens,
        Splicer(tokens, {0: MARKS[0]}),
        AnswerParser("hermes", TEMPLATE),
        maker,
        GatewayLimits(options.sessions, options.tokens, 1 << 20, options.turns, 3600.0, "exact"),
        lambda _: True,
        "policy",
    )
    app = GatewayApp(gateway, TOKEN, lambda: (True, {})).application()
    with listening("127.0.0.1:0") as listener, HttpThread.serving(app, listener) as http:
        pipe.send(http.url)
        pipe.recv()
    journal.close()


async def _play(url: str, sessions: int, group: str, options: argparse.Namespace) -> list[float]:
    """Play sessions at once, and return the seconds of each turn."""
    waits = [options.delay * at / sessions for at in range(sessions)]
    played = await asyncio.gather(
        *(_session(url, group, at, options.turns, waits[at]) for at in range(sessions))
    )
    return [one for taken in played for one in taken]


async def _session(url: str, group: str, at: int, turns: int, wait: float) -> list[float]:
    place = {"group": group, "task": "t", "rollout": at}
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    session = (await _post(reader, writer, "/sessions", place))["session"]
    await asyncio.sleep(wait)  # sessions are not in step
    path, history, taken = f"/s/{session}/v1/chat/completions", [], []
    for turn in range(turns):
        history.append({"role": "user", "content": f"turn {turn} of session {at}: what comes next?"})
        begin = time.monotonic()
        reply = await _post(reader, writer, path, {"messages": history})
        taken.append(time.monotonic() - begin)
        history.append(reply["choices"][0]["message"])
    writer.close()
    return taken


async def _post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, document: Any) -> Any:
    """Send a request over a kept connection: a client library would take more time than the gateway."""
    body = json.dumps(document).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(answer.partition(b"content-length:")[2].partition(b"\r")[0])
    return json.loads(await reader.readexactly(length))


if __name__ == "__main__":
    main()
