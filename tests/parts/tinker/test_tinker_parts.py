"""What of the engine `tinker` needs no server: refusals, scales by hand, schedules, adapters, bounded waits."""

import io
import json
import os
import socket
import subprocess
import sys
import tarfile
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")

from support import samples  # noqa: E402
from support.paths import PYTHONPATH, TESTS  # noqa: E402

from explorer_hooks.run.load import load_file  # noqa: E402
from syncd.errors import ConfigError, CorruptDataError  # noqa: E402
from syncd.jobfile.trainer_sections import OptimizerSection  # noqa: E402
from syncd.parts.tinker.session import api_key, import_sdk  # noqa: E402
from syncd.transports.ranks import Ranks  # noqa: E402
from trainer.config.load import load_config  # noqa: E402
from trainer.engines.base import make_engine  # noqa: E402
from trainer.engines.verl.rows import TokenRow  # noqa: E402
from trainer.parts.tinker import adapter, rows  # noqa: E402
from trainer.parts.tinker.config import tinker_problems  # noqa: E402
from trainer.parts.tinker.server import finite_norm  # noqa: E402

URL = "http://127.0.0.1:1"
NOWHERE = {"name": "tinker", "options": {"url": URL}}


def problems_of(**tables):
    engine = {
        "name": "tinker",
        "options": {"url": URL, **tables.pop("options", {})},
        **tables.pop("engine", {}),
    }
    return {
        one.key: str(one) for one in tinker_problems(samples.configured("model", engine=engine, **tables))
    }


@pytest.mark.parametrize(
    ("key", "tables"),
    [
        ("algorithm.kl_coef", {"algorithm": {"kl_coef": 0.1}}),
        ("algorithm.entropy_coeff", {"algorithm": {"entropy_coeff": 0.1}}),
        ("algorithm.teacher_coef", {"algorithm": {"teacher_coef": 0.1}}),
        ("algorithm.loss_options", {"algorithm": {"loss_options": {"a": 1}}}),
        ("algorithm.temperature", {"algorithm": {"temperature": 0.7}}),
        ("algorithm.options", {"algorithm": {"options": {"clip_ratio_c": 3.0}}}),
        ("algorithm.loss", {"algorithm": {"loss": "dro"}}),
        ("algorithm.loss", {"algorithm": {"name": "gspo"}}),
        ("algorithm.advantage", {"algorithm": {"advantage": "gae"}}),
        ("algorithm.loss_agg_mode", {"algorithm": {"loss_agg_mode": "mean"}}),
        ("algorithm.clip_ratio", {"algorithm": {"loss": "importance_sampling", "clip_ratio": 0.2}}),
        ("algorithm.norm_advantage", {"algorithm": {"name": "rloo", "norm_advantage": True}}),
        ("data.sft_ratio", {"data": {"sft_ratio": 0.5, "sft_path": "x"}}),
        ("engine.strategy", {"engine": {"strategy": "fsdp"}}),
        ("engine.offload_params", {"engine": {"offload_params": True}}),
        ("model.dtype", {"model": {"dtype": "bfloat16"}}),
        ("model.lora", {"model": {"lora": {"rank": 4}}}),
        ("sync.method", {"sync": {"method": "nccl"}}),
        ("sync.method", {"sync": {"method": "memory"}}),
        ("sync.method", {"sync": {"method": "auto"}}),
        ("trainer.nproc", {"trainer": {"nproc": 2}}),
        ("trainer.save_hf_checkpoint", {"trainer": {"save_hf_checkpoint": "always"}}),
    ],
)
def test_what_a_tinker_server_cannot_do_is_refused_by_its_key(key, tables):
    assert key in problems_of(**tables)


@pytest.mark.parametrize("name", ["grpo", "ppo", "cispo", "rloo", "sft"])
def test_algorithms_with_its_losses_are_accepted(name):
    assert problems_of(algorithm={"name": name}) == {}
    assert problems_of(algorithm={"name": "grpo", "loss": "importance_sampling"}) == {}


@pytest.mark.parametrize("load", [load_config, load_file])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("rnak = 8", "unknown key engine.options.rnak (did you mean engine.options.rank?)"),
        ("rank = 0", "engine.options.rank = 0 is not a whole number at least 1"),
        ("publish = 'weights'", 'engine.options.publish = "weights" is not one of remote, lora'),
        ("reduction = 'token-mean'", 'engine.options.reduction = "token-mean" is not one of mean, sum'),
        ("timeout = 0", "engine.options.timeout = 0 is not a number above 0"),
        ("url = 'localhost:8000'", '"localhost:8000" is not text such as http://127.0.0.1:8000'),
        ("rank = 8", 'engine.options.url is missing (url = "http://127.0.0.1:8000")'),
    ],
)
def test_a_wrong_option_is_named_by_whoever_reads_the_file_first(tmp_path, load, options, said):
    path = tmp_path / "grpo.toml"
    url = "" if "missing" in said or "url" in options else f"url = '{URL}'\n"
    path.write_text(
        f'[job]\ndir = "job"\n[model]\npath = "model"\n[explorer]\ntasks = "tasks.jsonl"\n'
        f'[engine]\nname = "tinker"\n[engine.options]\n{url}{options}\n'
    )
    with pytest.raises(ConfigError) as caught:
        load(str(path))
    assert said in f"{caught.value.message} ({caught.value.hint})"
    assert str(path) in str(caught.value)


def test_a_file_with_what_it_cannot_do_is_refused_when_it_is_read(tmp_path):
    path = tmp_path / "grpo.toml"
    path.write_text(
        f'[job]\ndir = "job"\n[model]\npath = "model"\n[engine]\nname = "tinker"\noptions = {{ url = "{URL}" }}\n'
    )
    assert load_config(str(path)).engine.name == "tinker"
    with pytest.raises(ConfigError, match="keeps no second model"):
        load_config(str(path), ["--algorithm.kl_coef", "0.1"])


class TwoRanks(Ranks):
    world_size = 2


def test_deltas_are_refused_for_addresses_and_adapters(tmp_path):
    (tmp_path / "job.toml").write_text(
        '[job]\ndir = "job"\n[model]\npath = "model"\n[engine]\nname = "tinker"\noptions = {url = "http://127.0.0.1:1"}\n'
    )
    path = str(tmp_path / "job.toml")
    with pytest.raises(ConfigError, match="has no effect with engine") as refused:
        load_config(path, ["--sync.delta", "on"])
    assert refused.value.hint == 'sync.delta = "auto"'
    for delta in ("auto", "off"):
        assert load_config(path, ["--sync.delta", delta]).sync.delta == delta


def test_more_than_one_rank_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    config = samples.configured(tmp_path, tmp_path, engine=NOWHERE)
    with pytest.raises(ConfigError, match="2 ranks") as refused:
        make_engine(samples.context_of(config, TwoRanks()))
    assert refused.value.hint == "trainer.nproc = 1"


# --- how a server's own mean becomes the loss that is configured ----------------------------------------------------


def row_of(prompt, mask, rollout):
    return TokenRow(torch.arange(prompt + len(mask)), prompt, torch.tensor(mask), rollout)


ROWS = [row_of(2, [1, 1, 0], 0), row_of(1, [1, 1, 1, 1], 1), row_of(3, [0, 1], 1), row_of(2, [1], 2)]
LOSSES = [
    torch.tensor([0.5, -1.0, 9.0]),
    torch.tensor([1.0, 2.0, 3.0, 4.0]),
    torch.tensor([7.0, -2.0]),
    torch.tensor([0.25]),
]


def column(row, name):
    return next(one.values for one in row.columns if one.name == name)


def summed(row, losses):
    return float((losses * row.mask).sum())


WHOLE = [summed(row, losses) for row, losses in zip(ROWS, LOSSES, strict=True)]
BY_HAND = {
    "token-mean": sum(WHOLE) / 8,
    "token-sum": sum(WHOLE),
    "seq-mean-token-sum": sum(WHOLE) / 3,
    "seq-mean-token-sum-norm": sum(WHOLE) / 3 / 10,
    "seq-mean-token-mean": (WHOLE[0] / 2 + WHOLE[1] / 4 + WHOLE[2] / 1 + WHOLE[3] / 1) / 3,
}


@pytest.mark.parametrize("mode", sorted(BY_HAND))
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_servers_own_sum_of_scaled_advantages_is_the_configured_loss(mode, reduction):
    """Rows 1 and 2 are segments of one rollout; tokens of a tool and of prompts have no advantage."""
    scales = rows.row_scales(ROWS, range(4), mode, 10, reduction)
    sent = [
        rows.policy_row(row, losses * scales[at], torch.zeros(len(losses)))
        for at, (row, losses) in enumerate(zip(ROWS, LOSSES, strict=True))
    ]
    found = [column(row, "advantages") for row in sent]
    if reduction == "mean":
        total = sum(float(one.mean()) for one in found) / len(found)
    else:
        total = sum(float(one.sum()) for one in found)
    assert total == pytest.approx(BY_HAND[mode], rel=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_examples_count_alike_whatever_their_length(reduction):
    weights = rows.example_weights(ROWS, reduction)
    total = 0.0
    for row, losses, weight in zip(ROWS, LOSSES, weights, strict=True):
        whole = torch.zeros(len(row.tokens) - 1)
        whole[row.prompt - 1 :] = losses
        weighed = column(rows.example_row(row, weight), "weights")
        part = float((whole * weighed).sum())
        total += part / float(weighed.sum()) / len(ROWS) if reduction == "mean" else part
    expected = (WHOLE[0] / 2 + WHOLE[1] / 4 + WHOLE[2] / 1 + WHOLE[3] / 1) / 4
    assert total == pytest.approx(expected, rel=1e-6)


def test_a_row_has_the_next_token_as_target_and_values_at_the_response_alone():
    sent = rows.policy_row(
        row_of(2, [1, 0, 1], 0), torch.tensor([3.0, 4.0, 5.0]), torch.tensor([-1.0, -2.0, -3.0])
    )
    found = {one.name: one.values.tolist() for one in sent.columns}
    assert sent.tokens == (0, 1, 2, 3)
    assert found["target_tokens"] == [1, 2, 3, 4]
    assert found["advantages"] == [0, 3, 0, 5]
    assert found["logprobs"] == [0, -1, -2, -3]


@pytest.mark.parametrize(
    ("kind", "end", "least"),
    [("constant", -1, 0.0), ("cosine", 20, 0.0), ("cosine", 20, 0.25), ("linear", 20, 0.0)],
)
def test_learning_rates_are_those_of_verls_and_transformers_schedules(kind, end, least):
    functional = pytest.importorskip(
        "verl.utils.torch_functional", reason="schedules are compared with verl's"
    )
    transformers = pytest.importorskip("transformers", reason="so are they with transformers'")
    from trainer.parts.tinker.updates import learning_rate

    section = OptimizerSection(lr=0.5, warmup_steps=4, schedule=kind, min_lr_ratio=least)
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    if kind == "constant":
        schedule = functional.get_constant_schedule_with_warmup(plain, 4)
    elif kind == "cosine":
        schedule = functional.get_cosine_schedule_with_warmup(plain, 4, end, least)
    else:
        schedule = transformers.get_linear_schedule_with_warmup(plain, 4, end)
    for update in range(24):
        if end < 0 or update <= end:
            assert learning_rate(section, update, end) == pytest.approx(schedule.get_last_lr()[0], abs=1e-12)
        plain.step()
        schedule.step()


# --- adapters ------------------------------------------------------------------------------------------------------


def archive_of(**files):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as opened:
        for name, content in files.items():
            info = tarfile.TarInfo(name.replace("__", "."))
            info.size = len(content)
            opened.addfile(info, io.BytesIO(content))
    return made.getvalue()


def adapter_of(names):
    from safetensors.torch import save

    tensors = {f"base_model.model.model.layers.0.{name}": torch.ones(2, 2) for name in names}
    return save(tensors), json.dumps({"r": 2, "target_modules": None}).encode()


def test_an_adapters_configuration_names_every_module_that_it_has_tensors_for():
    names = [f"{stem}.lora_{one}.weight" for stem in ("self_attn.q_proj", "mlp.down_proj") for one in "AB"]
    weights, config = adapter_of(names)
    found = adapter.read_adapter(
        archive_of(adapter_model__safetensors=weights, adapter_config__json=config), "/models/base"
    )
    written = json.loads(found.config)
    assert written["target_modules"] == ["down_proj", "q_proj"]
    assert (written["r"], written["base_model_name_or_path"]) == (2, "/models/base")
    assert (found.weights, found.tensors) == (weights, 4)


@pytest.mark.parametrize(
    "archive",
    [
        b"no archive",
        archive_of(adapter_config__json=b"{}"),
        archive_of(adapter_config__json=b"{", adapter_model__safetensors=adapter_of([])[0]),
        pytest.param(
            archive_of(adapter_config__json=b"[" * 10_000, adapter_model__safetensors=adapter_of([])[0]),
            id="nested too deeply",
        ),
        archive_of(adapter_config__json=b"{}", adapter_model__safetensors=b"x"),
        archive_of(adapter_config__json=b"{}", adapter_model__safetensors=adapter_of(["q_proj.weight"])[0]),
    ],
)
def test_an_archive_without_a_whole_adapter_is_refused(archive):
    with pytest.raises(CorruptDataError):
        adapter.read_adapter(archive, "/models/base")


def test_the_norm_of_an_applied_gradient_must_be_finite():
    assert finite_norm({"skyrl.ai/grad_norm": 2.5, "skyrl.ai/learning_rate": 1.0}) == 2.5
    assert finite_norm({}) is None
    with pytest.raises(CorruptDataError, match="not finite"):
        finite_norm({"grad_norm": float("nan")})


# --- a server that does not answer ---------------------------------------------------------------------------------


def test_an_api_key_comes_from_the_environment_alone():
    assert api_key("KEY", {"KEY": "tml-1"}) == "tml-1"
    with pytest.raises(ConfigError, match="KEY is not set") as refused:
        api_key("KEY", {})
    assert refused.value.hint.startswith("export KEY=")


def test_a_step_that_is_no_full_checkpoint_has_the_server_keep_nothing(tmp_path, monkeypatch):
    """What a server keeps of weights and optimizer stays there, and nothing would ever name it."""
    from trainer.parts.tinker.engine import TinkerEngine

    class Server:
        base_model, rank = "model", 8
        kept = 0

        def save_state(self, name):
            self.kept += 1
            return f"tinker://{name}"

    class Engine(TinkerEngine):
        def build(self):
            self._server, self._updates = Server(), SimpleNamespace(made=0)

        def train(self, batch, step):
            return {}

    monkeypatch.setenv("TINKER_API_KEY", "tml-1")
    config = samples.configured(
        "model", tmp_path, engine=NOWHERE, trainer={"save_interval": 2}, sync={"probe": False}
    )
    engine = Engine(samples.context_of(config, Ranks()))
    engine.prepare()
    for seed in (1, 2):
        engine.train_step(samples.batch_of(seed))
    assert engine._server.kept == 0
    engine.shutdown()


def test_another_release_of_the_sdk_is_refused(monkeypatch):
    monkeypatch.setattr("syncd.parts.tinker.session.version", lambda _: "0.25.0")
    with pytest.raises(ConfigError, match=r"0\.25\.0 instead of 0\.24\.1"):
        import_sdk()


@pytest.mark.slow
def test_a_server_that_accepts_and_never_answers_or_is_not_there_ends_a_call_in_its_time():
    pytest.importorskip("tinker", reason="the SDK is installed with syncd[tinker]")
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        for one in (silent, closed):
            program = [sys.executable, f"{TESTS}/programs/ask_tinker.py", address(one), "2"]
            env = os.environ | {"PYTHONPATH": PYTHONPATH}
            done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=250, check=True)
            found = json.loads(done.stdout)
            assert "did not answer within 2 s" in found["error"]
            assert "/api/v1/healthz" in found["hint"]
            assert found["seconds"] < 60


def address(listener):
    return f"http://127.0.0.1:{listener.getsockname()[1]}"
