"""Calls a function of the user. A program of its own: `FunctionProcess` starts it.

It reads lines of JSON, and answers with lines of JSON. The first one names the function; the answer has the names of
its arguments. Each further one has the arguments of a call; the answer has its scores. It ends when its input does.
"""

import contextlib
import importlib
import inspect
import json
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, BinaryIO

from explorer_hooks.run.rewards import Score, score_of, scores_of

SHOWN = 300  # characters of a problem

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_BY_SIGNAL = 128


def main() -> None:
    requests, answers = _own_pipes()
    _ignore_signals(requests.fileno())
    owner = os.getpid()
    first = json.loads(requests.readline())
    try:
        called = _imported(first["function"], first["directories"])
        signature = _signature(called)
    except Exception as error:  # noqa: BLE001 - the user sees any error of the import
        signature = {"problem": _problem(error)}
    _say(answers, owner, signature)
    with contextlib.suppress(BrokenPipeError):  # nobody waits for the answer any more
        for line in requests:
            asked = json.loads(line)
            scores = _called(called, asked["arguments"], asked["count"])
            _say(answers, owner, {"id": asked["id"], "scores": [_plain(score) for score in scores]})


def _own_pipes() -> tuple[BinaryIO, int]:
    """Return the input and the output; the function and its tools get an empty input, and write to the log."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return requests, answers


def _ignore_signals(requests: int) -> None:
    """Go on at a signal that goes to all processes; the explorer, which ends this one, hangs up before.

    A handler, not SIG_IGN: programs that the function starts would inherit that, and could not be ended.
    """
    hangup = select.poll()
    hangup.register(requests, 0)

    def handle(number: int, _frame: object) -> None:
        if hangup.poll(0):
            os._exit(_BY_SIGNAL + number)

    for number in _SIGNALS:
        signal.signal(number, handle)
    # What comes to a child before it is as others are waits until then.
    os.register_at_fork(
        before=partial(signal.pthread_sigmask, signal.SIG_BLOCK, _SIGNALS),
        after_in_parent=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, _SIGNALS),
        after_in_child=_heed_signals,
    )


def _heed_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _say(answers: int, owner: int, said: Mapping[str, Any]) -> None:
    if os.getpid() != owner:
        os._exit(0)  # the function has forked, and its child came back too: one of them answers
    line = memoryview(json.dumps(said).encode() + b"\n")
    while line:
        line = line[os.write(answers, line) :]


def _imported(function: str, directories: Sequence[str]) -> Any:
    sys.path[:0] = [directory for directory in directories if directory not in sys.path]
    module, _, name = function.partition(":")
    return attrgetter(name)(importlib.import_module(module))


def _signature(called: Any) -> dict[str, Any]:
    try:
        parameters = inspect.signature(called).parameters.values()
    except ValueError:  # not every function of C has one
        return {"names": [], "required": [], "takes_any": True}
    named = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    return {
        "names": [parameter.name for parameter in named],
        "required": [parameter.name for parameter in named if parameter.default is parameter.empty],
        "takes_any": any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters),
    }


def _called(called: Any, arguments: Mapping[str, Any], count: int | None) -> list[Score]:
    try:
        returned = called(**arguments)
        return [score_of(returned)] if count is None else scores_of(returned, count)
    except Exception as error:  # noqa: BLE001 - a function that raises costs its group, not the run
        return [Score(None, problem=_problem(error))] * (1 if count is None else count)


def _problem(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:SHOWN]


def _plain(score: Score) -> dict[str, Any]:
    if score.reward is None:
        return {"problem": score.problem}
    return {"reward": score.reward, "info": score.info}


if __name__ == "__main__":
    main()
