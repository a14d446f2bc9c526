"""The seam between the explorer and what generates: prompts in, groups of responses with their versions out."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Generator as Iterated
from dataclasses import dataclass

from explorer_hooks.hook import Hook, PendingProof, Running
from explorer_hooks.run.rewards import Score, plain_task
from explorer_hooks.run.scoring import ScoredGroup, ScoredText, Scorer
from explorer_hooks.run.token_versions import TokenVersions
from explorer_hooks.run.tokens import Tokens
from explorer_hooks.tasks.task import Task
from syncd.experience.model import Span
from syncd.jobfile.model import JobFile
from syncd.protocol.version import Pair

BEFORE_THE_FIRST: Pair = (1, 0)
"""The version that nobody publishes: the model that the trainer starts from; generation 1 continues it."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    prompt: Sequence[int]  # token ids of the prompt
    samples: int  # responses to it
    max_tokens: int  # tokens of a response at most
    temperature: float  # at which tokens are drawn from the whole distribution; 0 for the most probable token


@dataclass(frozen=True, slots=True)
class Response:
    tokens: Sequence[int]  # its token ids, with the end of the text if it came to it
    logprobs: Sequence[float]  # natural logarithm of each one's probability under the version that chose it
    text: str = ""  # the response without special tokens
    versions: TokenVersions | None = None  # which version chose each token; None if the engine does not say
    # Log-probability of each token under a teacher; None if none has read it.
    teacher_logprobs: Sequence[float] | None = None
    truncated: bool = False  # whether it was cut off at the most tokens, not ended by the model


@dataclass(frozen=True, slots=True)
class GroupResult:
    index: int  # the request's index
    responses: tuple[Response, ...] = ()  # its responses; none if there is a `problem`
    first: Pair = BEFORE_THE_FIRST  # the version that ran before the first token was asked for
    # The version that ran after the last token had come; a version in between was one of those in between.
    last: Pair = BEFORE_THE_FIRST
    problem: str = ""  # why there are no responses
    retry: bool = False  # whether another attempt may succeed: the engine was away, or ran no applied version
    unproven: bool = False  # whether weights may have had a part in it that the engine has not proven
    # The probe that had no answer yet when it ended, and that alone can prove them; None if there is none.
    pending: PendingProof | None = None
    # Responses whose tokens' versions the engine named so that they cannot be read.
    unreadable_versions: int = 0
    teacher: str = ""  # the name of the teacher that has read its responses
    untaught: str = ""  # why a teacher has not read them although there is one
    needs_teacher: bool = False  # whether it is dropped then

    @property
    def oldest(self) -> Pair:
        return min(self.first, self.last)

    def versions_of(self, response: Response) -> TokenVersions:
        """Return the versions of a response's tokens.

        If the engine does not name them and the version changed meanwhile, nobody knows which one chose which token:
        the oldest counts. Nor is it known which tokens came from weights that were not proven: then all are doubted.
        """
        doubted = [True] * len(response.tokens) if self.unproven else None
        return response.versions or TokenVersions((Span(0, *self.oldest),), doubted, self.pending)


class Generator(ABC):
    def check(self) -> None:  # noqa: B027 - most engines need not be asked
        """Ask at the start whether the engine gives what is needed; without this, the first group shows it."""

    @abstractmethod
    def generate(self, requests: Sequence[GroupRequest]) -> "Iterated[GroupResult | None]":
        """Yield each result once, as it is ready, and None now and then while none is; close it to give up."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """What makes scored responses to tasks."""

    file: JobFile  # the configuration: how many, and how long they are
    tokens: Tokens
    generator: Generator  # generates groups
    scorer: Scorer  # scores responses
    stop: Callable[[], bool]  # once it returns true, unfinished work is given up

    def scores(self, answered: Iterable[tuple[Task, Sequence[Response]]]) -> list[list[Score]]:
        return self.scorer.score([scored_group(task, responses) for task, responses in answered])


def scored_group(task: Task, responses: Sequence[Response]) -> ScoredGroup:
    texts = (ScoredText(response.text, len(response.tokens), response.truncated) for response in responses)
    return ScoredGroup(task.text, plain_task(task), tuple(texts))


PermittedVersion = Callable[[], Pair | None]
"""Returns the version with which work may be done now: the applied one, or `BEFORE_THE_FIRST`; None for none."""


@dataclass(frozen=True, slots=True)
class GeneratorContext:
    tokens: Tokens  # the model's tokenizer
    running: Callable[[], Running]  # asks the engine what it runs; several threads call it
    # Returns the version of the job that a label names, None if it names none; several threads call it.
    named: Callable[[str], Pair | None]
    permitted: PermittedVersion  # the version with which work may be done
    seed: str  # seeds the draws of a model in this process
    stop: Callable[[], bool]  # once it returns true, pending groups are given up


class InferenceEngine(ABC):
    name: str
    """Its name in presence and log."""
    hook: Hook

    @abstractmethod
    def generator(self, context: GeneratorContext) -> Generator:
        """Return what generates groups with it."""


def version_of(running: Running, permitted: Pair | None) -> Pair | None:
    """Return the version that an engine's work is of, None if the engine must not be given any."""
    if running.paused or permitted is None:
        return None
    is_running = running.label is None if permitted == BEFORE_THE_FIRST else running.pair == permitted
    return permitted if is_running else None


def version_after(running: Running, first: Pair) -> Pair | None:
    """Return the version with which an engine ended work that began with `first`; None if that is unknown.

    An engine that restarted meanwhile has forgotten its version, so its work may be of any weights. The same holds if
    the engine names no version of the job.
    """
    if running.label is None:
        return first if first == BEFORE_THE_FIRST else None
    return running.pair
