"""Reports a run to people and tools: monitors, the progress display, samples of rollouts."""

from collections.abc import Callable, Mapping, Sequence

from syncd.errors import ConfigError
from syncd.jobfile.model import JobFile
from trainer.experience.batch import Batch
from trainer.monitors.base import RolloutSample
from trainer.monitors.several import Monitors
from trainer.reporting.display import Progress
from trainer.sampling import load_tokenizer


class Screen:
    """Passes metrics to monitors and display, until `check` raises FencedError. Nothing here can stop training."""

    def __init__(self, config: JobFile, step: int, check: Callable[[], None]) -> None:
        self._config = config
        self._monitors = Monitors.open(config, step, check)
        self._progress = Progress.open(config, config.trainer.total_steps, step)
        self._decode = _decoder(config)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._monitors.log(metrics, step)
        self._progress.update(metrics, step)

    def preview(self, batch: Batch, step: int) -> None:
        if count := self._config.monitor.preview:
            self._monitors.log_rollouts(pick_rollouts(batch, count, self._decode), step)

    def note(self, text: str) -> None:
        self._progress.note(text)

    def close(self) -> None:
        self._progress.close()
        self._monitors.close()


def _decoder(config: JobFile) -> Callable[[Sequence[int]], str] | None:
    """Return what makes text of tokens, None for a model without a tokenizer."""
    try:
        tokenizer = load_tokenizer(config.model.path, trust=config.model.trust_remote_code)
    except ConfigError:
        return None
    return lambda tokens: str(tokenizer.decode(list(tokens)))


Decode = Callable[[Sequence[int]], str]

MAX_TEXT = 8192  # characters of a prompt or response; of a longer one its beginning and its end are shown

_BETWEEN = "\n[the next segment: its prompt was written again]\n"


def pick_rollouts(batch: Batch, count: int, decode: Decode | None = None) -> list[RolloutSample]:
    """Return rollouts of a batch, best first: evenly spread over the order of rewards, the same for the same batch.

    Without `decode`, or where it fails, the token ids themselves are the text.
    """
    experiences = batch.experiences
    firsts = [index for index, experience in enumerate(experiences) if experience.segment == 0]
    order = sorted(firsts, key=lambda index: (-experiences[index].reward, index))
    return [_rollout(batch, order[at], decode) for at in _spread(len(order), count)]


def _spread(length: int, count: int) -> list[int]:
    """Return places from the first to the last, evenly."""
    if count >= length:
        return list(range(length))
    if count < 2:  # noqa: PLR2004 -- one is the best one
        return list(range(count))
    return [round(at * (length - 1) / (count - 1)) for at in range(count)]


def _rollout(batch: Batch, index: int, decode: Decode | None) -> RolloutSample:
    experience = batch.experiences[index]
    segments = batch.experiences[index : index + experience.segments]
    responses = [_text(segment.tokens[segment.prompt_length :], decode) for segment in segments]
    return RolloutSample(
        prompt=_text(experience.tokens[: experience.prompt_length], decode),
        response=_cut(_BETWEEN.join(responses)),
        reward=experience.reward,
        generation=experience.generation,
        step=experience.step,
        group=experience.group,
        task=experience.task,
        explorer=batch.origins[index].explorer,
    )


def _text(tokens: Sequence[int], decode: Decode | None) -> str:
    if decode is not None:
        try:
            return _cut(decode(list(tokens)))
        except Exception:  # noqa: BLE001, S110 -- a tokenizer that cannot decode must not end training
            pass
    return _cut(" ".join(map(str, tokens)))


def _cut(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters]\n{text[-half:]}"
