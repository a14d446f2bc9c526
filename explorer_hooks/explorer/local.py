"""Generation by a transformers model in this process: the version of each rollout is known exactly."""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Generator as Iterated
from contextlib import AbstractContextManager
from typing import Any

import torch

from explorer_hooks.explorer.config import InferenceSection
from explorer_hooks.explorer.generation import BEFORE_THE_FIRST, Ask, Generator, Made, Rollout
from explorer_hooks.explorer.sampler import Ends, draw
from explorer_hooks.explorer.tokens import Tokens
from syncd.errors import ConfigError
from syncd.protocol.version import pair_of


class Local(Generator):
    """Generates with a model of this process.

    Args:
        model: The model that versions are loaded into.
        ends: What ends and pads its sequences.
        tokens: Its tokenizer.
        rows: Rollouts of one batch at most.
        seed: Of what is drawn.
        generating: Keeps versions from being loaded while it is entered, and gives the label of the one that runs.
        stop: Once true, what is in hand is given up.
    """

    def __init__(
        self,
        model: Any,
        ends: Ends,
        tokens: Tokens,
        *,
        rows: int,
        seed: int,
        generating: Callable[[], AbstractContextManager[str | None]],
        stop: Callable[[], bool],
    ) -> None:
        self._model, self._ends, self._tokens, self._rows = model, ends, tokens, rows
        self._generating, self._stop = generating, stop
        self._draws = torch.Generator(next(model.parameters()).device).manual_seed(seed)

    def generate(self, asks: Sequence[Ask]) -> "Iterated[Made | None]":
        """Yield each group once; groups that fit into one batch together."""
        place = 0
        while place < len(asks):
            size = max(self._rows // asks[place].samples, 1)
            yield from self._made(place, asks[place : place + size])
            place += size
            yield None

    def _made(self, place: int, asks: Sequence[Ask]) -> Iterator[Made]:
        fits = [at for at, ask in enumerate(asks) if len(ask.prompt) < self._ends.positions]
        for at in set(range(len(asks))) - set(fits):
            yield Made(place + at, problem=f"{len(asks[at].prompt)} tokens of a prompt are too many")
        if not fits:
            return
        first = asks[0]
        with self._generating() as label:
            groups = draw(
                self._model,
                self._ends,
                [asks[at].prompt for at in fits],
                samples=first.samples,
                max_tokens=first.max_tokens,
                temperature=first.temperature,
                generator=self._draws,
                stop=self._stop,
            )
        if self._stop():
            return
        version = BEFORE_THE_FIRST if label is None else pair_of(label)
        if version is None:
            for at in fits:
                yield Made(place + at, problem="the model is of no version", again=True)
            return
        for at, group in zip(fits, groups, strict=True):
            rollouts = [Rollout(one.tokens, one.logprobs, self._text(one.tokens)) for one in group]
            yield Made(place + at, tuple(rollouts), version, version)

    def _text(self, tokens: Sequence[int]) -> str:
        ended = tokens[-1] in self._ends.ends
        return self._tokens.decode(tokens[:-1] if ended else tokens)


def load_model(directory: str, section: InferenceSection, *, trust_remote_code: bool) -> Any:
    """Return the model of a directory, ready to generate.

    Raises:
        ConfigError: There is none that can be loaded, or no device as asked for.
    """
    try:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - seconds
    except ImportError as error:
        hint = "pip install 'syncd[transformers]'"
        raise ConfigError('explorer.engine.kind = "transformers" needs transformers', hint=hint) from error
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, section.dtype), trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        hint = "model.path names a Hugging Face model directory"
        raise ConfigError(f"no model can be loaded: {what}", path=directory, hint=hint) from error
    placed: Any = model
    return placed.to(device_of(section.device)).eval()


def device_of(name: str) -> torch.device:
    """Return the device of a name; auto is a GPU where there is one.

    Raises:
        ConfigError: There is no GPU.
    """
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ConfigError('explorer.engine.device = "cuda": there is no GPU here', hint="nvidia-smi")
    return torch.device("cuda" if there and name != "cpu" else "cpu")
