"""A figure that has a name of verl's has the value that verl computes under it."""

import math
import warnings

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    metric_utils = pytest.importorskip(
        "verl.trainer.ppo.metric_utils", reason="compared with verl's own figures"
    )
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics
    from verl.utils import flops_counter

import transformers  # noqa: E402
from support import samples  # noqa: E402

from syncd.jobfile.trainer_sections import AlgorithmSection  # noqa: E402
from syncd.transports.ranks import Ranks  # noqa: E402
from trainer.engines.verl import utilization  # noqa: E402
from trainer.engines.verl.checks import resolve  # noqa: E402
from trainer.engines.verl.figures import advantage_metrics, batch_metrics, value_metrics  # noqa: E402
from trainer.engines.verl.rows import prepare_step  # noqa: E402
from trainer.engines.verl.segments import measure_mismatch  # noqa: E402

pytestmark = pytest.mark.group("engines")


@pytest.fixture
def step():
    """A step of rollouts of one segment; some have the tokens of a tool."""
    return prepare_step(resolve(AlgorithmSection()), samples.batch_of(3), mixed=False)


def drawn(step, seed):
    torch.manual_seed(seed)
    return [torch.randn(len(row.mask)) for row in step.rollouts]


def padded(rows, *, left=False):
    found = [torch.as_tensor(row).flip(0) if left else torch.as_tensor(row) for row in rows]
    whole = torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
    return whole.flip(1) if left else whole


def proto_of(step, **columns):
    prompts = [row.tokens[: row.prompt] for row in step.rollouts]
    responses = [row.tokens[row.prompt :] for row in step.rollouts]
    seen = [padded([torch.ones(len(row)) for row in prompts], left=True)]
    seen.append(padded([torch.ones(len(row)) for row in responses]))
    scores = padded([torch.zeros(len(row)) for row in responses])
    scores[:, 0] = torch.tensor([one.reward for one in step.batch.experiences])
    return DataProto.from_single_dict({
        "prompts": padded(prompts, left=True), "responses": padded(responses), "attention_mask": torch.cat(seen, 1),
        "response_mask": padded(step.masks), "token_level_scores": scores, "token_level_rewards": scores,
        **{name: padded(rows) for name, rows in columns.items()},
    })  # fmt: skip


def test_scores_lengths_advantages_values_and_returns_are_verl_s(step):
    advantages, values, returns = (drawn(step, seed) for seed in (1, 2, 3))
    theirs = metric_utils.compute_data_metrics(
        proto_of(step, advantages=advantages, values=values, returns=returns)
    )
    ours = {
        **batch_metrics(step.batch),
        **advantage_metrics(advantages, step.masks),
        **value_metrics(values, returns, step.masks),
    }
    same = ours.keys() & theirs.keys()
    assert {name.rpartition("/")[0] for name in same} == {
        "critic/score", "critic/advantages", "critic/values", "critic/returns", "critic", "response_length",
        "prompt_length",
    }  # fmt: skip
    assert {name: ours[name] for name in same} == pytest.approx(
        {name: theirs[name] for name in same}, rel=1e-4
    )
    assert any(not all(row.action_mask) for row in step.batch.experiences), "with the tokens of tools"


def test_the_distance_from_explorers_is_verl_s(step):
    own, recorded = (dict(enumerate(row / 4 for row in drawn(step, seed))) for seed in (4, 5))
    measure_mismatch(Ranks(), step, own, recorded)
    ours = step.figures.over(Ranks())
    learnt = [
        number for number, mask in enumerate(step.masks) if mask.any()
    ]  # verl counts the others as ratios of 1
    columns = ([rows[number] for number in learnt] for rows in (own, recorded, step.masks))
    theirs = compute_offpolicy_metrics(*map(padded, columns))
    for name in ("kl", "k3_kl", "chi2_token", "chi2_seq"):
        assert ours[f"rollout_corr/{name}"] == pytest.approx(theirs[name], rel=1e-4), name


def test_tokens_and_throughput_are_verl_s(step):
    lengths = [len(row.tokens) for row in step.rollouts]
    batch = DataProto(meta_info={"global_token_num": lengths})
    theirs = metric_utils.compute_throughout_metrics(batch, {"step": 2.0}, 4)
    assert step.described(AlgorithmSection())["perf/total_num_tokens"] == theirs["perf/total_num_tokens"]


def test_the_utilization_is_verl_s_estimate_where_the_device_is_known(monkeypatch):
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=500
    )
    peak = flops_counter.get_device_flops(device_name="NVIDIA H200")
    monkeypatch.setattr(flops_counter, "get_device_flops", lambda: peak)
    reached, _ = flops_counter.FlopsCounter(config).estimate_flops([100, 300], 0.5)
    ours = utilization.Utilization("actor", config, "cuda", 8)
    assert ours.of([100, 300], 0.5) == {"perf/mfu/actor": pytest.approx(reached / peak / 8)}
    assert ours.of([], 0.0) == {}, "a step of the critic alone"
    assert utilization.Utilization("actor", config, "cpu", 1).of([100], 0.5) == {}
    unknown = transformers.GPT2Config()
    assert utilization.Utilization("actor", unknown, "cuda", 1).of([100], 0.5) == {}
    monkeypatch.setattr(flops_counter, "get_device_flops", lambda: math.inf)
    assert utilization.Utilization("actor", config, "cuda", 1).of([100], 0.5) == {}, "an unknown GPU"


def test_a_rollout_has_the_length_of_all_its_segments_and_the_prompt_of_the_first():
    rows = [
        samples.row_of([1, 0, 1], reward=1.0, group="g", rollout=0, segment=0, segments=2),
        samples.row_of([1], reward=1.0, group="g", rollout=0, segment=1, segments=2),
        samples.row_of([1, 1], reward=0.0, group="g", rollout=1),
    ]
    found = batch_metrics(samples.batch_of_rows(rows))
    assert [found[f"response_length/{name}"] for name in ("mean", "max", "min")] == [3.0, 4.0, 2.0]
    assert (found["response/tokens"], found["response/tool_tokens_mean"]) == (5.0, 0.5)
