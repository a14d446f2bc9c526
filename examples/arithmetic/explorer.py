"""An explorer: follows the versions of a job, samples rollouts with the newest, and writes them as experiences.

    python examples/arithmetic/explorer.py JOB --model DIR --name e0

With `--ahead 0` and one explorer it is on-policy: one batch for each version, made by that version. With more, and
with more explorers, they run freely and stop only when they are too far ahead of the trainer. It ends when the
trainer has gone, or on SIGTERM or Ctrl-C.
"""

import argparse
import json
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from itertools import count, islice
from zlib import crc32

import torch
from peft import PeftModel
from problems import Problem, problems, tasks
from rollouts import Rollout, mean_reward, roll_out
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from explorer_hooks.run.pacing import Allowance, written
from syncd.errors import SyncdError, TimedOutError, TryAgainError
from syncd.experience.model import Experience
from syncd.experience.writer import ExperienceWriter
from syncd.protocol.layout import Job
from syncd.protocol.version import Pair
from syncd.synchronizer import Synchronizer

BEFORE_THE_FIRST: Pair = (1, 0)
"""The unpublished first version: the model that the trainer starts from. Generation 1 continues it."""

_BREATH = 0.02
"""Seconds between two waits that ended with an answer of the trainer."""


class Explorer:
    """Follows and explores.

    Args:
        options: The command line.
        sync: The connection to the job.
        writer: Where experiences go.
    """

    def __init__(self, options: argparse.Namespace, sync: Synchronizer, writer: ExperienceWriter) -> None:
        self.options, self.sync, self.writer = options, sync, writer
        self.tokenizer = AutoTokenizer.from_pretrained(options.model)
        self.model = _load(options.model)
        self.pair = BEFORE_THE_FIRST
        self._tasks = tasks(f"{options.seed}/{options.name}", "train")
        self._run, self._numbers = uuid.uuid4().hex[:8], count()
        # Counted from the beginning of the job: an explorer that starts later gets no extra allowance.
        self._allowance = Allowance(0, 0, options.batches_per_step, options.ahead)
        self._evaluate()

    def turn(self) -> None:
        """Write one batch, or wait until one is allowed."""
        self.follow()
        if self._allowance.room(self.pair[1], written(self.writer.job)):
            self.writer.write(self._batch())
        else:
            self._wait()

    def follow(self) -> None:
        """Load the newest version if it is another one; later rollouts use it."""
        version = self.sync.latest_version()
        if version is None or version.pair == self.pair:
            return
        try:
            with self.sync.lease(version) as leased:
                self.model = _model_of(version.kind, leased.path, self.options.model)
        except TryAgainError:
            return  # overtaken: the next turn finds the newest
        turned_back = version.generation != self.pair[0]
        self.pair = version.pair
        self.sync.confirm(version)
        if turned_back:
            self._allowance = self._from_now_on()
        self._evaluate()

    def _wait(self) -> None:
        try:
            self.sync.wait_new_model_state_dict(self.pair[1], timeout=self.options.patience)
        except TimedOutError:
            # The trainer lives and has published no new version: it has dropped batches and waits for others.
            self._allowance = self._from_now_on()
        time.sleep(_BREATH)

    def _batch(self) -> list[Experience]:
        """Return experiences of whole groups."""
        size = self.options.group_size
        chosen = list(islice(self._tasks, self.options.groups))
        rollouts = roll_out(self.model, self.tokenizer, [problem for problem in chosen for _ in range(size)])
        groups = [(problem, f"{self._run}-{next(self._numbers)}") for problem in chosen]
        return [
            self._experience(problem, group, number, rollouts[place * size + number])
            for place, (problem, group) in enumerate(groups)
            for number in range(size)
        ]

    def _experience(self, problem: Problem, group: str, number: int, rollout: Rollout) -> Experience:
        return Experience(
            tokens=rollout.prompt + rollout.response,
            prompt_length=len(rollout.prompt),
            logprobs=rollout.logprobs,
            action_mask=[True] * len(rollout.response),
            reward=rollout.reward,
            group=group,
            task=problem.prompt,
            rollout=number,
            generation=self.pair[0],
            step=self.pair[1],
            created_at=time.time(),
            info={"prompt": problem.prompt, "response": rollout.text},
        )

    def _from_now_on(self) -> Allowance:
        return self._allowance.restarted(self.pair[1], written(self.writer.job))

    def _evaluate(self) -> None:
        """Append the greedy accuracy on the held-out problems to a file, if one is requested."""
        if not self.options.evaluate:
            return
        accuracy = mean_reward(roll_out(self.model, self.tokenizer, problems("test"), greedy=True))
        line = {"generation": self.pair[0], "step": self.pair[1], "accuracy": accuracy, "at": time.time()}
        with open(self.options.evaluate, "a", encoding="ascii") as file:
            file.write(json.dumps(line) + "\n")


def _model_of(kind: str, directory: str, base: str) -> torch.nn.Module:
    """Return the model of a version; an adapter is added to the weights of the model that the trainer starts from."""
    if kind != "lora":
        return _load(directory)
    adapted = PeftModel.from_pretrained(_load(base), directory)
    merged: torch.nn.Module = adapted.merge_and_unload()
    return merged.eval()


def _load(directory: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def main() -> None:
    """Explore until the trainer has left."""
    options = _options()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    torch.set_num_threads(1)
    torch.manual_seed(crc32(f"{options.seed}/{options.name}".encode()))  # each explorer draws for itself
    logging.disable_progress_bar()
    with (
        Synchronizer.open(options.job, role="explorer", identity=options.name) as sync,
        ExperienceWriter(Job.at(options.job), options.name) as writer,
    ):
        explorer = Explorer(options, sync, writer)
        for _ in _while_trained(sync, options.timeout):
            explorer.turn()
        explorer.follow()  # the last version came just before the end


def _while_trained(sync: Synchronizer, timeout: float) -> Iterator[None]:
    """Yield until the trainer that was seen has left.

    Raises:
        TimedOutError: For this many seconds no trainer has come.
    """
    started = time.monotonic()
    while sync.trainer_requires_weight_sync() is not None:
        if sync.trainers.last():
            started = time.monotonic()
        elif time.monotonic() - started > timeout:
            raise TimedOutError(
                "no trainer has come", hint="start `trainer train`, or give a longer --timeout"
            )
        yield


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job")
    parser.add_argument("--model", required=True, help="the directory that the trainer starts from")
    parser.add_argument("--name", required=True, help="a unique identity")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--groups", type=int, default=16, help="groups of a batch")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts of a group")
    parser.add_argument(
        "--batches-per-step", type=int, default=1, help="that the trainer takes, of all explorers"
    )
    parser.add_argument("--ahead", type=int, default=0, help="steps; at least the sync interval less one")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds to wait for a version at most")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for a trainer to come")
    parser.add_argument("--evaluate", help="a file that the accuracy of each version is appended to")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except SyncdError as error:
        print(f"{error}\n  {error.hint or ''}", file=sys.stderr)
        sys.exit(error.exit_code)
