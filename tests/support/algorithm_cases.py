"""Cases of verl's losses and options: what our path through verl computes on given log-probs, without a model."""

import copy
import dataclasses
import random

import torch
from verl.trainer.config import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, PolicyLossConfig

from support import samples
from support.verl_cases import STILL, learn
from support.verl_release import USABLE_LOSSES
from syncd.errors import ConfigError
from syncd.jobfile.trainer_sections import AlgorithmSection
from syncd.transports.ranks import Ranks
from trainer.config.algorithms import ADVANTAGES, ALGORITHMS, LOSSES, SFT
from trainer.config.options import correction
from trainer.engines.verl import settings
from trainer.engines.verl.advantages import advantages
from trainer.engines.verl.batches import MicroBatch, tensors
from trainer.engines.verl.checks import resolve
from trainer.engines.verl.correction import correction_weights
from trainer.engines.verl.figures import StepMetrics
from trainer.engines.verl.losses import ExampleLoss, PolicyLoss
from trainer.engines.verl.rows import deal, example_rows, fill, rollout_rows
from trainer.engines.verl.segments import log_ratio_sums, sums_of_rollouts

SPLITS = {"whole": (1, 16), "micro-batches": (1, 3), "two ranks": (2, 3)}
"""Ways to divide ten rows: ranks, and rows of a micro-batch."""

GIVEN = {
    "clip_cov": {
        "policy_loss": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1}
    },  # all tokens between the bounds: nothing is drawn
    "kl_cov": {"policy_loss": {"kl_cov_ratio": 0.2}},
    "dro": {"policy_loss": {"dro_beta": 0.3}},
}
"""Options that make a loss determined on so few tokens."""


def batch():
    """Return ten rollouts in three groups, of which one is flat; rows differ in length, mask and weight."""
    return samples.batch_of(5, weight=0.5)


def log_probs():
    """Return log-probs of all response tokens: of the model now, before the updates, and of explorers."""
    draw = random.Random(11)
    lengths = [len(row.action_mask) for row in batch().experiences]

    def some(spread, around):
        return [[value + draw.uniform(-spread, spread) for value in row] for row in around]

    old = some(1.5, [[-3.0] * length for length in lengths])
    return {"now": some(1.3, old), "old": old, "recorded": some(0.8, old)}


def of_section(section, split, given):
    """Return loss and gradients of the batch under an algorithm, and the rows of each micro-batch."""
    ranks, most = SPLITS[split]
    rows, config = rollout_rows(batch()), samples.configured("m", algorithm={})
    longest = max(len(row.mask) for row in rows)
    actor = settings.actor_config(config, section, longest)
    columns = columns_of(section, rows, given)
    policy = PolicyLoss(actor, StepMetrics(), 1.0)
    return _total(policy, rows, columns, given["now"], ranks, most)


def columns_of(section, rows, given):
    old, recorded = (dict(enumerate(map(torch.tensor, given[name]))) for name in ("old", "recorded"))
    columns = {"advantages": dict(enumerate(advantages(section, batch()))), "old_log_probs": old}
    if (table := correction(section.options)) is not None:
        whole = sums_of_rollouts(Ranks(), rows, log_ratio_sums(rows, old, recorded))
        columns["rollout_is_weights"] = correction_weights(table, rows, old, recorded, whole, StepMetrics())
    return columns


def _total(loss_of, rows, columns, now, ranks, most):
    leaves = [torch.tensor(values, requires_grad=True) for values in now]
    total, parts = 0.0, []
    tokens = sum(int(row.mask.sum()) for row in rows)
    for rank in range(ranks):
        slots, size = fill(deal(rows, range(len(rows)), rank, ranks), most)
        for start in range(0, len(slots), size):
            part = slots[start : start + size]
            data = tensors(
                rows, part, columns, MicroBatch(size, None), temperature=1.0, calculate_entropy=False
            )
            tu.assign_non_tensor(data, dp_size=ranks, batch_num_tokens=tokens, global_batch_size=len(rows))
            loss, _ = loss_of({"log_probs": _output(rows, part, leaves)}, data)
            (loss / ranks).backward()
            total += float(loss.detach()) / ranks
            parts.append([slot for slot in part if slot is not None])
    gradients = [[0.0] * len(leaf) if leaf.grad is None else leaf.grad.tolist() for leaf in leaves]
    return {"loss": total, "gradients": gradients, "parts": parts}


def _output(rows, slots, leaves):
    found = []
    for slot in slots:
        before = torch.zeros(0 if slot is None else rows[slot].prompt - 1)
        found.append(torch.cat([before, torch.zeros(1) if slot is None else leaves[slot], torch.zeros(1)]))
    return torch.nested.as_nested_tensor(found, layout=torch.jagged)


def by_hand(bench):
    """Return the batch and, for each algorithm and each split of the rows, advantages, loss and gradients."""
    given, found = log_probs(), {}
    names = [{"name": name} for name in ALGORITHMS if name != SFT]
    names += [{"loss": "dro"}] * ("dro" in USABLE_LOSSES)
    for name in names:
        chosen = name.get("loss") or name["name"]
        section = resolve(AlgorithmSection.model_validate({**name, "options": GIVEN.get(chosen, {})}))
        rows = advantages(section, batch())
        found[chosen] = {"advantages": [row.tolist() for row in rows]} | {
            split: of_section(section, split, given) for split in SPLITS
        }
    taught = _taught(samples.taught(batch(), every=2))
    return {
        "given": given, "found": found, "sft": _examples(), "corrected": _corrected(given), "taught": taught,
    }  # fmt: skip


def _taught(read):
    """Return advantages with a teacher who has read some rows, and how a batch is refused of which it read none."""
    found = {}
    for name in ("grpo", "reinforce_plus_plus"):
        section = resolve(AlgorithmSection(advantage=name, teacher_coef=0.3))
        found[name] = [row.tolist() for row in advantages(section, read)]
    try:
        advantages(section, batch())
    except ConfigError as error:
        found["refused"] = error.message
    return found


def _examples():
    rows = example_rows(samples.batch_of(5, sizes=(), examples=7).examples)
    draw = random.Random(3)
    now = [[draw.uniform(-4, 0) for _ in row.mask] for row in rows]
    splits = {
        split: _total(ExampleLoss(StepMetrics(), 1.0), rows, {}, now, *SPLITS[split]) for split in SPLITS
    }
    return {"now": now, "splits": splits}


def _corrected(given):
    found = {}
    for level in ("token", "sequence"):
        for threshold in (2.0, "0.5_2.0"):
            table = {"rollout_is": level, "rollout_is_threshold": threshold}
            options = {"policy_loss": {"rollout_correction": table}}
            section = resolve(AlgorithmSection(options=options))
            columns = columns_of(section, rollout_rows(batch()), given)
            found[level, threshold] = {
                "weights": [row.tolist() for row in columns["rollout_is_weights"].values()],
                **{split: of_section(section, split, given) for split in SPLITS},
            }
    return found


class ReadNames(set):
    """The fields of verl's tables that are read while it listens."""

    listens = False


READ = ReadNames()


def listening(kind, before=""):
    """Return a table of verl that notes which of its fields are read."""
    names = {field.name for field in dataclasses.fields(kind)}

    def read(self, name):
        if READ.listens and name in names:
            READ.add(f"{before}{name}")
        return object.__getattribute__(self, name)

    return type(kind.__name__, (kind,), {"__getattribute__": read})


def reads(bench):
    """Return the fields of verl's actor config that each loss reads."""
    actor, policy = listening(FSDPActorConfig), listening(PolicyLossConfig, "policy_loss.")
    found = {}
    for loss in USABLE_LOSSES:
        own = policy(loss_mode=loss, **({"dro_beta": 0.3} if loss == "dro" else {}))
        config = actor(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=own)
        now = torch.full((2, 3), -1.0, requires_grad=True)
        READ.clear()
        READ.listens = True
        get_policy_loss_fn(loss)(
            old_log_prob=torch.full((2, 3), -1.5), log_prob=now, advantages=torch.tensor([[1.0] * 3, [-1.0] * 3]),
            response_mask=torch.ones(2, 3), loss_agg_mode="token-mean", config=config, rollout_is_weights=None,
        )  # fmt: skip
        READ.listens = False
        found[loss] = set(READ)
    return found


def fields(bench):
    """Return the names of all fields of verl's tables, as options would give them."""
    kinds = {"": FSDPActorConfig, "policy_loss.": PolicyLossConfig}
    kinds["policy_loss.rollout_correction."] = RolloutCorrectionConfig
    inner = {"policy_loss", "policy_loss.rollout_correction"}
    algorithm = {f"{before}{name}" for before, kind in kinds.items() for name in _names(kind)} - inner
    return {"algorithm": algorithm, "engine": set(_names(FSDPEngineConfig))}


def _names(kind):
    return [field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")]


OTHER = {
    "clip_ratio_c": 1.5,
    "tau_pos": 3.0,
    "tau_neg": 3.0,
    "policy_loss.clip_cov_ratio": 0.01,
    "policy_loss.clip_cov_lb": -9.0,
    "policy_loss.clip_cov_ub": 0.5,
    "policy_loss.kl_cov_ratio": 0.9,
    "policy_loss.ppo_kl_coef": 3.0,
    "policy_loss.dro_beta": 2.0,
    "loss_scale_factor": 3,
    "policy_loss.rollout_correction.rollout_is": "token",
    "policy_loss.rollout_correction.rollout_is_threshold": 1.1,
}
"""Another value of each option that is accepted."""


def effects(bench):
    """Return, for each loss and each option that it is given, the results with its usual and with another value."""
    given, found = log_probs(), {}
    for loss in USABLE_LOSSES:
        known, base = LOSSES[loss], {"loss": loss, "options": GIVEN.get(loss, {})}
        for name in (
            sorted(known.reads)
            + ["loss_scale_factor"] * known.has_modes
            + sorted(name for name in OTHER if "correction" in name)
        ):
            mode = {"loss_agg_mode": "seq-mean-token-sum-norm"} if name == "loss_scale_factor" else {}
            correct = "policy_loss.rollout_correction.rollout_is" if name.endswith("_threshold") else ""
            usual = _with(base | mode, correct, "sequence") if correct else base | mode
            other = _with(usual, name, OTHER[name])
            pair = []
            for section in (usual, other):
                torch.manual_seed(1)
                result = of_section(resolve(AlgorithmSection.model_validate(section)), "whole", given)
                pair.append((result["loss"], result["gradients"]))
            found[loss, name] = pair
    return found


def keys_matter(bench):
    """Return whether norm_advantage changes what each estimator says, and loss_agg_mode what each loss says."""
    normed = {
        name: [
            [
                row.tolist()
                for row in advantages(AlgorithmSection(advantage=name, norm_advantage=norm), batch())
            ]
            for norm in (True, False)
        ]
        for name in ADVANTAGES
    }
    given, modes = log_probs(), {}
    for loss in USABLE_LOSSES:
        sections = [
            resolve(AlgorithmSection(loss=loss, loss_agg_mode=mode, options=GIVEN.get(loss, {})))
            for mode in ("token-mean", "seq-mean-token-sum")
        ]
        modes[loss] = [of_section(section, "whole", given)["loss"] for section in sections]
    return {
        "norm_advantage": {name for name, (one, other) in normed.items() if one != other},
        "loss_agg_mode": {loss for loss, (one, other) in modes.items() if one != other},
    }


def _with(section, name, value):
    options = copy.deepcopy(section["options"])
    *tables, last = name.split(".")
    place = options
    for table in tables:
        place = place.setdefault(table, {})
    place[last] = value
    return {**section, "options": options}


def through_the_engine(bench):
    """Return figures of steps with and without options that act outside of the loss, and what an engine reads."""
    plain, correct = {}, {"policy_loss": {"rollout_correction": {"rollout_is": "token"}}}
    engine, found = bench.engine_of(algorithm=STILL), {}
    for name, algorithm in {
        "plain": plain,
        "corrected": {"options": correct},
        "rollout": {"old_logprobs": "rollout"},
        "rollout with entropy": {"old_logprobs": "rollout", "options": {"calculate_entropy": True}},
    }.items():
        learn(engine, algorithm)
        found[name] = engine.train_step(batch())
    return {"metrics": found, "engine": _engine_reads(bench)}


def _engine_reads(bench):
    READ.clear()
    settings.FSDPEngineConfig = listening(FSDPEngineConfig)
    try:
        dynamic = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 64}
        engine = bench.engine_of(algorithm={"entropy_coeff": 0.1}, engine={"options": dynamic})
        READ.listens = True
        again = bench.engine_of(algorithm={"entropy_coeff": 0.1}, engine={"options": dynamic})
        again.train_step(batch())
    finally:
        READ.listens, settings.FSDPEngineConfig = False, FSDPEngineConfig
    engine.shutdown()
    return set(READ)
