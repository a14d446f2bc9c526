"""verl's Megatron engine: the job's keys as its configurations, and the engine as `Model` describes one.

Ranks of one data-parallel place split a model among them (tensor, pipeline, context) and compute the same rows. verl
gives outputs to the last pipeline stage alone, and makes an update whatever its gradient is; both are mended here.
Nothing of megatron-core is imported here: verl does, when the engine is built.
"""

import contextlib
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig

from syncd.jobfile.model import JobFile
from syncd.jobfile.trainer_sections import OptimizerSection
from trainer.config.schedule import schedule_steps
from trainer.engines.verl.models import build_part
from trainer.engines.verl.settings import model_config
from trainer.parts.megatron.config import MEGATRON, MEGATRON_SIZES

_RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
"""Gradient checkpointing, by Megatron's names."""


def build_megatron(config: JobFile, *, forward_only: bool) -> "MegatronModel":
    return MegatronModel(
        build_part(
            "language_model",
            MEGATRON,
            megatron_model_config(config),
            megatron_engine_config(config, forward_only=forward_only),
            megatron_optimizer_config(config.algorithm.optimizer, schedule_steps(config)),
        )
    )


def megatron_model_config(config: JobFile) -> HFModelConfig:
    model = model_config(config)
    model.tokenizer = SimpleNamespace(pad_token_id=0)  # all that the engine asks of one
    return model


def megatron_engine_config(config: JobFile, *, forward_only: bool = False) -> McoreEngineConfig:
    engine = config.engine
    options = dict(engine.options)
    own = dict(options.pop("override_transformer_config", {}))
    parallel = options.get("sequence_parallel", options.get("tensor_model_parallel_size", 1) > 1)
    # mbridge turns sequence parallelism on with tensor parallelism, whatever verl's configuration says.
    changes = {"sequence_parallel": parallel, **(_RECOMPUTED if config.model.gradient_checkpointing else {})}
    settings: dict[str, Any] = {
        "dtype": engine.compute_dtype,
        "micro_batch_size_per_gpu": engine.micro_batch_size,
        "infer_micro_batch_size_per_gpu": engine.infer_micro_batch_size,
        "use_dynamic_bsz": False,
        "use_remove_padding": engine.packing,
        "param_offload": engine.offload_params,
        "optimizer_offload": engine.offload_optimizer,
        "forward_only": forward_only,
        "vanilla_mbridge": True,
        "seed": config.job.seed,
        "sequence_parallel": parallel,
        "override_transformer_config": {**changes, **own},
    }
    return McoreEngineConfig(**{**settings, **options})


def megatron_optimizer_config(section: OptimizerSection, total_steps: int) -> McoreOptimizerConfig:
    """Return AdamW and its learning rate, whose schedule ends after `total_steps` updates, -1 for no end.

    verl does not pass betas on by itself. Megatron's schedule needs an end, which a constant rate does not reach.
    """
    last = total_steps if total_steps > 0 else section.warmup_steps + 1
    first, second = section.betas
    return McoreOptimizerConfig(
        lr=section.lr,
        betas=section.betas,
        weight_decay=section.weight_decay,
        clip_grad=section.clip_grad,
        lr_warmup_steps=section.warmup_steps,
        lr_decay_style=section.schedule,
        lr_decay_steps=last,
        min_lr=section.lr * section.min_lr_ratio,
        total_training_steps=last,
        override_optimizer_config={"adam_beta1": first, "adam_beta2": second},
    )


def sizes_of(config: JobFile) -> dict[str, int]:
    """Return into how many parts each kind of parallelism splits the model, by verl's names."""
    return {name: config.engine.options.get(name) or 1 for name in MEGATRON_SIZES}


class MegatronModel:
    """verl's Megatron engine; what is not described is passed on to it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.module = torch.nn.ModuleList(engine.module)
        self.optimizer, self.lr_scheduler = engine.optimizer, engine.lr_scheduler
        self.model_config, self.engine_config = engine.model_config, engine.engine_config
        self.checkpoint_manager = getattr(engine, "checkpoint_mananager", None)  # verl's spelling
        if self.checkpoint_manager is not None:
            self.checkpoint_manager.use_dist_checkpointing = True  # weights too are saved by their owners

    def train_mode(self) -> contextlib.AbstractContextManager[None]:
        mode: contextlib.AbstractContextManager[None] = self._engine.train_mode()
        return mode

    def eval_mode(self) -> contextlib.AbstractContextManager[None]:
        mode: contextlib.AbstractContextManager[None] = self._engine.eval_mode()
        return mode

    def disable_adapter(self) -> contextlib.AbstractContextManager[None]:
        """Compute without the adapter; there is none."""
        return contextlib.nullcontext()

    def get_data_parallel_rank(self) -> int:
        return int(self._engine.get_data_parallel_rank())

    def get_data_parallel_size(self) -> int:
        return int(self._engine.get_data_parallel_size())

    def infer_batch(self, data: TensorDict) -> dict[str, Any]:
        """Return the output of a pass, on all stages of the pipeline."""
        output = self._engine.infer_batch(data).get("model_output")
        own = {name: [part.cpu() for part in value.unbind()] for name, value in (output or {}).items()}
        group = self._engine.get_model_parallel_group()
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, own, group=group)
        whole = next(filter(None, gathered))
        nested = {
            name: torch.nested.as_nested_tensor(parts, layout=torch.jagged) for name, parts in whole.items()
        }
        return {"model_output": nested}

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Return whether this rank is the one, of those that compute the same rows, whose outputs are recorded."""
        return bool(self._engine.is_mp_src_rank_with_outputs())

    def forward_backward_batch(self, data: TensorDict, loss: Any) -> Any:
        return self._engine.forward_backward_batch(data, loss)

    def optimizer_zero_grad(self) -> None:
        self._engine.optimizer_zero_grad()

    def optimizer_step(self) -> float:
        """Make an update and return the norm of its gradient; none is made if that is not finite on some rank."""
        if not self._is_finite():
            return math.nan
        return float(self._engine.optimizer_step())

    def lr_scheduler_step(self) -> float:
        return float(self._engine.lr_scheduler_step())

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, torch.Tensor]], Any]:
        """Return a walk over the whole weights by their Hugging Face names, each once; all ranks walk all of it."""
        walk, adapter = self._engine.get_per_tensor_param()
        return _first_of_each(walk), adapter

    def save_checkpoint(self, directory: str) -> None:
        """Write this rank's part of weights and optimizer, in Megatron's format; all ranks make the call.

        Each has its own `directory`; what all of them hold together is the checkpoint.
        """
        self._engine.save_checkpoint(local_path=directory)

    def load_checkpoint(self, local_path: str, *, del_local_after_load: bool) -> None:
        """Read this rank's part of them from one directory with the files of all ranks."""
        with torch.no_grad():
            self._engine.load_checkpoint(local_path, del_local_after_load=del_local_after_load)

    def _is_finite(self) -> bool:
        sums = [
            buffer.grad_data.norm()
            for chunk in self._engine.module
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]
        whole = torch.stack(sums).sum().isfinite().float()
        dist.all_reduce(whole, op=dist.ReduceOp.MIN)
        return bool(whole.item())


def _first_of_each(walk: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Leave out names that came before: tied weights are on the first and on the last stage of a pipeline."""
    seen = set[str]()
    for name, tensor in walk:
        if name not in seen:
            seen.add(name)
            yield name, tensor
