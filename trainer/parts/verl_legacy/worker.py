"""verl 0.7.1's worker with its settings: what holds the model, its optimizer and the schedule."""

import contextlib
import io
import os
import warnings
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from verl.workers.fsdp_workers import ActorRolloutRefWorker  # type: ignore[import-not-found]

from syncd.errors import ConfigError
from syncd.jobfile.model import JobFile
from syncd.jobfile.trainer_sections import AlgorithmSection
from syncd.transports.ranks import Ranks
from trainer.config.algorithms import OWN_LOSS, SFT, clip_bounds, find_loss
from trainer.config.schedule import schedule_steps
from trainer.whole_models import whole_models


class LegacyModel:
    """The model of a worker, under the names that the newer engines of verl have for its parts."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.module, self.optimizer = worker.actor_module_fsdp, worker.actor_optimizer
        self.lr_scheduler, self.actor = worker.actor_lr_scheduler, worker.actor
        self.checkpoint_manager, self.engine_config = (
            worker.checkpoint_manager,
            worker.config.actor.fsdp_config,
        )

    def load_checkpoint(self, local_path: str, *, del_local_after_load: bool) -> None:
        with _quiet():
            self._worker.load_checkpoint(local_path, del_local_after_load=del_local_after_load)


def build_model(config: JobFile, algorithm: AlgorithmSection, ranks: Ranks) -> LegacyModel:
    # The worker reads them; the process group is there already.
    variables = {
        "RANK": ranks.rank,
        "WORLD_SIZE": ranks.world_size,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 0,
    }
    for name, value in variables.items():
        os.environ.setdefault(name, str(value))
    try:
        with _quiet(), whole_models():
            # A configuration of its own: the worker divides sizes in it by the number of ranks.
            worker = ActorRolloutRefWorker(_worker_config(config, algorithm, ranks.world_size), role="actor")
            worker.init_model()
    except (ValueError, AssertionError, ImportError, NotImplementedError, OSError) as error:
        raise ConfigError(f"the model cannot be built: {error}", path=config.model.path) from error
    return LegacyModel(worker)


def _worker_config(config: JobFile, algorithm: AlgorithmSection, ranks: int) -> DictConfig:
    with initialize_config_dir(str(files("verl.trainer").joinpath("config")), version_base=None):
        whole = compose("ppo_trainer")
    OmegaConf.set_struct(whole, False)  # noqa: FBT003 - omegaconf takes it by place
    model = {
        "path": config.model.path,
        "trust_remote_code": config.model.trust_remote_code,
        "enable_gradient_checkpointing": config.model.gradient_checkpointing,
        "use_remove_padding": False,
        "override_config": {"attn_implementation": config.model.attn_implementation},
    }
    actor = {
        "strategy": "fsdp2",
        "use_torch_compile": False,
        "use_rollout_log_probs": True,  # those of the batch, in every update
        "ppo_micro_batch_size_per_gpu": config.engine.micro_batch_size,
        "ppo_mini_batch_size": config.engine.micro_batch_size * ranks,
        "grad_clip": config.algorithm.optimizer.clip_grad,
        "optim": _optimizer(config),
        "fsdp_config": _spread(config),
        **_loss(algorithm),
    }
    overrides = {"actor_rollout_ref": {"model": model, "actor": actor, "rollout": {"n": 1}}}
    merged_config: DictConfig = OmegaConf.merge(whole, overrides).actor_rollout_ref
    return merged_config


def _optimizer(config: JobFile) -> Mapping[str, Any]:
    optimizer = config.algorithm.optimizer
    return {
        "lr": optimizer.lr,
        "betas": list(optimizer.betas),
        "weight_decay": optimizer.weight_decay,
        "clip_grad": optimizer.clip_grad,
        "lr_warmup_steps": optimizer.warmup_steps,
        "lr_scheduler_type": optimizer.schedule,
        "min_lr_ratio": optimizer.min_lr_ratio,
        "total_training_steps": schedule_steps(config),
    }


def _spread(config: JobFile) -> Mapping[str, Any]:
    dtype = config.engine.compute_dtype
    return {
        "strategy": "fsdp2",
        "model_dtype": config.model.dtype,
        "dtype": dtype,
        "mixed_precision": {"param_dtype": dtype, "reduce_dtype": "float32", "buffer_dtype": "float32"},
        "use_torch_compile": False,
        "seed": config.job.seed,
    }


def _loss(algorithm: AlgorithmSection) -> Mapping[str, Any]:
    """Return the policy loss; examples are learnt by that of GPG, which with advantage 1 is their likelihood's."""
    if algorithm.name == SFT:
        return {"policy_loss": {"loss_mode": "gpg"}, "loss_agg_mode": "token-mean"}
    options = dict(algorithm.options)
    settings: dict[str, Any] = {
        "policy_loss": {"loss_mode": algorithm.loss, **options.pop("policy_loss", {})},
        "loss_agg_mode": algorithm.loss_agg_mode or (find_loss(algorithm.loss) or OWN_LOSS).mode,
    }
    if bounds := clip_bounds(algorithm):
        settings |= {"clip_ratio_low": bounds[0], "clip_ratio_high": bounds[1]}
    return settings | options


@contextlib.contextmanager
def _quiet() -> Any:
    """Suppress what the worker prints, and warnings of a release that is not developed any more."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
