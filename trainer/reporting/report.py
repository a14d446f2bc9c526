"""What people and tools see of a run: the monitors, the progress display, previews of rollouts."""

from collections.abc import Callable, Mapping, Sequence

from syncd.errors import ConfigError
from trainer.config.model import JobConfig
from trainer.experience.batch import Batch
from trainer.monitors.several import Monitors
from trainer.reporting import Progress
from trainer.reporting.rollout_samples import choose
from trainer.sampling import load_tokenizer


class Screen:
    """Hands figures to everybody who wants them. Nothing here can stop training.

    Args:
        config: The job's file.
        step: The step that the run goes on from.
    """

    def __init__(self, config: JobConfig, step: int) -> None:
        self._config = config
        self._monitors = Monitors.open(config, step)
        self._progress = Progress.open(config, config.trainer.total_steps, step)
        self._decode = _decoder(config)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the figures of a step."""
        self._monitors.log(metrics, step)
        self._progress.update(metrics, step)

    def preview(self, batch: Batch, step: int) -> None:
        """Take rollouts that were trained on."""
        if count := self._config.monitor.preview:
            self._monitors.log_rollouts(choose(batch, count, self._decode), step)

    def note(self, text: str) -> None:
        """Say something to whoever watches."""
        self._progress.note(text)

    def close(self) -> None:
        """Write out what is left."""
        self._progress.close()
        self._monitors.close()


def _decoder(config: JobConfig) -> Callable[[Sequence[int]], str] | None:
    """Return what makes text of tokens, None for a model without a tokenizer."""
    try:
        tokenizer = load_tokenizer(config.model.path, trust=config.model.trust_remote_code)
    except ConfigError:
        return None
    return lambda tokens: str(tokenizer.decode(list(tokens)))
