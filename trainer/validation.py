"""The loss of examples that are not learnt: `data.validation_path`, measured with the model as it is."""

import math
from collections.abc import Callable, Sequence

from syncd.jobfile.model import JobFile
from trainer.engines.base import Metrics
from trainer.experience.limits import Limits
from trainer.experience.sft import Example, Examples, read_examples
from trainer.sampling import Encoder

MOST_ROWS = 256  # examples of one question to the engine, whose answers all ranks get

LogProbs = Callable[[Sequence[Sequence[int]]], list[list[float]]]
"""Returns the log-prob of each token after the first of each row, at temperature 1."""


def validation_examples(config: JobFile, limits: Limits) -> tuple[Example, ...]:
    data = config.data
    if not data.validation_path:
        return ()
    encode = Encoder(config.model.path, trust=config.model.trust_remote_code)
    examples = read_examples(data.validation_path, encode, max_length=data.max_length)
    Examples(examples).check(limits)
    return examples


def validation_metrics(examples: Sequence[Example], ask: LogProbs) -> Metrics:
    """Return the mean negative log-likelihood of the tokens of all responses; all ranks ask the same."""
    total, tokens = 0.0, 0
    for start in range(0, len(examples), MOST_ROWS):
        part = examples[start : start + MOST_ROWS]
        for example, values in zip(part, ask([example.tokens for example in part]), strict=True):
            learnt = values[example.prompt_length - 1 :]
            total, tokens = total - math.fsum(learnt), tokens + len(learnt)
    loss = total / tokens
    return {"validation/loss": loss, "validation/tokens": float(tokens)}
