"""Explorers of jobs whose steps are adapters: by peft in this process, by name in vLLM, only on their own base."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
peft = pytest.importorskip("peft", reason="needs peft")

sys.path.insert(0, str(Path(__file__).parent))

from support.engine_beds import LoraBed, SglangLoraBed  # noqa: E402
from support.fake_servers import Answer  # noqa: E402
from support.generating import Completing, GeneratingSglang  # noqa: E402
from support.hook_contract import HookContract, load  # noqa: E402
from support.targets import label, target_of  # noqa: E402
from support.tied_qwen import log_probs, tiny  # noqa: E402
from test_transformers_hook import ModelBed, seed_of  # noqa: E402

from explorer_hooks.hook import Running  # noqa: E402
from explorer_hooks.hooks.peft_model import PeftHook, with_adapter  # noqa: E402
from explorer_hooks.http_client import HttpClient  # noqa: E402
from explorer_hooks.run.generation import GeneratorContext, GroupRequest  # noqa: E402
from explorer_hooks.run.load import load_file  # noqa: E402
from explorer_hooks.run.served import ServerEngine, ServerGenerator  # noqa: E402
from explorer_hooks.run.server_apis import (  # noqa: E402
    ApiChoice,
    CompletionsApi,
    SGLangGenerateApi,
)
from syncd.errors import ConfigError, RefusedError  # noqa: E402
from syncd.jobfile.sections import LoraSection  # noqa: E402
from syncd.protocol.adapter_base import AdapterBase, model_digest  # noqa: E402
from syncd.protocol.local_disk import LocalDisk  # noqa: E402

SECTION = LoraSection(rank=3, alpha=5)
TOKENS = ((1, 5, 3, 2), (7, 9))


def write_adapter(directory, seed, **more):
    """Write an adapter of random A and B as peft saves it."""
    settings = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | more
    model = peft.get_peft_model(tiny(0), peft.LoraConfig(**settings))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    model.save_pretrained(str(directory))


def adapted(directory):
    return peft.PeftModel.from_pretrained(tiny(0), str(directory)).eval()


class PeftBed(ModelBed):
    cannot: ClassVar = {
        **ModelBed.cannot,
        "shards": "an adapter is one file",
    }

    def __init__(self, directory):
        super().__init__(directory)
        tiny(0).save_pretrained(directory / "base")
        self.model = with_adapter(tiny(0), SECTION).eval()

    def open(self):
        self.hook = PeftHook(self.model, str(self.directory / "base"), timeout=self.patience)
        self.hook._on_commit = self._on_commit
        return self.hook

    def target(self, pair, *, shards=1):
        place = self.directory / f"{pair[0]}.{pair[1]}"
        write_adapter(place, seed_of(pair))
        return target_of(place, pair, kind="lora", verified=False)

    def runs(self, target):
        expected = tiny(0) if target is None else adapted(target.path)
        return torch.equal(log_probs(self.model), log_probs(expected))


class TestPeft(HookContract):
    bed_type = PeftBed


@pytest.fixture
def bed(tmp_path):
    return PeftBed(tmp_path)


@pytest.fixture
def hook(bed):
    return bed.open()


def answers(model, rows):
    with torch.no_grad():
        found = [model(torch.tensor([row])).logits[0, :-1].log_softmax(-1) for row in rows]
    return [
        its.gather(1, torch.tensor(row[1:])[:, None])[:, 0].tolist()
        for its, row in zip(found, rows, strict=True)
    ]


def test_a_version_is_proven_with_its_adapter_and_the_baseline_without(bed, hook):
    target = bed.target((1, 4))
    load(hook, target)
    for asked, model in ((target, adapted(target.path)), (None, tiny(0))):
        found = hook.probe(asked, TOKENS).logprobs
        for row, wanted in zip(found, answers(model, TOKENS), strict=True):
            assert row == pytest.approx(wanted, abs=1e-5)
    assert bed.runs(target)


def test_an_explorer_starts_with_the_adapter_that_training_starts_from(tmp_path):
    write_adapter(tmp_path / "start", 8)
    model = with_adapter(tiny(0), SECTION.model_copy(update={"adapter": str(tmp_path / "start")})).eval()
    assert torch.equal(log_probs(model), log_probs(adapted(tmp_path / "start")))
    with pytest.raises(ConfigError, match="cannot be made"):
        with_adapter(tiny(0), SECTION.model_copy(update={"targets": ("nothing",)}))


@pytest.mark.parametrize("other", [{"r": 2}, {"lora_alpha": 6}, {"target_modules": ["q_proj"]}])
def test_an_adapter_of_another_shape_is_refused(bed, hook, tmp_path, other):
    write_adapter(tmp_path / "other", 1, **other)
    with pytest.raises(RefusedError):
        hook.prepare(target_of(tmp_path / "other", (1, 2), kind="lora"))
    assert bed.runs(None)


class TinyAdapters:
    """A bed whose adapters are of the model `tiny(0)`: SGLang's hook compares their layers with its own."""

    def write(self, directory, salt, shards):
        write_adapter(directory, salt)


class TinyLoraBed(TinyAdapters, LoraBed):
    """vLLM."""


class TinySglangBed(TinyAdapters, SglangLoraBed):
    """SGLang."""


SERVERS = {"vllm": TinyLoraBed, "sglang": TinySglangBed}


@pytest.fixture(params=[*SERVERS, "in this process"])
def any_bed(request, tmp_path):
    """Return a bed of each engine for adapters, started with the model in `base`."""
    if request.param not in SERVERS:
        yield PeftBed(tmp_path)
        return
    with SERVERS[request.param](tmp_path) as bed:
        tiny(0).save_pretrained(tmp_path / "base")
        bed.engine.base_root = str(tmp_path / "base")
        yield bed


def test_an_adapter_of_another_base_is_refused_and_the_engine_is_not_touched(any_bed, tmp_path):
    hook, target = any_bed.open(), any_bed.target((1, 3))
    tiny(1).save_pretrained(tmp_path / "other")
    digests = {name: model_digest(LocalDisk(), str(tmp_path / name)) for name in ("base", "other")}
    wrong = replace(target, base=AdapterBase(digests["other"], "/models/other"))
    with pytest.raises(RefusedError, match="belongs to /models/other"):
        hook.prepare(wrong)
    for base in (AdapterBase(digests["base"], "/elsewhere"), None):
        hook.prepare(replace(target, base=base))
    load(hook, replace(target, base=AdapterBase(digests["base"], "/elsewhere")))
    assert any_bed.runs(target)


@pytest.mark.parametrize("bed_type", SERVERS.values())
def test_a_base_that_cannot_be_read_here_is_not_compared(tmp_path, bed_type):
    with bed_type(tmp_path) as bed:
        hook = bed.open()
        hook.prepare(replace(bed.target((1, 3)), base=AdapterBase("xxh3_128:0a", "/models/other")))


VLLM_LACKS = Answer(404, {"error": {"message": "no model"}})
SGLANG_LACKS = Answer(
    400, {"error": {"message": f"Got LoRA adapter that has never been loaded: policy-{label(7)}"}}
)
SGLANG_LONG = Answer(
    400, {"error": {"message": "The input (600 tokens) is longer than the model's context length"}}
)


class NamedRequests:
    """A generator whose versions are adapters, over a server that completes."""

    def __init__(self, server, api):
        self.server, self.running = server, Running(None)
        context = GeneratorContext(
            None, lambda: self.running, lambda _: None, lambda: self.permitted, "", lambda: False
        )
        client = HttpClient(server.address, token=None, timeout=20.0, ask_timeout=5.0, missing="nothing")
        self.permitted = (1, 0)
        self.generator = ServerGenerator(
            client, ApiChoice(client, "vllm", "base", "required"), context, concurrency=1, retries=3,
            settle=5.0, adapter_api=api,
        )  # fmt: skip

    def made(self):
        asked = [GroupRequest((5, 6), 2, 4, 1.0)]
        (found,) = [one for one in self.generator.generate(asked) if one is not None]
        return found


def vllm_api(name):
    return CompletionsApi("base" if name is None else f"policy-{name}")


def sglang_api(name):
    return SGLangGenerateApi(None if name is None else f"policy-{name}")


@pytest.fixture(params=["vllm", "sglang"])
def named(request):
    server = {"vllm": Completing, "sglang": GeneratingSglang}[request.param]()
    yield NamedRequests(server, {"vllm": vllm_api, "sglang": sglang_api}[request.param])
    server.stop()


def models_of(server):
    """Return what each request calls its model; in SGLang's the model itself has no name."""
    bodies = [body for path, body in server.seen if path in ("POST /v1/completions", "POST /generate")]
    return [body.get("model") or body.get("lora_path", "base") for body in bodies]


def test_a_request_names_the_adapter_of_the_version_that_it_is_of(named):
    assert named.made().first == (1, 0)
    named.running, named.permitted = Running(label(7)), (1, 7)
    found = named.made()
    assert (found.first, found.last, found.unproven) == ((1, 7), (1, 7), False)
    assert models_of(named.server) == ["base", f"policy-{label(7)}"]


def test_a_newer_adapter_during_a_request_changes_nothing_in_it(named):
    named.running, named.permitted = Running(label(7)), (1, 7)
    served = named.server.routed

    def answered(method, target, body):
        named.running = replace(named.running, label=label(8))
        return served(method, target, body)

    named.server.routed = answered
    found = named.made()
    assert (found.first, found.last) == ((1, 7), (1, 7))
    assert len(found.responses) == 2


def test_a_server_that_has_lost_its_adapters_is_asked_again_later(named, monkeypatch):
    monkeypatch.setattr("explorer_hooks.run.served.backoff", lambda attempt: 0.01)
    named.running, named.permitted = Running(label(7)), (1, 7)
    named.server.replies = {"/v1/completions": VLLM_LACKS, "/generate": SGLANG_LACKS}
    found = named.made()
    assert found.retry
    assert "no model" in found.problem or "never been loaded" in found.problem
    assert len(models_of(named.server)) == 4


def test_a_prompt_that_sglang_refuses_is_not_sent_again():
    server = GeneratingSglang()
    named = NamedRequests(server, sglang_api)
    named.running, named.permitted = Running(label(7)), (1, 7)
    server.replies["/generate"] = SGLANG_LONG
    found = named.made()
    server.stop()
    assert (found.retry, len(models_of(server))) == (False, 1)
    assert "longer than" in found.problem


LEAST = """
[job]
dir = "job"
[model]
path = "model"
[model.lora]
rank = 4
[explorer]
tasks = "tasks.jsonl"
[explorer.engine]
"""


SERVED = 'kind = "{}"\naddress = "http://127.0.0.1:1"\nmodel = "m"'
RESTARTED = """
kind = "vllm"
address = "http://127.0.0.1:1"
reload = "restart"
model = "m"
command = "vllm serve {model}"
"""


def test_a_server_that_starts_anew_for_each_version_loads_no_adapters(tmp_path):
    path = tmp_path / "file.toml"
    path.write_text(LEAST + RESTARTED)
    with pytest.raises(ConfigError, match="is for whole weights"):
        load_file(str(path))
    load_file(str(path), ["--model.lora.publish", "merged"])


@pytest.mark.parametrize(("kind", "hook"), [("vllm", "lora"), ("sglang", "sglang-lora")])
def test_the_kind_of_a_server_says_which_hook_loads_adapters(tmp_path, kind, hook):
    path = tmp_path / "file.toml"
    path.write_text(LEAST + SERVED.format(kind))
    engine = ServerEngine(load_file(str(path)))
    assert (engine.hook.name, engine.name) == (hook, f"{hook}=http://127.0.0.1:1")
    context = GeneratorContext(None, lambda: None, lambda _: None, lambda: None, "", lambda: False)
    api = engine.generator(context)._adapter_api(label(7))
    assert f"policy-{label(7)}" in api.body(GroupRequest((5, 6), 2, 4, 1.0)).values()
    assert ServerEngine(load_file(str(path), ["--model.lora.publish", "merged"])).hook.name == kind
