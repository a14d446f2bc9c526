"""An agent of the user that plays one rollout: a command, or a function in a process; both bounded, both killed."""

import json
import os
import shlex
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from explorer_hooks.hooks import process
from explorer_hooks.parts.agents.agent_variables import agent_environment
from explorer_hooks.run.function_processes import FunctionProcesses
from explorer_hooks.run.rewards import Score, score_of
from syncd.errors import EngineUnreachableError

_SHOWN = 300
_ANSWER = "answer"  # the field of a task that has its answer
_MOST_VARIABLE = 100_000  # characters of a task in a variable; Linux takes 128 KiB
_END = 10.0  # seconds that the commands have to end when the player is closed: killing one takes up to five


class Player(Protocol):
    """Plays rollouts; several threads call it."""

    def play(self, url: str, sessions: Sequence[str], task: Mapping[str, Any]) -> list[Score]:
        """Play a task once in each session of the gateway at `url`; return the rewards, or what went wrong."""

    def close(self) -> None:
        """End the processes."""


class CommandPlayer:
    """Starts a command for each rollout.

    It gets `OPENAI_BASE_URL` and `OPENAI_API_KEY` in its environment, and the task as JSON on its standard input.
    `SYNCD_TASK` has the task too if it is short, but never the answer: all that the command starts inherits it.

    Args:
        timeout: Seconds that it may take.
        has_reward: Whether its last line is the reward; else what it prints does not matter.
        stop: Once it returns true, commands are killed.
        has_answer: Whether it gets the task's answer; unless given, if it says the reward.
        passed: Names of variables of this process that it gets besides those of `agent_environment`.
    """

    def __init__(
        self,
        command: str,
        timeout: float,
        *,
        has_reward: bool,
        stop: Callable[[], bool],
        has_answer: bool | None = None,
        passed: Collection[str] = (),
    ) -> None:
        self._argv, self._timeout = shlex.split(command), timeout
        self._has_reward, self._stop = has_reward, stop
        self._has_answer = has_reward if has_answer is None else has_answer
        self._inherited = agent_environment(os.environ, passed)
        self._is_closed, self._playing, self._changed = False, 0, threading.Condition()

    def play(self, url: str, sessions: Sequence[str], task: Mapping[str, Any]) -> list[Score]:
        return [self._run(_base_url(url, session), session, task) for session in sessions]

    def close(self) -> None:
        """Kill the commands: the threads that bound their time end with the explorer, most often before a signal."""
        self._is_closed = True
        with self._changed:
            self._changed.wait_for(lambda: not self._playing, _END)

    def _is_over(self) -> bool:
        return self._is_closed or self._stop()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._changed:
            self._playing += 1
        try:
            yield
        finally:
            with self._changed:
                self._playing -= 1
                self._changed.notify_all()

    def _run(self, base_url: str, api_key: str, task: Mapping[str, Any]) -> Score:
        question = {name: value for name, value in task.items() if name != _ANSWER}
        text, whole = json.dumps(question), json.dumps(task if self._has_answer else question)
        variables = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        if len(text) <= _MOST_VARIABLE:
            variables["SYNCD_TASK"] = text
        stdin = f"{whole}\n".encode()
        try:
            with self._counted():
                end = process.run(
                    self._argv,
                    variables,
                    self._timeout,
                    self._is_over,
                    inherited=self._inherited,
                    stdin=stdin,
                )
        except EngineUnreachableError as error:
            return Score(None, problem=error.message[:_SHOWN])
        if end.code is None:
            return Score(None, problem=f"it took more than {self._timeout:g} s")
        if end.code:
            return Score(None, problem=f"it ended with {end.code}: {_last_line(end.err)}"[:_SHOWN])
        return _printed_score(_last_line(end.out)) if self._has_reward else Score(0.0)


class FunctionPlayer:
    """Calls `package.module:function` for each rollout, with `base_url`, `api_key` and `task`, in processes.

    Args:
        timeout: Seconds that one call may take.
        directories: Directories in which its module is looked for.
        passed: Names of variables of this process that it gets besides those of `agent_environment`.
    """

    def __init__(
        self,
        function: str,
        timeout: float,
        workers: int,
        directories: Sequence[str],
        passed: Collection[str] = (),
    ) -> None:
        environment = agent_environment(os.environ, passed)
        self._processes = FunctionProcesses(function, timeout, workers, directories, environment)

    def play(self, url: str, sessions: Sequence[str], task: Mapping[str, Any]) -> list[Score]:
        asked = [(_base_url(url, session), session) for session in sessions]
        calls = ({"base_url": base, "api_key": key, "task": dict(task)} for base, key in asked)
        return [self._processes.call(call)[0] for call in calls]

    def close(self) -> None:
        self._processes.close()


def _base_url(url: str, session: str) -> str:
    return f"{url}/s/{session}/v1"


def _printed_score(line: str) -> Score:
    try:
        return score_of(json.loads(line))
    except (ValueError, RecursionError):
        return Score(None, problem=f"its last line is no JSON: {line[:80]!r}")


def _last_line(text: str) -> str:
    # Not `splitlines`: JSON of other languages has U+2028 and its like as they are.
    return text.strip().rpartition("\n")[2]


def directories_of(source: str) -> list[str]:
    """Return where a user's module is looked for: beside the job's file, and in the working directory."""
    here = os.getcwd()
    return [os.path.dirname(source) or here, here]
