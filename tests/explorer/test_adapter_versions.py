"""Explorers of jobs whose steps are adapters: by peft in this process, by name in vLLM, only on their own base."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
peft = pytest.importorskip("peft", reason="needs peft")

sys.path.insert(0, str(Path(__file__).parent))

from support.engine_beds import LoraBed  # noqa: E402
from support.fake_servers import Answer  # noqa: E402
from support.generating import Completing  # noqa: E402
from support.hook_contract import HookContract, load  # noqa: E402
from support.targets import label, target_of  # noqa: E402
from test_transformers_hook import ModelBed, log_probs, seed_of, tiny  # noqa: E402

from explorer_hooks.explorer.generation import GeneratorContext, GroupRequest  # noqa: E402
from explorer_hooks.explorer.load import load_file  # noqa: E402
from explorer_hooks.explorer.served import ServerGenerator  # noqa: E402
from explorer_hooks.explorer.server_apis import ApiChoice, CompletionsApi  # noqa: E402
from explorer_hooks.hook import Running  # noqa: E402
from explorer_hooks.hooks.peft_model import PeftHook, with_adapter  # noqa: E402
from explorer_hooks.http_client import HttpClient  # noqa: E402
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


@pytest.fixture(params=["vllm", "in this process"])
def any_bed(request, tmp_path):
    """Return a bed of each engine for adapters, started with the model in `base`."""
    if request.param != "vllm":
        yield PeftBed(tmp_path)
        return
    with LoraBed(tmp_path) as bed:
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


def test_a_base_that_cannot_be_read_here_is_not_compared(tmp_path):
    with LoraBed(tmp_path) as bed:
        hook = bed.open()
        hook.prepare(replace(bed.target((1, 3)), base=AdapterBase("xxh3_128:0a", "/models/other")))


class NamedRequests:
    """A generator whose versions are adapters, over a server that completes."""

    def __init__(self, server):
        self.server, self.running = server, Running(None)
        context = GeneratorContext(
            None, lambda: self.running, lambda _: None, lambda: self.permitted, "", lambda: False
        )
        client = HttpClient(server.address, token=None, timeout=20.0, ask_timeout=5.0, missing="nothing")
        self.permitted = (1, 0)
        self.generator = ServerGenerator(
            client, ApiChoice(client, "vllm", "base", "required"), context, concurrency=1, retries=3,
            settle=5.0, adapter_api=lambda name: CompletionsApi("base" if name is None else f"policy-{name}"),
        )  # fmt: skip

    def made(self):
        asked = [GroupRequest((5, 6), 2, 4, 1.0)]
        (found,) = [one for one in self.generator.generate(asked) if one is not None]
        return found


@pytest.fixture
def named():
    server = Completing()
    yield NamedRequests(server)
    server.stop()


def models_of(server):
    return [body["model"] for path, body in server.seen if path == "POST /v1/completions"]


def test_a_request_names_the_adapter_of_the_version_that_it_is_of(named):
    assert named.made().first == (1, 0)
    named.running, named.permitted = Running(label(7)), (1, 7)
    found = named.made()
    assert (found.first, found.last, found.unproven) == ((1, 7), (1, 7), False)
    assert models_of(named.server) == ["base", f"policy-{label(7)}"]


def test_a_newer_adapter_during_a_request_changes_nothing_in_it(named):
    named.running, named.permitted = Running(label(7)), (1, 7)
    complete = named.server.post_v1_completions

    def answered(query, body):
        named.running = replace(named.running, label=label(8))
        return complete(query, body)

    named.server.post_v1_completions = answered
    found = named.made()
    assert (found.first, found.last) == ((1, 7), (1, 7))
    assert len(found.responses) == 2


def test_a_server_that_has_lost_its_adapters_is_asked_again_later(named, monkeypatch):
    monkeypatch.setattr("explorer_hooks.explorer.served.backoff", lambda attempt: 0.01)
    named.running, named.permitted = Running(label(7)), (1, 7)
    named.server.replies["/v1/completions"] = Answer(404, {"error": {"message": "no model"}})
    found = named.made()
    assert found.retry
    assert "no model" in found.problem


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


SGLANG = 'kind = "sglang"\naddress = "http://127.0.0.1:1"'
RESTARTED = """
kind = "vllm"
address = "http://127.0.0.1:1"
reload = "restart"
model = "m"
command = "vllm serve {model}"
"""


@pytest.mark.parametrize(
    ("engine", "problem"), [(SGLANG, "loads whole weights"), (RESTARTED, "is for whole weights")]
)
def test_engines_that_load_no_adapters_are_refused(tmp_path, engine, problem):
    path = tmp_path / "file.toml"
    path.write_text(LEAST + engine)
    with pytest.raises(ConfigError, match=problem):
        load_file(str(path))
    load_file(str(path), ["--model.lora.publish", "merged"])
