"""Generation by a transformers model in this process: the version of each response is known exactly.

`draw` draws tokens with the exact log-prob of each: one forward pass a token, float32 logits. `model.generate` is not
used: if a setting equals the library's default, it takes the model directory's value, so that tokens could be drawn
from another distribution than the one that is recorded.
"""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Generator as Iterated
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import torch
from transformers import AutoModelForCausalLM

from explorer_hooks.hooks.transformers import TransformersHook
from explorer_hooks.run.generation import (
    BEFORE_THE_FIRST,
    Generator,
    GeneratorContext,
    GroupRequest,
    GroupResult,
    InferenceEngine,
    Response,
)
from syncd.errors import ConfigError, EngineDeadError, first_line
from syncd.jobfile.model import JobFile
from syncd.protocol.version import pair_of

_ENDLESS = 1 << 20


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    ends: frozenset[int]  # token ids that end a text
    pad: int  # the token id that fills rows; any that the model knows
    positions: int  # tokens of prompt and response that the model can hold


def sequence_limits(model: Any, tokenizer: Any) -> SequenceLimits:
    """Return what ends sequences of a model, from its generation configuration, its own, and its tokenizer."""
    config = model.config
    ids: set[Any] = set()
    for holder in (getattr(model, "generation_config", None), config, tokenizer):
        value = getattr(holder, "eos_token_id", None)
        ids.update(value if isinstance(value, list | tuple) else [value])
    pad, positions = getattr(config, "pad_token_id", None), getattr(config, "max_position_embeddings", None)
    known_pad = isinstance(pad, int) and 0 <= pad < config.vocab_size
    return SequenceLimits(
        frozenset(token for token in ids if isinstance(token, int)),
        int(pad) if known_pad and pad is not None else 0,
        positions if isinstance(positions, int) else _ENDLESS,
    )


def draw(
    model: Any,
    ends: SequenceLimits,
    requests: Sequence[GroupRequest],
    generator: torch.Generator,
    stop: Callable[[], bool],
) -> list[list[Response]]:
    """Return the responses to each request, without their texts, all computed as one batch.

    Args:
        requests: Prompts, none empty and all shorter than the model's positions; the first request says how many
            responses there are to each, of how many tokens, fewer if the model's positions run out behind a prompt,
            and at which temperature: logits are divided by it; 0 for the most probable token, whose log-prob is at
            temperature 1.
        stop: Called after each token; once it returns true, the tokens so far are returned.
    """
    device = next(model.parameters()).device
    tokens, mask = _padded([request.prompt for request in requests], ends.pad, device)
    samples, temperature = requests[0].samples, requests[0].temperature
    rooms = [min(requests[0].max_tokens, ends.positions - len(request.prompt)) for request in requests]
    room, steps = torch.tensor(rooms, device=device).repeat_interleave(samples), max(rooms)
    chosen, logprobs = [], []
    running = torch.ones(len(requests) * samples, dtype=torch.bool, device=device)
    last = torch.tensor(sorted(ends.ends), dtype=torch.long, device=device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.inference_mode():
        made = model(tokens, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
        cache, logits = made.past_key_values, made.logits[:, -1].repeat_interleave(samples, 0)
        cache.batch_repeat_interleave(samples)
        mask = mask.repeat_interleave(samples, 0)
        for step in range(steps):
            token, logprob = _chosen(logits, temperature, generator)
            chosen.append(token)
            logprobs.append(logprob)
            running &= ~torch.isin(token, last) & (room > step + 1)
            if step + 1 == steps or stop() or not bool(running.any()):
                break
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            places = mask.sum(1, keepdim=True) - 1
            made = model(
                token[:, None],
                attention_mask=mask,
                position_ids=places.clamp(max=ends.positions - 1),  # rows that have ended go on meanwhile
                past_key_values=cache,
                use_cache=True,
            )
            cache, logits = made.past_key_values, made.logits[:, -1]
    return _grouped(torch.stack(chosen, 1), torch.stack(logprobs, 1), ends.ends, room.tolist(), samples)


def _chosen(
    logits: torch.Tensor, temperature: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    if bool(logprobs.isnan().any()):
        hint = "syncd verify JOB --deep; then start it again"
        raise EngineDeadError(
            "the model's logits are no numbers: its weights are not finite, or overflow", hint=hint
        )
    if temperature:
        token = torch.multinomial(logprobs.exp(), 1, generator=generator)
    else:
        token = logprobs.argmax(-1, keepdim=True)
    return token[:, 0], logprobs.gather(-1, token)[:, 0]


def _padded(
    prompts: Sequence[Sequence[int]], pad: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts of one length, filled on the left, and which tokens count."""
    longest = max(map(len, prompts))
    rows = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(rows, device=device), torch.tensor(mask, device=device)


def _grouped(
    tokens: torch.Tensor, logprobs: torch.Tensor, ends: frozenset[int], rooms: Sequence[int], samples: int
) -> list[list[Response]]:
    drawn = []
    for row, values, room in zip(tokens.tolist(), logprobs.tolist(), rooms, strict=True):
        length = next((at + 1 for at, token in enumerate(row[:room]) if token in ends), None)
        cut = length or room
        drawn.append(Response(row[:cut], values[:cut], truncated=length is None))
    return [drawn[at : at + samples] for at in range(0, len(drawn), samples)]


class LocalGenerator(Generator):
    """Generates with a model of this process, `rows` responses at most in one forward pass."""

    def __init__(self, hook: TransformersHook, context: GeneratorContext, rows: int) -> None:
        self._hook, self._tokens, self._stop, self._rows = hook, context.tokens, context.stop, rows
        self._ends = sequence_limits(hook.model, self._tokens.tokenizer)
        seed = crc32(context.seed.encode())
        self._draws = torch.Generator(next(hook.model.parameters()).device).manual_seed(seed)

    def generate(self, requests: Sequence[GroupRequest]) -> "Iterated[GroupResult | None]":
        """Yield each result once; requests that fit into one forward pass are done together."""
        index = 0
        while index < len(requests):
            size = max(self._rows // requests[index].samples, 1)
            yield from self._results(index, requests[index : index + size])
            index += size
            yield None

    def _results(self, index: int, requests: Sequence[GroupRequest]) -> Iterator[GroupResult]:
        fits = [at for at, request in enumerate(requests) if len(request.prompt) < self._ends.positions]
        for at in set(range(len(requests))) - set(fits):
            tokens = len(requests[at].prompt)
            yield GroupResult(index + at, problem=f"the prompt has {tokens} tokens, which are too many")
        if not fits:
            return
        with self._hook.generating() as label:
            groups = draw(
                self._hook.model, self._ends, [requests[at] for at in fits], self._draws, self._stop
            )
        if self._stop():
            return
        version = BEFORE_THE_FIRST if label is None else pair_of(label)
        if version is None:
            for at in fits:
                yield GroupResult(index + at, problem="the model runs no version", retry=True)
            return
        for at, group in zip(fits, groups, strict=True):
            responses = tuple(replace(response, text=self._text(response.tokens)) for response in group)
            yield GroupResult(index + at, responses, version, version)

    def _text(self, tokens: Sequence[int]) -> str:
        ended = tokens[-1] in self._ends.ends
        return self._tokens.decode(tokens[:-1] if ended else tokens)


class LocalEngine(InferenceEngine):
    def __init__(self, file: JobFile) -> None:
        self.name, self._rows = file.explorer.engine.kind, file.explorer.engine.rows
        self.hook: TransformersHook = open_hook(file)

    def generator(self, context: GeneratorContext) -> LocalGenerator:
        return LocalGenerator(self.hook, context, self._rows)


def open_hook(file: JobFile) -> TransformersHook:
    """Return the hook of the model that a file names, which is loaded and ready to generate."""
    section, directory, trust = file.explorer.engine, file.model.path, file.model.trust_remote_code
    model = _load_whole(directory, dtype=getattr(torch, section.dtype), trust_remote_code=trust)
    if file.model.publishes_adapters:
        from explorer_hooks.hooks.peft_model import PeftHook, with_adapter  # noqa: PLC0415 - takes seconds

        model = with_adapter(model, file.model.lora)
        return PeftHook(model.to(device_of(section.device)).eval(), directory, timeout=section.timeout)
    return TransformersHook(model.to(device_of(section.device)).eval(), timeout=section.timeout)


def _load_whole(directory: str, **options: Any) -> Any:
    """Return a model; refuse a directory that lacks a tensor, which transformers would draw at random."""
    hint = "model.path names a Hugging Face model directory"
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, **options)
    except Exception as error:  # what safetensors and transformers raise has no common class
        text = f"the model cannot be loaded: {first_line(error)}"
        raise ConfigError(text, path=directory, hint=hint) from error
    model, info = loaded
    if missing := info["missing_keys"]:
        raise ConfigError(f"the model has no tensor {min(missing)}", path=directory, hint=hint)
    return model


def device_of(name: str) -> torch.device:
    """Return the device of a name; auto is a GPU if there is one."""
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ConfigError('explorer.engine.device = "cuda": there is no GPU here', hint="nvidia-smi")
    return torch.device("cuda" if there and name != "cpu" else "cpu")
