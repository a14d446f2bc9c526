"""The engine `tinker` against a real server (SkyRL's, JAX on the processor), and against plain torch and peft."""

import math
import os

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")
pytest.importorskip("tinker", reason="the trainer needs the SDK: pip install 'syncd[tinker]'")
pytest.importorskip("peft", reason="adapters are compared with peft")

from support import samples, tinker_process  # noqa: E402
from support.engine_process import python_of  # noqa: E402

from syncd.errors import ConfigError, StorageError, TimedOutError, UsageError  # noqa: E402
from syncd.protocol.adapter_base import find_base  # noqa: E402
from syncd.protocol.manifest import read_manifest  # noqa: E402
from syncd.transports.ranks import Ranks  # noqa: E402
from trainer.checkpoints import full_checkpoints, read_state  # noqa: E402
from trainer.engines.base import make_engine  # noqa: E402

PYTHON = python_of("SYNCD_TINKER_PYTHON", ".venv-tinker/bin/python")
NOISE = 2e-4
"""Between float32 in JAX and in torch, in nats; the server computes in the dtype of the base model's config."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    # The SDK leaves its connections to the collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tinker_process.make_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(tmp_path_factory, model):
    process = tinker_process.tinker_server(PYTHON, tmp_path_factory.mktemp("server"), model)
    before = os.environ.get("TINKER_API_KEY")
    os.environ["TINKER_API_KEY"] = "tml-test"
    process.start()
    yield process
    process.kill()
    os.environ.pop("TINKER_API_KEY")
    if before is not None:
        os.environ["TINKER_API_KEY"] = before


@pytest.fixture
def opened(server, model, tmp_path):
    """Return a function that opens an engine in this test's job, with options of its own."""
    engines = []

    def open_one(*, address=server.address, algorithm=None, **options):
        settings = {"url": address, "rank": tinker_process.RANK, "timeout": 600, **options}
        os.makedirs(tmp_path / "job", exist_ok=True)
        tables = {"engine": {"name": "tinker", "options": settings}, "algorithm": algorithm or {}}
        config = samples.configured(model, tmp_path / "job", **tables)
        engine = make_engine(samples.context_of(config, Ranks()))
        engines.append(engine)
        engine.prepare()
        return engine

    yield open_one
    for engine in engines:
        engine.shutdown()
    engines.clear()
    tinker_process.collect_connections()


def job_of(engine):
    return engine.context.job


def published(engine):
    """Publish the engine's weights and return the manifest and the directory of the step."""
    engine.sync_weight("checkpoint")
    job, step = job_of(engine), engine.train_step_num
    return read_manifest(job.disk, job.step(step)), f"{job.step(step)}/actor"


def answers(engine, batch):
    return engine.token_logprobs([one.tokens for one in (*batch.experiences, *batch.examples)])


def by_hand(module, batch):
    return [tinker_process.next_logprobs(module, one.tokens) for one in (*batch.experiences, *batch.examples)]


def require_close(found, expected):
    expected = list(expected)
    assert [len(row) for row in found] == [len(row) for row in expected]
    apart = max(
        float((torch.tensor(a) - b.detach()).abs().max()) for a, b in zip(found, expected, strict=True)
    )
    assert apart < NOISE


def test_an_engine_trains_and_resumes_bit_for_bit_in_another_session(opened):
    engine, batches = opened(), [samples.batch_of(seed) for seed in range(3)]
    assert engine.train_step_num == 0
    assert engine.limits.vocabulary == samples.VOCAB
    start = answers(engine, batches[2])
    metrics = [engine.train_step(batch) for batch in batches[:2]]
    assert engine.train_step_num == 2
    assert metrics[0].keys() == metrics[1].keys()
    assert all(type(value) is float and math.isfinite(value) for one in metrics for value in one.values())
    named = {
        "actor/pg_loss",
        "actor/grad_norm",
        "actor/lr",
        "actor/ppo_kl",
        "critic/score/mean",
        "train/tokens",
    }
    assert named <= metrics[0].keys()
    state = {"protocol": 1, "step": 2, "generation": 1, "world_size": 1, "sampler": {"at": 5}}
    engine.save_checkpoint(state, block_until_saved=True, save_as_hf=True)
    assert engine.saved_step == 2
    assert full_checkpoints(job_of(engine)) == [2]
    assert read_state(job_of(engine), 2).sampler == {"at": 5}
    further, end = engine.train_step(batches[2]), answers(engine, batches[2])
    assert end != start
    again = opened()
    again.load_checkpoint(2)
    assert again.train_step_num == 2
    assert again.train_step(batches[2]) == further
    assert answers(again, batches[2]) == end


def test_a_step_of_kind_remote_names_weights_that_the_server_keeps(opened):
    engine = opened()
    engine.train_step(samples.batch_of(1))
    manifest, _ = published(engine)
    assert (manifest.kind, manifest.step, manifest.shards) == ("remote", 1, ())
    assert manifest.uri.startswith("tinker://")
    assert manifest.probe.export_dtype == "keep"
    require_close(manifest.probe.logprobs, map(torch.tensor, engine.token_logprobs(manifest.probe.tokens)))


def grpo_advantages(batch):
    """Return the advantage of each rollout: its reward against its group's mean, by the standard deviation."""
    found = []
    for number, one in zip(batch.groups, batch.experiences, strict=True):
        rewards = torch.tensor(
            [
                other.reward
                for group, other in zip(batch.groups, batch.experiences, strict=True)
                if group == number
            ]
        )
        found.append(float((one.reward - rewards.mean()) / (rewards.std() + 1e-6)))
    return found


def hand_loss(module, batch):
    """Return GRPO's loss of one update before which nothing has changed: the ratio is 1, with its gradient."""
    total, tokens = torch.zeros(()), 0
    for one, advantage in zip(batch.experiences, grpo_advantages(batch), strict=True):
        logprobs = tinker_process.next_logprobs(module, one.tokens)[one.prompt_length - 1 :]
        mask = torch.tensor(list(one.learnt)).bool()
        total = total - ((logprobs - logprobs.detach()).exp() * advantage)[mask].sum()
        tokens += int(mask.sum())
    return total / tokens


def hand_sft_loss(module, batch):
    """Return the mean over examples of the mean negative log-likelihood of their responses' tokens."""
    rows = [
        -tinker_process.next_logprobs(module, one.tokens)[one.prompt_length - 1 :].mean()
        for one in batch.examples
    ]
    return torch.stack(rows).mean()


@pytest.mark.parametrize("name", ["grpo", "sft"])
def test_one_step_is_that_of_plain_torch_and_peft(opened, model, name):
    """Loss, norm of the gradient, adapter, log-probs; the server computes in float32, which the config names."""
    batch = samples.batch_of(4, sizes=() if name == "sft" else (4, 3, 3), examples=10 if name == "sft" else 0)
    optimizer = {"lr": 1e-3, "weight_decay": 0.01, "clip_grad": 1e6}
    engine = opened(algorithm={"name": name, "optimizer": optimizer}, publish="lora")
    _, start = published(engine)
    module = tinker_process.adapted(model, start)
    require_close(answers(engine, batch), by_hand(module, batch))
    figures = engine.train_step(batch)
    loss = (hand_sft_loss if name == "sft" else hand_loss)(module, batch)
    loss.backward()
    trained = [one for one in module.parameters() if one.requires_grad]
    norm = torch.stack([one.grad.norm() for one in trained]).norm()
    assert figures["sft/loss" if name == "sft" else "actor/pg_loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert figures["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    torch.optim.AdamW(trained, 1e-3, (0.9, 0.999), weight_decay=0.01).step()
    manifest, end = published(engine)
    assert (manifest.kind, len(manifest.shards), manifest.shards[0].tensors) == ("lora", 1, 28)
    assert manifest.base == find_base(job_of(engine), model)
    found = tinker_process.factors(tinker_process.adapted(model, end))
    expected = tinker_process.factors(module)
    assert found.keys() == expected.keys()
    # AdamW's first step is the sign of the gradient, where that is not smaller than the noise.
    off = torch.cat([(found[key] - expected[key]).abs().flatten() for key in found])
    assert float(off.median()) < 1e-7
    assert float((off > 1e-5).float().mean()) < 0.01
    require_close(answers(engine, batch), by_hand(tinker_process.adapted(model, end), batch))
    require_close(answers(engine, batch), by_hand(module, batch))


def test_peft_would_leave_out_most_of_the_adapter_if_its_modules_were_not_named(opened, model, tmp_path):
    engine = opened(publish="lora")
    engine.train_step(samples.batch_of(1))
    _, directory = published(engine)
    config = tinker_process.read_config(directory)
    assert len(config["target_modules"]) == 7
    assert config["base_model_name_or_path"] == model
    assert len(tinker_process.factors(tinker_process.adapted(model, directory))) == 28
    bare = tmp_path / "bare"
    tinker_process.copy_without_modules(directory, bare)
    assert len(tinker_process.factors(tinker_process.adapted(model, bare))) == 8


def test_mini_batches_and_epochs_are_updates_and_old_logprobs_may_be_those_of_explorers(opened):
    batch = samples.batch_of(4)
    algorithm = {"name": "cispo", "epochs": 2, "mini_batches": 2, "old_logprobs": "rollout"}
    figures = opened(algorithm=algorithm).train_step(batch)
    assert figures["actor/pg_clipfrac"] > 0
    assert figures["rollout_corr/logprob_diff_mean"] > 0


def test_what_the_server_refuses_is_an_error_that_says_so(opened, model):
    with pytest.raises(ConfigError, match=r"between 1 and 8"):
        opened(rank=64)
    with pytest.raises(ConfigError, match=r"has no model 'other'") as refused:
        opened(base_model="other")
    assert model in refused.value.hint
    engine = opened()
    for method in ("nccl", "memory"):
        with pytest.raises(UsageError, match=f"cannot sync by '{method}'"):
            engine.sync_weight(method)


def test_a_checkpoint_of_another_server_or_rank_is_refused(opened):
    engine = opened()
    engine.train_step(samples.batch_of(1))
    state = {"protocol": 1, "step": 1, "generation": 1, "world_size": 1, "sampler": {}}
    engine.save_checkpoint(state, block_until_saved=True)
    path = f"{job_of(engine).step(1)}/training/tinker.json"
    with pytest.raises(ConfigError, match=r"rank 8, where .* rank 4 is trained"):
        opened(rank=4).load_checkpoint(1)
    with open(path) as file:
        text = file.read()
    with open(path, "w") as file:
        file.write(text.replace("step-1", "step-9"))
    with pytest.raises(StorageError, match="does not have it"):
        engine.load_checkpoint(1)


def test_an_engine_whose_server_stops_or_ends_fails_within_its_time(opened, server):
    """The last test: it ends the server."""
    engine = opened(timeout=20)
    batch = samples.batch_of(1)
    with server.hung(), pytest.raises(TimedOutError, match="did not answer within 20 s"):
        engine.sync_weight("checkpoint")
    assert not os.path.exists(job_of(engine).step(0))
    server.kill()
    with pytest.raises(TimedOutError, match="did not answer within 20 s"):
        engine.train_step(batch)
    assert engine.train_step_num == 0
