"""Rows as verl takes them, a TensorDict of jagged tensors with settings beside them, and passes without gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig

from syncd.errors import ConfigError
from trainer.config.attention import DEGREE
from trainer.engines.verl.models import Answering, Model
from trainer.engines.verl.rows import PADDING, Columns, RowTensors, Slots, TokenRow, deal, fill, token_row

_STRIDE = 37
_NOISE, _ROUNDED = {"float32": 1e-3}, 0.1
"""By how much two right ways to compute an answer may differ at the mean: by dtype, and in all others."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The size of a micro-batch on each of the ranks that share it."""

    rows: int
    tokens: int | None  # its tokens instead, if `use_dynamic_bsz` is set
    packed: bool = False  # whether its rows are packed
    ranks: int = 1  # how many ranks share it; each computes a part of every row

    @classmethod
    def training(cls, config: FSDPEngineConfig) -> "MicroBatch":
        tokens = config.max_token_len_per_gpu if config.use_dynamic_bsz else None
        return cls(config.micro_batch_size_per_gpu, tokens, config.use_remove_padding, _ranks_of(config))

    @classmethod
    def inference(cls, config: FSDPEngineConfig) -> "MicroBatch":
        tokens = config.infer_max_token_len_per_gpu or config.max_token_len_per_gpu
        most = config.infer_micro_batch_size_per_gpu
        tokens = tokens if config.use_dynamic_bsz else None
        return cls(most, tokens, config.use_remove_padding, _ranks_of(config))

    @property
    def longest(self) -> int | None:
        return None if self.tokens is None else self.tokens * self.ranks

    def check(self, rows: Sequence[TokenRow]) -> None:
        longest = max((len(row.tokens) for row in rows), default=0)
        if self.longest is not None and longest > self.longest:
            hint = "raise engine.options.max_token_len_per_gpu"
            raise ConfigError(
                f"a row of {longest} tokens where {self.longest} are one micro-batch", hint=hint
            )


def deal_to(model: Model, rows: Sequence[TokenRow], numbers: Sequence[int]) -> Slots:
    """Return the rows of this rank, which has a part of the model."""
    return deal(rows, numbers, model.get_data_parallel_rank(), model.get_data_parallel_size())


def _ranks_of(config: FSDPEngineConfig) -> int:
    return getattr(config, DEGREE, 1)  # Megatron's configuration has other names for it


def tensors(
    rows: Sequence[TokenRow], slots: Slots, columns: Columns, budget: MicroBatch, **settings: Any
) -> TensorDict:
    """Return the rows of this rank, `slots` padded to whole micro-batches, for one pass with verl's `settings`."""
    slots, size = fill(slots, budget.rows)
    chosen = [PADDING if slot is None else rows[slot] for slot in slots]
    whole, prompts = _offsets([len(row.tokens) for row in chosen]), _offsets([row.prompt for row in chosen])
    responses, positions = whole - prompts, _positions(whole)
    of_prompt = positions < torch.repeat_interleave(prompts.diff(), whole.diff())
    tokens, mask = torch.cat([row.tokens for row in chosen]), torch.cat([row.mask for row in chosen])
    values = {
        "input_ids": (tokens, whole),
        "position_ids": (positions, whole),
        "prompts": (tokens[of_prompt], prompts),
        "responses": (tokens[~of_prompt], responses),
        "response_mask": (mask, responses),
        "loss_mask": (torch.zeros_like(tokens).masked_scatter_(~of_prompt, mask), whole),
    } | {
        name: (torch.cat([torch.zeros(1) if slot is None else column[slot] for slot in slots]), responses)
        for name, column in columns.items()
    }
    data = TensorDict({name: _jagged(*column) for name, column in values.items()}, batch_size=[len(slots)])
    return tu.assign_non_tensor(
        data, use_remove_padding=budget.packed, pad_token_id=0, use_dynamic_bsz=budget.tokens is not None,
        max_token_len_per_gpu=budget.tokens, micro_batch_size_per_gpu=size, **settings,
    )  # fmt: skip


def _jagged(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    lengths = offsets.diff()  # without them torch pads rows to the length of all together
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, min_seqlen=int(lengths.min()), max_seqlen=int(lengths.max())
    )


def response_values(values: torch.Tensor, data: TensorDict) -> torch.Tensor:
    """Return what a model answered at each response token, rows end to end.

    `values` has what it answered at each token of each row, jagged: of the token that comes next.
    """
    prompts, responses = data["prompts"].offsets(), data["responses"].offsets()
    ends = (prompts + responses)[:-1] + prompts.diff()
    at = _positions(responses) + torch.repeat_interleave(ends - 1, responses.diff())
    return values.values()[at]


def _offsets(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def _positions(offsets: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(int(offsets[-1]), device=offsets.device)
    return positions - torch.repeat_interleave(offsets[:-1], offsets.diff())


def forward(
    model: Answering, rows: Sequence[TokenRow], slots: Slots, temperature: float, *, entropy: bool = False
) -> tuple[RowTensors, RowTensors]:
    """Return log-probs, and entropies if asked for, of this rank's rows; all ranks have as many slots."""
    budget = MicroBatch.inference(model.engine_config)
    output = _infer(model, rows, slots, budget, temperature=temperature, calculate_entropy=entropy)
    names = ("log_probs", "entropy") if entropy else ("log_probs",)
    outputs = [_of_rows(output[name], rows, slots) for name in names]
    return outputs[0], outputs[1] if entropy else {}


def forward_values(model: Answering, rows: Sequence[TokenRow], slots: Slots) -> RowTensors:
    """Return a critic's values of this rank's rows: before each response token, the reward that it expects."""
    budget = MicroBatch.inference(model.engine_config)
    output = _infer(model, rows, slots, budget, temperature=1.0, calculate_entropy=False)
    return _of_rows(output["values"], rows, slots)


def require_separate_rows(model: Answering, vocabulary: int, name: str, compute_dtype: str) -> None:
    """Refuse a model whose packed rows see each other: four short rows must get the answers that they get padded.

    Nothing else shows it: an attention that does not look for the ends of rows computes without an error. Where ranks
    share rows, which are always packed, each row must get the answer that it gets alone; one that sees only the part
    of it that is on its rank does not. The answer is `name`, `log_probs` or `values`; ids are below `vocabulary`.
    """
    rows = [
        token_row([token * _STRIDE % vocabulary for token in range(start, start + 8)])
        for start in (0, 8, 16, 24)
    ]
    slots: Slots = [0, 1, 2, 3]
    settings = {"temperature": 1.0, "calculate_entropy": False}
    ranks = MicroBatch.training(model.engine_config).ranks
    other, how = (
        (MicroBatch(4, None), "padded")
        if ranks == 1
        else (MicroBatch(1, None, packed=True, ranks=ranks), "alone")
    )
    packed, apart = (
        _of_rows(_infer(model, rows, slots, way, **settings)[name], rows, slots)
        for way in (MicroBatch(4, None, packed=True, ranks=ranks), other)
    )
    difference = float(torch.stack([(packed[slot] - apart[slot]).abs().mean() for slot in packed]).mean())
    if not difference <= _NOISE.get(compute_dtype, _ROUNDED):
        text = f"packed rows see each other: {how}, the model's {name} differ by {difference:.2g}"
        raise ConfigError(text, hint="engine.packing = false, or another model.attn_implementation")


def _infer(
    model: Answering, rows: Sequence[TokenRow], slots: Slots, budget: MicroBatch, **settings: Any
) -> dict[str, torch.Tensor]:
    data = tensors(rows, slots, {}, budget, **settings)
    with model.eval_mode():
        output: dict[str, torch.Tensor] = model.infer_batch(data)["model_output"]
    return output


def _of_rows(values: torch.Tensor, rows: Sequence[TokenRow], slots: Slots) -> RowTensors:
    pairs = zip(slots, values.float().cpu().unbind(), strict=False)  # padding comes last
    return {slot: rows[slot].response(value) for slot, value in pairs if slot is not None}
