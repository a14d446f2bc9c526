"""The tables of the job's file that trainers read: the engine, the algorithm, the loop, what is measured and shown.

Tables that explorers read too are in `sections`. A key's description is its only documentation: the schema and
docs/configuration.md are made of it.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from syncd.jobfile.sections import (
    FIXED,
    FIXED_PATH,
    Above0,
    Count,
    NoneText,
    Positive,
    Seconds,
    Section,
    Share,
)


class EngineSection(Section):
    """The engine."""

    name: str = Field(default="verl", json_schema_extra=FIXED)
    """An engine registered under the entry point `trainer.engines`."""
    strategy: str = Field(default="fsdp2", json_schema_extra=FIXED)
    """How the engine spreads the model over ranks; verl: fsdp2, fsdp or megatron."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device; auto is cuda if GPUs are visible."""
    compute_dtype: Literal["float32", "bfloat16"] = Field(default="bfloat16", json_schema_extra=FIXED)
    """Of activations and gathered parameters (FSDP mixed precision)."""
    micro_batch_size: Positive = 8
    """Rows of one forward and backward pass on one rank; the result depends on it by rounding alone."""
    infer_micro_batch_size: Positive = 16
    """Rows of one forward pass without gradients on one rank."""
    packing: bool = False
    """Put the rows of a micro-batch one after another instead of padding each to the longest."""
    offload_params: bool = False
    """Keep parameters in main memory between passes."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in main memory between updates."""
    collective_timeout: Seconds = 1800.0
    """Seconds after which a collective that a rank does not join is an error."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further settings by the engine's own names; verl's: docs/training-engines.md."""


class OptimizerSection(Section):
    """AdamW and its learning rate."""

    lr: Above0 = Field(default=1e-6, json_schema_extra=FIXED)
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = Field(default=0.0, json_schema_extra=FIXED)
    """Of AdamW."""
    betas: tuple[Share, Share] = Field(default=(0.9, 0.999), strict=False, json_schema_extra=FIXED)
    """Of AdamW."""
    clip_grad: Above0 = Field(default=1.0, json_schema_extra=FIXED)
    """Largest norm of the gradient."""
    warmup_steps: Count = Field(default=0, json_schema_extra=FIXED)
    """Updates over which the learning rate rises from 0."""
    schedule: Literal["constant", "cosine", "linear"] = Field(default="constant", json_schema_extra=FIXED)
    """What the learning rate does after that: stay, or fall by half a cosine or in a straight line."""
    schedule_steps: Count = Field(default=0, json_schema_extra=FIXED)
    """Updates after which cosine or linear reaches its end; `trainer.total_steps` unless given."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(default=0.0, json_schema_extra=FIXED)
    """cosine: where it ends, as a share of the peak."""


class AlgorithmSection(Section):
    """The algorithm. Estimators and losses are verl's, by verl's names."""

    name: str = Field(default="grpo", json_schema_extra=FIXED)
    """sft, or a known pair of estimator and loss: grpo, ppo, gspo, ... (`trainer config algorithms` lists them)."""
    advantage: str = Field(default="", json_schema_extra=FIXED)
    """verl's advantage estimator, if not the one of `name`; gae needs a critic, and a critic needs gae."""
    loss: str = Field(default="", json_schema_extra=FIXED)
    """The policy loss, if not the one of `name`: verl's, or one registered under the entry point `trainer.losses`."""
    clip_ratio: Above0 | NoneText = Field(default=None, json_schema_extra=FIXED)
    """How far the ratio of probabilities may leave 1, if not what the loss's publication sets."""
    clip_ratio_low: Above0 | NoneText = Field(default=None, json_schema_extra=FIXED)
    """Below 1, if not `clip_ratio`."""
    clip_ratio_high: Above0 | NoneText = Field(default=None, json_schema_extra=FIXED)
    """Above 1, if not `clip_ratio`."""
    loss_agg_mode: str = Field(default="", json_schema_extra=FIXED)
    """How verl makes one number of the losses of all tokens, if not as the loss's publication does."""
    entropy_coeff: float = Field(default=0.0, json_schema_extra=FIXED)
    """Weight of the entropy bonus."""
    kl_coef: Annotated[float, Field(ge=0)] = Field(default=0.0, json_schema_extra=FIXED)
    """Weight of the KL loss against the initial model; above 0 a second copy is kept, except with LoRA."""
    kl_type: str = Field(default="low_var_kl", json_schema_extra=FIXED)
    """verl's KL estimator."""
    reward_kl_coef: Annotated[float, Field(ge=0)] = Field(default=0.0, json_schema_extra=FIXED)
    """KL in the reward: what each token's reward loses per nat of KL from the initial model, before the update."""
    reward_kl_type: str = Field(default="kl", json_schema_extra=FIXED)
    """verl's KL estimator for that."""
    teacher_coef: Annotated[float, Field(ge=0)] = Field(default=0.0, json_schema_extra=FIXED)
    """Distillation: how much each token's advantage loses per nat that it is likelier here than for the teacher."""
    norm_advantage: bool | NoneText = Field(default=None, json_schema_extra=FIXED)
    """Divide advantages of a group by their standard deviation (grpo, grpo_passk); true unless given."""
    gamma: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0, json_schema_extra=FIXED)
    """gae: by how much a reward counts less for each token that it comes later."""
    lam: Annotated[float, Field(ge=0, le=1)] = Field(default=0.95, json_schema_extra=FIXED)
    """gae: its lambda, from 0 (the next token's value) to 1 (the reward itself)."""
    turn_rewards: bool = Field(default=False, json_schema_extra=FIXED)
    """gae, reinforce_plus_plus: each token gets the rewards from its own turn on, not that of the whole rollout."""
    old_logprobs: Literal["recompute", "rollout"] = Field(default="recompute", json_schema_extra=FIXED)
    """Log-probs that ratios are taken against: of this model before the update, or those that explorers recorded."""
    temperature: Above0 = Field(default=1.0, json_schema_extra=FIXED)
    """At which explorers sample; log-probs are computed at the same."""
    epochs: Positive = Field(default=1, json_schema_extra=FIXED)
    """Passes over each batch."""
    mini_batches: Positive = Field(default=1, json_schema_extra=FIXED)
    """Updates of one pass over a batch."""
    optimizer: OptimizerSection = OptimizerSection()
    """AdamW and its learning rate."""
    options: dict[str, Any] = Field(default_factory=dict, json_schema_extra=FIXED)
    """What else the loss reads of verl's actor config, by verl's names; docs/algorithms.md has them by loss."""
    loss_options: dict[str, Any] = Field(default_factory=dict, json_schema_extra=FIXED)
    """What a loss of another package takes, by its own names; verl's losses take nothing here."""


class CriticOptimizerSection(OptimizerSection):
    """AdamW and the learning rate of the critic; its updates are counted by themselves."""

    lr: Above0 = Field(default=1e-5, json_schema_extra=FIXED)
    """Peak learning rate."""
    schedule_steps: Count = Field(default=0, json_schema_extra=FIXED)
    """Updates of the critic after which cosine or linear reaches its end; `trainer.total_steps` unless given."""


class CriticSection(Section):
    """The critic of PPO: a model with one number for each token, the reward that it expects from there on."""

    enabled: bool = Field(default=False, json_schema_extra=FIXED)
    """Train a critic beside the policy; it needs the estimator gae, which algorithm.name = "ppo" then has."""
    path: str = Field(default="", json_schema_extra=FIXED_PATH)
    """A model directory whose weights the critic starts from; `model.path` unless given."""
    warmup_steps: Count = Field(default=0, json_schema_extra=FIXED)
    """Steps at the start in which only the critic learns."""
    clip_range: Above0 = Field(default=0.5, json_schema_extra=FIXED)
    """How far a value may move from the one before the updates until the loss stops to reward it."""
    epochs: Positive | NoneText = Field(default=None, json_schema_extra=FIXED)
    """Passes over each batch; `algorithm.epochs` unless given."""
    mini_batches: Positive | NoneText = Field(default=None, json_schema_extra=FIXED)
    """Updates of one pass over a batch; `algorithm.mini_batches` unless given."""
    optimizer: CriticOptimizerSection = CriticOptimizerSection()
    """AdamW and its learning rate."""


class TrainerSection(Section):
    """The loop."""

    name: str = "trainer"
    """The trainer's identity in the job."""
    nproc: Positive | Literal["auto"] = "auto"
    """Ranks that `trainer train` starts on this machine; auto: one a GPU, or one. torchrun and srun start theirs."""
    total_steps: Positive | NoneText = None
    """Steps after which the run is done; none for as long as there are samples."""
    save_interval: Count = 0
    """Steps between two full checkpoints; 0 for only the last one."""
    validation_interval: Count = 0
    """Steps between two measurements of the loss of `data.validation_path`; 0 for only the last one."""
    max_checkpoints_to_keep: Count = 0
    """Newest full checkpoints that are kept; 0 for all."""
    save_hf_checkpoint: Literal["always", "never", "last"] = "last"
    """Which full checkpoints get `actor/huggingface/`, a complete Hugging Face directory."""
    host_memory_mib: Count = 0
    """MiB of its host that a rank may take for buffers and copies; 0 for its share of half of what is free."""
    continue_from_checkpoint: bool = True
    """Resume in the job directory; false starts a new one beside it if it is not empty."""
    start_daemon: bool = True
    """Start `syncd watch` beside the trainer if no daemon leads the job."""
    evaluation_wait: Annotated[float, Field(ge=0)] = 600.0
    """Seconds at most that a finished run waits for explorers to evaluate its last version; 0 for no wait."""


class SelectionSection(Section):
    """Which steps are best by a figure, and what follows from it."""

    metric: str = ""
    """A figure of metrics.jsonl, for example `eval/reward` or `validation/loss`; none unless given."""
    goal: Literal["max", "min"] = "max"
    """Which values are better: larger or smaller ones."""
    keep_best: Count = 1
    """Steps with the best values that are pinned, so that retention keeps them; 0 for none."""
    patience: Count = 0
    """Values in a row that are no better than the best before, after which the run ends; 0 for no such end."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """By how much more than this a value must be better to count as better for `patience`."""


class MonitorSection(Section):
    """Where metrics go besides `metrics.jsonl`."""

    kinds: tuple[str, ...] = Field(default=(), strict=False)
    """tensorboard, wandb, mlflow, trackio, or others registered under the entry point `trainer.monitors`."""
    project: str = "syncd"
    """The project of those that have projects."""
    group: str = ""
    """The group of runs of those that have groups."""
    preview: Count = 4
    """Rollouts that are shown at each sync."""
    progress: Literal["auto", "live", "plain", "none"] = "auto"
    """What is shown while training: live on a terminal, else plain lines."""
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Anything else that a kind takes: [monitor.options.wandb] mode = "offline"."""


class StageSection(Section):
    """One stage of `trainer stages`: a name, and what differs in it from the rest of the file."""

    model_config = ConfigDict(extra="allow")
    name: str
    """The stage's directory below the job directory."""
