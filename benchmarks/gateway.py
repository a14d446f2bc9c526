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

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.chat_model import MARKS, TEMPLATE, make_tokenizer

from explorer_hooks.explorer.generation import Generator, GroupRequest, GroupResult, Response
from explorer_hooks.explorer.tasks import TransformersTokens
from explorer_hooks.gateway.answers import AnswerParser
from explorer_hooks.gateway.app import GatewayApp
from explorer_hooks.gateway.gateway import Gateway, Limits
from explorer_hooks.gateway.http_thread import HttpThread, listening
from explorer_hooks.gateway.journal import NAME, Journal
from explorer_hooks.gateway.sessions import Sessions
from explorer_hooks.gateway.splice import Splicer
from explorer_hooks.gateway.turns import TurnMaker

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
        with _served(directory, options, delay) as url:
            begin = time.monotonic()
            taken = asyncio.run(_play(url, options))
            seconds = time.monotonic() - begin
        size = os.path.getsize(os.path.join(directory, NAME))
    added = sorted(1000 * (one - delay) for one in taken)
    p50, p99 = statistics.median(added), added[int(0.99 * (len(added) - 1))]
    print(
        f"{options.sessions} sessions x {options.turns} turns x {options.tokens} tokens, engine {delay:g} s:"
        f" {len(taken) / seconds:.0f} turns/s, added p50 {p50:.1f} ms, p99 {p99:.1f} ms,"
        f" journal {size / len(taken) / 1024:.1f} KiB a turn"
    )


@contextlib.contextmanager
def _served(directory: str, options: argparse.Namespace, delay: float) -> Iterator[str]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, directory, options, delay))
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send("end")
        process.join()


def _serve(pipe: Any, directory: str, options: argparse.Namespace, delay: float) -> None:
    tokenizer = make_tokenizer()
    sessions, journal = Sessions(), Journal(directory)
    journal.start(sessions.needs, sessions.rest)
    engine = InstantEngine(options.tokens, delay)
    maker = TurnMaker(engine, threads=options.sessions, rows=1, hold=60.0, temperature=1.0)
    tokens = TransformersTokens(tokenizer)
    gateway = Gateway(
        sessions,
        journal,
        tokens,
        Splicer(tokens, {0: MARKS[0]}),
        AnswerParser("auto", TEMPLATE),
        maker,
        Limits(options.sessions, options.tokens, 1 << 20, options.turns, 3600.0, "exact"),
        lambda _: True,
        "policy",
    )
    app = GatewayApp(gateway, TOKEN, lambda: (True, {})).application()
    with listening("127.0.0.1:0") as listener, HttpThread.serving(app, listener) as http:
        pipe.send(http.url)
        pipe.recv()
    journal.close()


async def _play(url: str, options: argparse.Namespace) -> list[float]:
    """Play all sessions at once, and return the seconds of each turn."""
    async with httpx.AsyncClient(timeout=60.0, limits=httpx.Limits(max_connections=None)) as client:
        played = await asyncio.gather(
            *(_session(client, url, at, options.turns) for at in range(options.sessions))
        )
    return [one for taken in played for one in taken]


async def _session(client: httpx.AsyncClient, url: str, at: int, turns: int) -> list[float]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    place = {"group": "g", "task": "t", "rollout": at}
    opened = (await client.post(f"{url}/sessions", json=place, headers=headers)).json()
    path, history, taken = f"{opened['base_url']}/chat/completions", [], []
    for turn in range(turns):
        history.append({"role": "user", "content": f"turn {turn} of session {at}: what comes next?"})
        begin = time.monotonic()
        reply = await client.post(path, content=json.dumps({"messages": history}))
        taken.append(time.monotonic() - begin)
        history.append(reply.json()["choices"][0]["message"])
    return taken


if __name__ == "__main__":
    main()
