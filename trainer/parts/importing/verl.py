"""The keys of verl: of its YAML files, and of `key=value` in its scripts."""

from typing import Any

from syncd.errors import DOCS
from trainer.config.algorithms import GAE
from trainer.parts.importing import objective, tasks
from trainer.parts.importing.rows import (
    CannotMapError,
    Given,
    Row,
    Table,
    as_flag,
    as_number,
    as_text,
    as_whole,
    by_hand,
    joint,
    mapped,
    one_of,
    unneeded,
    unsupported,
)
from trainer.parts.importing.verl_model import MODEL_ROWS, OTHER_ROWS

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_LOSS = f"{_ACTOR}.policy_loss.loss_mode"
_ESTIMATOR = "algorithm.adv_estimator"
_REWARDS = ("reward", "seq_reward", "seq_final_reward")
"""What `filter_groups.metric` calls the reward itself."""


def _loss(given: Given) -> str:
    return given.text(_LOSS, "vanilla")


def _algorithm(given: Given) -> dict[str, Any]:
    return objective.name_of(given.text(_ESTIMATOR), _loss(given))


def _clips(given: Given) -> dict[str, Any]:
    low, high = (
        given.number(f"{_ACTOR}.clip_ratio{end}", given.number(f"{_ACTOR}.clip_ratio"))
        for end in ("_low", "_high")
    )
    return objective.clips(_loss(given), low, high)


def _aggregation(given: Given) -> dict[str, Any]:
    key = f"{_ACTOR}.loss_agg_mode"
    mode = objective.only_mode(_loss(given)) or given.text(key)  # verl reads none for such a loss either
    scale = given.get(f"{_ACTOR}.loss_scale_factor")
    divides = {} if scale is None else {"algorithm.options.loss_scale_factor": as_number(scale)}
    return {
        **objective.aggregation(_loss(given), mode, key),
        **(divides if mode == "seq-mean-token-sum-norm" else {}),
    }


def _options(given: Given) -> dict[str, Any]:
    names = ("clip_ratio_c", "tau_pos", "tau_neg")
    own = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")
    values = {name: given.get(f"{_ACTOR}.{name}") for name in names}
    values |= {f"policy_loss.{name}": given.get(f"{_ACTOR}.policy_loss.{name}") for name in own}
    return objective.options_of(_loss(given), values)


def _kl(given: Given) -> dict[str, Any]:
    if not given.flag(f"{_ACTOR}.use_kl_loss"):
        return {}
    return {
        "algorithm.kl_coef": given.number(f"{_ACTOR}.kl_loss_coef"),
        "algorithm.kl_type": given.text(f"{_ACTOR}.kl_loss_type"),
    }


def _reward_kl(given: Given) -> dict[str, Any]:
    if not given.flag("algorithm.use_kl_in_reward"):
        return {}
    if given.text("algorithm.kl_ctrl.type", "fixed") != "fixed":
        raise CannotMapError(
            "the coefficient does not change by itself", "--set algorithm.kl_ctrl.type=fixed"
        )
    return {
        "algorithm.reward_kl_coef": given.number("algorithm.kl_ctrl.kl_coef", 0.001),
        "algorithm.reward_kl_type": given.text("algorithm.kl_penalty", "kl").rstrip("+"),
    }


def _normalised(given: Given) -> dict[str, Any]:
    return objective.normalised(
        given.text(_ESTIMATOR), by_deviation=given.flag("algorithm.norm_adv_by_std_in_grpo", default=True)
    )


def is_ppo(given: Given) -> bool:
    """Return whether there is a critic."""
    return given.text(_ESTIMATOR) == GAE


def _gae(given: Given) -> dict[str, Any]:
    if not is_ppo(given):
        return {}
    return {
        "algorithm.gamma": given.number("algorithm.gamma"),
        "algorithm.lam": given.number("algorithm.lam"),
    }


def mini_batches(given: Given) -> int:
    """Return the updates of one pass over a batch."""
    batch, mini = given.whole("data.train_batch_size"), given.whole(f"{_ACTOR}.ppo_mini_batch_size")
    return objective.whole_ratio(batch, mini, "data.train_batch_size by ppo_mini_batch_size")


def updates(given: Given) -> int:
    """Return the updates of one training step."""
    return mini_batches(given) * given.whole(f"{_ACTOR}.ppo_epochs", 1)


def _clip_grad(given: Given) -> dict[str, Any]:
    keys = (f"{_ACTOR}.grad_clip", f"{_ACTOR}.optim.grad_clip", f"{_ACTOR}.optim.clip_grad")
    values = {given.number(key) for key in keys if key in given.values} or {1.0}
    if len(values) > 1:
        raise CannotMapError("name different norms", "--algorithm.optimizer.clip_grad NORM")
    return {"algorithm.optimizer.clip_grad": values.pop()}


def _schedule(given: Given) -> dict[str, Any]:
    optim = f"{_ACTOR}.optim"
    styles = ("warmup_style", "lr_scheduler_type", "lr_decay_style")
    style = next(given.text(f"{optim}.{name}") for name in styles if f"{optim}.{name}" in given)
    total = "trainer.total_training_steps"
    warmup = objective.warmup_updates(
        given, f"{optim}.lr_warmup_steps", f"{optim}.lr_warmup_steps_ratio", total, updates(given)
    )
    least = given.number(f"{optim}.min_lr_ratio", 0.0)
    least = least or given.number(f"{optim}.min_lr", 0.0) / given.number(f"{optim}.lr")
    return objective.schedule(objective.style_of(given, style), warmup, least=least)


def _correction(given: Given) -> dict[str, Any]:
    table, ours = "algorithm.rollout_correction", "algorithm.options.policy_loss.rollout_correction"
    if given.flag(f"{table}.bypass_mode"):
        return {"algorithm.old_logprobs": "rollout"}
    if given.get(f"{table}.rollout_is") is None:
        return {}
    return {f"{ours}.{name}": given.get(f"{table}.{name}") for name in ("rollout_is", "rollout_is_threshold")}


def _length(given: Given) -> dict[str, Any]:
    """Return what a run's length is: steps, or passes of the explorer over its tasks."""
    if "trainer.total_training_steps" in given:
        return {"trainer.total_steps": given.whole("trainer.total_training_steps")}
    return {"explorer.epochs": given.whole("trainer.total_epochs")}


def _job_dir(given: Given) -> dict[str, Any]:
    project, name = given.text("trainer.project_name"), given.text("trainer.experiment_name")
    return {
        "job.dir": given.text("trainer.default_local_dir", f"checkpoints/{project}/{name}"),
        "job.name": name,
    }


def _monitors(value: Any) -> list[str]:
    names = [value] if isinstance(value, str) else value
    own = [as_text(name) for name in names if name not in ("console", "file")]
    if others := set(own) - {"wandb", "tensorboard", "mlflow", "trackio"}:
        raise CannotMapError(
            f"{', '.join(sorted(others))} is not there", "--monitor.kinds '[\"tensorboard\"]'"
        )
    return own


def _tasks(given: Given) -> dict[str, Any]:
    """Return the files of tasks, which are read as they are, and their columns."""
    named = ((f"{name}_key", given.get(f"data.{name}_key")) for name in ("prompt", "answer"))
    columns = {name: as_text(value) for name, value in named if value is not None}
    found = {f"explorer.{name}": value for name, value in columns.items()}
    if tasks.are_chosen(given):
        return found
    train, held_out = (tasks.files_of(given.all.get(f"data.{name}_files")) for name in ("train", "val"))
    measured = {"explorer.evaluation.tasks": held_out[0]} if len(held_out) == 1 else {}
    if len(train) > 1:
        sets = {"explorer.task_sets": tasks.file_sets(train, columns)}
        return {**sets, **measured, **(found if measured else {})}
    return {**found, **measured, "explorer.tasks": train[0] if train else None}


def _filter_groups(given: Given) -> dict[str, Any]:
    """Return that groups of equal rewards are replaced; verl may compare something else."""
    if not given.flag("algorithm.filter_groups.enable"):
        return {}
    metric = given.text("algorithm.filter_groups.metric", "reward")
    if metric not in _REWARDS:
        raise CannotMapError(
            f"compares {metric}, and here rewards are compared", "--explorer.reward.equal_groups drop"
        )
    return {"explorer.reward.equal_groups": "drop"}


def _interval(value: Any) -> int:
    return max(as_whole(value), 0)


def _dynamic(given: Given) -> dict[str, Any]:
    """Return the bound of micro-batches in tokens."""
    if not given.flag(f"{_ACTOR}.use_dynamic_bsz"):
        return {}
    bounds = {"max_token_len_per_gpu": f"{_ACTOR}.ppo_max_token_len_per_gpu"}
    if f"{_ROLLOUT}.log_prob_max_token_len_per_gpu" in given:
        bounds["infer_max_token_len_per_gpu"] = f"{_ROLLOUT}.log_prob_max_token_len_per_gpu"
    sizes = {f"engine.options.{ours}": given.whole(key) for ours, key in bounds.items()}
    return {"engine.options.use_dynamic_bsz": True, **sizes}


_ALGORITHM_ROWS: tuple[Row, ...] = (
    joint((_ESTIMATOR, _LOSS), ("algorithm.name", "algorithm.advantage", "algorithm.loss", "critic.enabled"),
          _algorithm,
          "the pair of estimator and loss; gae is ppo with a critic"),
    joint(tuple(f"{_ACTOR}.clip_ratio{end}" for end in ("", "_low", "_high")),
          ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"), _clips,
          "verl's losses read the two bounds, whose defaults are 0.2 whatever clip_ratio is"),
    joint((f"{_ACTOR}.loss_agg_mode", f"{_ACTOR}.loss_scale_factor"),
          ("algorithm.loss_agg_mode", "algorithm.options.loss_scale_factor"), _aggregation, "the same names"),
    joint((f"{_ACTOR}.clip_ratio_c", f"{_ACTOR}.tau_pos", f"{_ACTOR}.tau_neg",
           *(f"{_ACTOR}.policy_loss.{name}" for name in
             ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta"))),
          ("algorithm.options",), _options, "those that the loss reads"),
    joint((f"{_ACTOR}.use_kl_loss", f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type"),
          ("algorithm.kl_coef", "algorithm.kl_type"), _kl, "0 without use_kl_loss"),
    mapped(f"{_ACTOR}.entropy_coeff", "algorithm.entropy_coeff", as_number),
    joint(("algorithm.norm_adv_by_std_in_grpo",), ("algorithm.norm_advantage",), _normalised,
          "of estimators with groups"),
    joint(("algorithm.gamma", "algorithm.lam"), ("algorithm.gamma", "algorithm.lam"), _gae, "with gae"),
    joint(("algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_is_threshold",
           "algorithm.rollout_correction.bypass_mode"),
          ("algorithm.old_logprobs", "algorithm.options.policy_loss.rollout_correction"), _correction,
          'bypass_mode is old_logprobs = "rollout"'),
    mapped(f"{_ACTOR}.ppo_epochs", "algorithm.epochs", as_whole),
    joint(("data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size"), ("algorithm.mini_batches",),
          lambda given: {"algorithm.mini_batches": mini_batches(given)}, "their quotient; both count prompts"),
    mapped(f"{_ROLLOUT}.temperature", "algorithm.temperature", as_number),
    joint(("algorithm.use_kl_in_reward", "algorithm.kl_penalty", "algorithm.kl_ctrl.type",
           "algorithm.kl_ctrl.kl_coef"),
          ("algorithm.reward_kl_coef", "algorithm.reward_kl_type"), _reward_kl, "0 without use_kl_in_reward"),
    unneeded("only an adaptive coefficient reads it", "algorithm.kl_ctrl.*"),
    joint(("algorithm.filter_groups.enable", "algorithm.filter_groups.metric"), ("explorer.reward.equal_groups",),
          _filter_groups, f"with {', '.join(_REWARDS)} as metric: such groups are replaced"),
    by_hand("explorer.reward.most_equal: groups of equal rewards that are replaced for one batch, in multiples of its"
            f" groups; further ones are kept ({DOCS}/tasks.md#difficulty)",
            "algorithm.filter_groups.max_num_gen_batches"),
    unneeded("how many groups are requested at once: explorer.engine.concurrency", "algorithm.filter_groups.*"),
    unsupported("weights by preference are not supported", "algorithm.use_pf_ppo", off=(False,)),
    unneeded("only use_pf_ppo reads it", "algorithm.pf_ppo.*"),
    unsupported("rejection of rollouts is not supported", "algorithm.rollout_correction.rollout_rs", off=(),
                instead='two bounds: --set algorithm.rollout_correction.rollout_is_threshold="0.5_2.0"'),
    unsupported("the loss is ppo_clip with bypass_mode", "algorithm.rollout_correction.loss_type", off=("ppo_clip",)),
    unsupported("weights must not depend on how a batch is split",
                "algorithm.rollout_correction.rollout_is_batch_normalize", off=(False,)),
    unneeded("only rollout_rs reads it", "algorithm.rollout_correction.rollout_rs_threshold"),
    unsupported("rows of a batch stay in their order", f"{_ACTOR}.shuffle", off=(False,)),
    unsupported("a loss from a teacher's distribution is not supported", "distillation.enabled", off=(False,),
                instead=f"explorer.teacher with algorithm.teacher_coef: {DOCS}/engines.md#a-teacher"),
    unneeded("only distillation.enabled reads it", "distillation.*"),
)  # fmt: skip

_TRAINING_ROWS: tuple[Row, ...] = (
    mapped("data.train_batch_size", "data.groups", as_whole, "prompts of a step"),
    mapped(f"{_ROLLOUT}.n", "data.group_size", as_whole),
    mapped(f"{_ACTOR}.optim.lr", "algorithm.optimizer.lr", as_number),
    mapped(f"{_ACTOR}.optim.weight_decay", "algorithm.optimizer.weight_decay", as_number),
    mapped(f"{_ACTOR}.optim.betas", "algorithm.optimizer.betas"),
    joint((f"{_ACTOR}.grad_clip", f"{_ACTOR}.optim.grad_clip", f"{_ACTOR}.optim.clip_grad"),
          ("algorithm.optimizer.clip_grad",), _clip_grad, "releases have it under different names"),
    joint((f"{_ACTOR}.optim.lr_scheduler_type", f"{_ACTOR}.optim.warmup_style", f"{_ACTOR}.optim.lr_decay_style",
           f"{_ACTOR}.optim.lr_warmup_steps", f"{_ACTOR}.optim.lr_warmup_steps_ratio", f"{_ACTOR}.optim.min_lr_ratio",
           f"{_ACTOR}.optim.min_lr"),
          ("algorithm.optimizer.schedule", "algorithm.optimizer.warmup_steps", "algorithm.optimizer.min_lr_ratio"),
          _schedule, "constant, cosine or linear; verl counts steps here, and we count updates"),
    unneeded("it is set from the length of the run", f"{_ACTOR}.optim.total_training_steps"),
    unsupported("cosine is half a wave", f"{_ACTOR}.optim.num_cycles", off=(0.5,)),
    unsupported("the optimizer is AdamW", f"{_ACTOR}.optim.optimizer", off=("AdamW", "adamw", "adam")),
    unsupported("the optimizer is torch's", f"{_ACTOR}.optim.optimizer_impl", off=("torch.optim",)),
    unsupported("the optimizer has no other settings", f"{_ACTOR}.optim.override_optimizer_config*", off=({},)),
    unsupported("Megatron's schedule has no other shape", f"{_ACTOR}.optim.lr_warmup_init", off=(0, 0.0)),
    unneeded("settings of schedules and optimizers that are not there", f"{_ACTOR}.optim.zero_indexed_step",
             f"{_ACTOR}.optim.lr_decay_steps", f"{_ACTOR}.optim.lr_wsd*", f"{_ACTOR}.optim.muon*",
             f"{_ACTOR}.optim.weight_decay_incr_style", f"{_ACTOR}.optim.use_checkpoint_opt_param_scheduler",
             f"{_ACTOR}.optim.*_dtype", f"{_ACTOR}.optim.use_precision_aware_optimizer",
             f"{_ACTOR}.optim.use_layer_wise_distributed_optimizer"),
    mapped(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", "engine.micro_batch_size", as_whole),
    mapped(f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu", "engine.infer_micro_batch_size", as_whole),
    joint((f"{_ACTOR}.use_dynamic_bsz", f"{_ACTOR}.ppo_max_token_len_per_gpu",
           f"{_ROLLOUT}.log_prob_max_token_len_per_gpu"), ("engine.options.use_dynamic_bsz",
           "engine.options.max_token_len_per_gpu", "engine.options.infer_max_token_len_per_gpu"), _dynamic,
          "with use_dynamic_bsz"),
    unneeded("it is of all ranks; give micro batches per GPU: engine.micro_batch_size",
             f"{_ACTOR}.ppo_micro_batch_size",
             f"{_ROLLOUT}.log_prob_micro_batch_size"),
    unneeded("the passes without gradients share one setting", f"{_ROLLOUT}.log_prob_use_dynamic_bsz"),
    joint(("trainer.total_training_steps", "trainer.total_epochs"), ("trainer.total_steps", "explorer.epochs"),
          _length,
          "epochs are passes of each explorer over the tasks: divide them if there are several"),
    joint(("trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name"), ("job.dir", "job.name"),
          _job_dir, "a directory of its own: not one that verl has written"),
    mapped("trainer.project_name", "monitor.project", as_text),
    mapped("trainer.logger", "monitor.kinds", _monitors, "console and file are always there"),
    mapped("trainer.save_freq", "trainer.save_interval", _interval, "-1 is 0: the last step only"),
    mapped("trainer.max_actor_ckpt_to_keep", "trainer.max_checkpoints_to_keep", as_whole),
    mapped("trainer.test_freq", "explorer.evaluation.every", _interval, "in versions, which are steps; -1 is 0"),
    mapped("trainer.resume_mode", "trainer.continue_from_checkpoint", one_of(auto=True, disable=False),
           "a path is started from by model.path"),
    unneeded("only resume_mode reads it", "trainer.resume_from_path"),
    mapped("data.seed", "job.seed", as_whole),
    mapped("data.shuffle", "explorer.shuffle", as_flag),
    mapped("data.max_prompt_length", "explorer.sampling.max_prompt_tokens", as_whole, "longer ones are skipped"),
    mapped("data.max_response_length", "explorer.sampling.max_tokens", as_whole),
    unsupported("long prompts are skipped and never cut", "data.truncation", off=("error",),
                instead="--set data.truncation=error"),
    by_hand("the answer is in reward_model.ground_truth: have explorer.reward.function read it"
            f" ({DOCS}/import.md#rewards)", "data.train_files"),
    by_hand("of several files each is a table [explorer.evaluation.sets.NAME] with tasks = FILE"
            f" ({DOCS}/evaluation.md#sets)", "data.val_files"),
    joint(("data.train_files", "data.val_files", "data.prompt_key", "data.answer_key"),
          ("explorer.tasks", "explorer.task_sets", "explorer.evaluation.tasks", "explorer.prompt_key",
           "explorer.answer_key"), _tasks, "Parquet and JSONL as they are; several files are several sets"),
    by_hand("explorer.reward.function: exact_match, math, math_verify or package.module:function;"
            f" explorer.reward.functions: several with weights ({DOCS}/import.md#rewards)",
            "custom_reward_function.*", "reward.custom_reward_function.*", "reward.reward_manager.*",
            "reward_model.reward_manager", "reward_model.reward_kwargs.*", "reward.reward_kwargs.*",
            "data.reward_fn_key"),
)  # fmt: skip

_DEFAULTS = {
    _ESTIMATOR: "gae", "algorithm.norm_adv_by_std_in_grpo": True, "algorithm.gamma": 1.0, "algorithm.lam": 1.0,
    _LOSS: "vanilla", f"{_ACTOR}.clip_ratio": 0.2, f"{_ACTOR}.clip_ratio_low": 0.2, f"{_ACTOR}.clip_ratio_high": 0.2,
    f"{_ACTOR}.clip_ratio_c": 3.0, f"{_ACTOR}.tau_pos": 1.0, f"{_ACTOR}.tau_neg": 1.05,
    **{f"{_ACTOR}.policy_loss.{name}": value for name, value in (
        ("clip_cov_ratio", 0.0002), ("clip_cov_lb", 1.0), ("clip_cov_ub", 5.0), ("kl_cov_ratio", 0.0002),
        ("ppo_kl_coef", 0.1))},
    f"{_ACTOR}.loss_agg_mode": "token-mean", f"{_ACTOR}.use_kl_loss": False, f"{_ACTOR}.kl_loss_coef": 0.001,
    f"{_ACTOR}.kl_loss_type": "low_var_kl", "data.train_batch_size": 1024, f"{_ACTOR}.ppo_mini_batch_size": 256,
    f"{_ROLLOUT}.n": 1, f"{_ACTOR}.optim.lr": 1e-6, f"{_ACTOR}.optim.weight_decay": 0.01,
    f"{_ACTOR}.optim.clip_grad": 1.0, f"{_ACTOR}.optim.lr_scheduler_type": "constant",
    f"{_ACTOR}.optim.lr_warmup_steps": -1, f"{_ACTOR}.optim.lr_warmup_steps_ratio": 0.0,
    f"{_ACTOR}.ppo_max_token_len_per_gpu": 16384, "trainer.total_epochs": 30, "trainer.save_freq": -1,
    "trainer.test_freq": -1, "trainer.project_name": "verl_examples", "trainer.experiment_name": "gsm8k",
    "data.max_prompt_length": 512, "data.max_response_length": 512, f"{_ACTOR}.strategy": "fsdp",
    "actor_rollout_ref.model.enable_gradient_checkpointing": True, "actor_rollout_ref.model.use_remove_padding": True,
    "critic.optim.lr": 1e-5, "critic.optim.weight_decay": 0.01, "critic.cliprange_value": 0.5,
}  # fmt: skip

VERL_TABLE = Table(
    "verl",
    "verl",
    "0.9.1",
    (*_ALGORITHM_ROWS, *_TRAINING_ROWS, *MODEL_ROWS, *OTHER_ROWS),
    _DEFAULTS,
    ("actor_rollout_ref.",),
)
"""verl's keys; a test compares the defaults with those of the installed release."""
