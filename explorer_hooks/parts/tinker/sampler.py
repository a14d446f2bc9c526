"""Generation by a tinker server: a version is weights that the server keeps, and each group names those it is of.

Several versions can be sampled at once, so a group that has begun stays with its version when another one is loaded.
"""

import json
import random
import time
from collections.abc import Generator as Iterated
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, ClassVar

from explorer_hooks.hook import Running
from explorer_hooks.hooks.callback import CallbackHook
from explorer_hooks.proof.server_probes import Rows
from explorer_hooks.run.generation import (
    Generator,
    GeneratorContext,
    GroupRequest,
    GroupResult,
    InferenceEngine,
    Response,
    version_of,
)
from syncd.errors import ConfigError, EngineUnreachableError, LoadFailedError, SyncdError
from syncd.jobfile.model import JobFile
from syncd.parts.tinker.session import SCHEME, TinkerSession, api_key
from syncd.protocol.version import Pair
from syncd.transports.base import WeightDirectory

_KEY = "TINKER_API_KEY"
_TICK = 0.05  # seconds between two looks at what has come

_SEEDS = 1 << 31
_CHECKED = (0, 1)  # the tokens whose log-probs show that the server has weights


@dataclass(frozen=True, slots=True)
class Sampler:
    """One version on the server: its label, None for the model that the job starts from, and the SDK's client."""

    label: str | None
    client: Any


class TinkerHook(CallbackHook):
    """Makes versions of kind `remote` the one that is sampled."""

    name: ClassVar[str] = "tinker"
    kinds: ClassVar[frozenset[str]] = frozenset({"remote"})


class TinkerSamplers:
    """The versions that one explorer samples: the present one, and the one that is being loaded.

    `directory` is that of the base model; a version may name it after a rollback to the start.
    """

    def __init__(self, session: TinkerSession, base_model: str, directory: str) -> None:
        self.session, self._base_model, self._directory = session, base_model, directory
        self.present = Sampler(None, self._opened(base_model=base_model))
        self._loaded = self.present

    def load(self, target: WeightDirectory) -> None:
        """Open the weights of a version, and have the server show that it has them."""
        if target.path.startswith(SCHEME):
            client = self._opened(model_path=target.path)
        elif target.path == self._directory:
            client = self._opened(base_model=self._base_model)
        else:
            raise LoadFailedError(f"version {target.label} is no {SCHEME} address", path=target.path)
        self._loaded = Sampler(target.label, client)
        self.logprobs([_CHECKED])

    def commit(self, target: WeightDirectory) -> None:
        assert self._loaded.label == target.label
        self.present = self._loaded

    def restore(self, target: WeightDirectory | None) -> None:
        """Go back to a version, None for the model that the job starts from; what is sampled was never touched."""
        if target is None:
            self.present = self._loaded = Sampler(None, self._opened(base_model=self._base_model))
        elif self.present.label != target.label:
            self.load(target)
            self.commit(target)

    def logprobs(self, rows: Rows) -> list[list[float]]:
        """Return the log-probs of the tokens after the first of each row, under the version that was loaded last."""
        asked = [self._loaded.client.compute_logprobs(self.session.tokens(list(row))) for row in rows]
        results = [self.session.result("log-probs", future) for future in asked]
        # Some servers answer None for the first token, which has no log-prob, and some leave it out.
        return [list(values[1 - len(row) :]) for values, row in zip(results, rows, strict=True)]

    def _opened(self, **weights: str) -> Any:
        create = self.session.service.create_sampling_client
        return self.session.call("opening weights", lambda: create(**weights))


class TinkerGenerator(Generator):
    """Generates with the version that is present when a group begins; a group may take `timeout` seconds."""

    def __init__(
        self,
        samplers: TinkerSamplers,
        context: GeneratorContext,
        ends: frozenset[int],
        *,
        concurrency: int,
        timeout: float,
    ) -> None:
        self._samplers, self._context, self._ends = samplers, context, ends
        self._concurrency, self._timeout = concurrency, timeout
        self._draws = random.Random(context.seed)  # noqa: S311 - seeds of samples

    def generate(self, requests: Sequence[GroupRequest]) -> "Iterated[GroupResult | None]":
        left = list(enumerate(requests))[::-1]
        running: dict[Future[Any], _PendingGroup] = {}
        try:
            while (left or running) and not self._context.stop():
                while left and len(running) < self._concurrency:
                    index, asked = left.pop()
                    begun = self._begin(index, asked)
                    if isinstance(begun, GroupResult):
                        yield begun
                    else:
                        running[begun.future] = begun
                yield from self._come(running)
                yield None
        finally:
            for future in running:
                future.cancel()

    def _begin(self, index: int, asked: GroupRequest) -> "_PendingGroup | GroupResult":
        sampler = self._samplers.present
        version = version_of(Running(sampler.label), self._context.permitted())
        if version is None:
            time.sleep(_TICK)
            return GroupResult(index, problem="the engine runs no applied version", retry=True)
        session = self._samplers.session
        settings = session.types.SamplingParams(
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            top_p=1.0,
            top_k=-1,
            seed=self._draws.randrange(_SEEDS),
            stop=sorted(self._ends) or None,
        )
        prompt = session.tokens(list(asked.prompt))
        return _PendingGroup(
            index, asked, version, sampler.client.sample(prompt, asked.samples, settings), time.monotonic()
        )

    def _come(self, running: "dict[Future[Any], _PendingGroup]") -> Iterator[GroupResult]:
        wait(running, _TICK, FIRST_COMPLETED)
        for future, begun in list(running.items()):
            if future.done() or time.monotonic() - begun.since > self._timeout:
                del running[future]
                yield self._result(begun)

    def _result(self, begun: "_PendingGroup") -> GroupResult:
        if not begun.future.done():
            begun.future.cancel()
            problem = f"the tinker server did not answer within {self._timeout:g} s"
            return GroupResult(begun.index, problem=problem, retry=True)
        try:
            sampled = self._samplers.session.result("samples", begun.future)
            responses = tuple(self._response(sequence) for sequence in sampled.sequences)
        except ConfigError as error:
            return GroupResult(begun.index, problem=str(error))
        except SyncdError as error:
            return GroupResult(begun.index, problem=str(error), retry=True)
        if len(responses) != begun.asked.samples:
            return GroupResult(begun.index, problem=f"{len(responses)} responses of {begun.asked.samples}")
        return GroupResult(begun.index, responses, begun.version, begun.version)

    def _response(self, sequence: Any) -> Response:
        """Return a response; the server's log-probs are at temperature 1."""
        tokens, logprobs = list(sequence.tokens), list(sequence.logprobs or ())
        if not tokens or len(tokens) != len(logprobs):
            raise EngineUnreachableError(f"{len(logprobs)} log-probs for {len(tokens)} tokens")
        text = self._context.tokens.decode(tokens[:-1] if tokens[-1] in self._ends else tokens)
        return Response(tokens, logprobs, text, truncated=tokens[-1] not in self._ends)


@dataclass(frozen=True, slots=True)
class _PendingGroup:
    index: int
    asked: GroupRequest
    version: Pair
    future: "Future[Any]"
    since: float


class TinkerInference(InferenceEngine):
    def __init__(self, file: JobFile) -> None:
        self._section, directory = file.explorer.engine, file.model.path
        self.name = f"tinker={self._section.address}"
        key = api_key(self._section.token_env or _KEY)
        self._session = TinkerSession(self._section.address, key, self._section.timeout)
        base_model, _ = self._session.base_model(self._section.model)
        self._samplers, self._ends = (
            TinkerSamplers(self._session, base_model, directory),
            end_tokens(directory),
        )
        samplers = self._samplers
        self.hook = TinkerHook(
            samplers.load,
            abort=samplers.restore,
            commit=samplers.commit,
            probe=samplers.logprobs,
            probes="held",
            timeout=self._section.timeout,
        )

    def generator(self, context: GeneratorContext) -> TinkerGenerator:
        section = self._section
        return TinkerGenerator(
            self._samplers, context, self._ends, concurrency=section.concurrency, timeout=section.timeout
        )


def end_tokens(directory: str) -> frozenset[int]:
    tokens: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        try:
            with open(f"{directory}/{name}", encoding="utf-8") as file:
                ends = json.load(file).get("eos_token_id")
        except FileNotFoundError:
            continue
        tokens.update(
            token for token in (ends if isinstance(ends, list) else [ends]) if isinstance(token, int)
        )
    return frozenset(tokens)
