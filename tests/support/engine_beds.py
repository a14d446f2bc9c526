"""Beds of engines behind HTTP: directories of versions, and what an engine answers to a prompt."""

import http.client
import json
import os
from typing import ClassVar

from explorer_hooks.hook import HookOptions
from explorer_hooks.hooks.sglang import SGLangHook
from explorer_hooks.hooks.sglang_lora import SGLangLoraHook
from explorer_hooks.hooks.vllm import VllmHook
from explorer_hooks.hooks.vllm_lora import LoraHook
from explorer_hooks.proof.parameter_check import Moved
from support import small_qwen
from support.fake_engines import START, FakeAdapters, FakeSglang, FakeVllm, fingerprint, fingerprint_of
from support.fake_sglang_adapters import FakeSglangAdapters
from support.hook_contract import PATIENCE, Bed, load
from support.jobs import shard_bytes
from support.targets import target_of

SHAPES = {"model.a": (4, 2), "model.b": (3,), "model.c": (2, 2)}
SECRET = "a-secret-of-the-engine"


def write_version(directory, salt, shards=1, shapes=None):
    """Write a directory of weights that follow from a number."""
    os.makedirs(directory, exist_ok=True)
    items = sorted((shapes or SHAPES).items())
    for at in range(shards):
        part = dict(items[at::shards])
        with open(f"{directory}/model-{at + 1:05d}-of-{shards:05d}.safetensors", "wb") as file:
            file.write(shard_bytes(part, salt))
    return directory


def asked(address, method, path, body=None, token=None):
    """Return status and document of a request that does not go through the hook."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=PATIENCE)
    try:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read()
        return response.status, json.loads(text) if text[:1] in b"{[" and text else text
    finally:
        connection.close()


class EngineBed(Bed):
    """A fake engine, its directories and its hook."""

    token = SECRET
    hook_type = None
    fake_type = None
    kind = "weights"

    def __init__(self, tmp_path, **settings):
        self.root = tmp_path
        self.settings = settings
        self.engine = self.fake_type(self.token)

    def close(self):
        self.engine.stop()

    def open(self):
        return self.hook_type.from_options(
            HookOptions(self.engine.address, settings=self.settings, timeout=self.patience, token=self.token)
        )

    def target(self, pair, *, shards=1):
        directory = f"{self.root}/versions/{pair[0]}.{pair[1]}-{shards}"
        if not os.path.isdir(directory):
            self.write(directory, pair[0] * 1000 + pair[1], shards)
        return target_of(directory, pair, kind=self.kind)

    def write(self, directory, salt, shards):
        write_version(directory, salt, shards)

    def ask(self, method, path, body=None):
        return asked(self.engine.address, method, path, body, self.token)

    def runs(self, target):
        wanted = fingerprint(START) if target is None else fingerprint_of(target.path)
        return self.said(target) == wanted

    def said(self, target):
        """Return what the engine answers to the prompt that it is always asked."""
        raise NotImplementedError

    def is_paused(self):
        return self.engine.paused

    def fail_load(self, target):
        self.engine.fail_next_load = True

    def gone(self):
        return self.engine.gone()

    def hung(self):
        return self.engine.hung()

    def restart(self):
        self.engine.stop()
        self.engine.boot()
        self.engine.start()

    def pause(self):
        self.engine.running.clear()


class VllmBed(EngineBed):
    hook_type = VllmHook
    fake_type = FakeVllm

    def said(self, target):
        status, answer = self.ask("POST", "/v1/completions", {"prompt": "always the same"})
        return answer["choices"][0]["text"] if status == 200 else None

    def fail_commit(self):
        self.engine.replies["/update_weight_version"] = self._once

    def _once(self):
        del self.engine.replies["/update_weight_version"]
        return {"success": False}


class SglangBed(EngineBed):
    hook_type = SGLangHook
    fake_type = FakeSglang
    cannot: ClassVar = {"label before commit": "SGLang takes weights and version in one request"}

    def __init__(self, tmp_path, **settings):
        super().__init__(tmp_path, **settings)
        self.engine.survives = True

    def said(self, target):
        status, answer = self.ask("POST", "/generate", {"text": "always the same"})
        return answer["text"] if status == 200 else None

    def fail_commit(self):
        self.engine.replies["/continue_generation"] = self._once

    def _once(self):
        from support.fake_servers import Answer

        del self.engine.replies["/continue_generation"]
        raise Answer(500, {"message": "the scheduler did not answer"})


class LoraBed(EngineBed):
    hook_type = LoraHook
    fake_type = FakeAdapters
    kind = "lora"
    cannot: ClassVar = {
        "label before commit": "an adapter can be used under its own name from the moment it is loaded",
        "reopen": "an adapter that is loaded is whole, whether it was committed or not",
        "pause": "nothing is ever paused for an adapter",
        "shards": "an adapter is one file",
    }

    def write(self, directory, salt, shards):
        os.makedirs(directory)
        with open(f"{directory}/adapter_model.safetensors", "wb") as file:
            halves = {"lora_A": (2, 4), "lora_B": (4, 2)}
            tensors = {f"base_model.model.head.{half}.weight": shape for half, shape in halves.items()}
            file.write(shard_bytes(tensors, salt))
        with open(f"{directory}/adapter_config.json", "w") as file:
            json.dump({"peft_type": "LORA", "r": 2, "target_modules": ["head"]}, file)

    def said(self, target):
        """Ask for the model that somebody would name who follows this version."""
        newest = self.open().current_version().label
        wanted = None if target is None else target.label
        return self.said_by(f"policy-{wanted}" if newest == wanted and wanted else self.engine.base)

    def said_by(self, model):
        status, answer = self.ask("POST", "/v1/completions", {"prompt": "x", "model": model})
        return answer["choices"][0]["text"] if status == 200 else None

    def is_paused(self):
        return False

    def fail_commit(self):
        original = self.engine.get_v1_models
        hidden = {"at": 0}

        def first_without_adapters():
            hidden["at"] += 1
            del self.engine.replies["/v1/models"]
            return {"data": [one for one in original({}, None)["data"] if one["id"] == self.engine.base]}

        self.engine.replies["/v1/models"] = first_without_adapters


class SglangLoraBed(LoraBed):
    hook_type = SGLangLoraHook
    fake_type = FakeSglangAdapters

    def said_by(self, model):
        name = {} if model == self.engine.base else {"lora_path": model}
        status, answer = self.ask("POST", "/generate", {"text": "x", **name})
        return answer["text"] if status == 200 else None


class SmallModel:
    """A bed whose fake engine has the weights of `small_qwen`, and answers probes as transformers does."""

    stays = Moved.UNCHANGED

    def __init__(self, tmp_path, **settings):
        super().__init__(tmp_path, **settings)
        engine = self.engine
        engine.started_from = small_qwen.write_shards(f"{tmp_path}/start", 0, 1)
        engine.start_weights = small_qwen.weights_of(0)
        engine.boot()

    def write(self, directory, salt, shards):
        small_qwen.write_shards(directory, salt, shards)

    def model(self, target):
        return small_qwen.model_of(0 if target is None else seed_of(target))

    def inject(self, fault):
        self.engine.fault = fault

    def load_stale(self, hook, target):
        self.engine.fault = "stale prefix cache"
        load(hook, target)
        self.engine.fault = ""


class SmallVllmBed(SmallModel, VllmBed):
    dtype = "float32"


class SmallSglangBed(SmallModel, SglangBed):
    dtype = "float32"


class SmallLoraBed(SmallModel, LoraBed):
    cannot: ClassVar = {
        **LoraBed.cannot,
        "cache": "each version has its own name, and the cache keeps names apart",
        "stale head": "an adapter has no head",
        "checksums": "vLLM gives none of adapters",
    }

    def write(self, directory, salt, shards):
        small_qwen.write_adapter(directory, salt)

    def model(self, target):
        return small_qwen.model_of(0) if target is None else small_qwen.model_with_adapter(seed_of(target))


class SmallSglangLoraBed(SmallLoraBed, SglangLoraBed):
    cannot: ClassVar = {**SmallLoraBed.cannot, "checksums": "SGLang gives none of adapters"}

    def __init__(self, tmp_path, **settings):
        super().__init__(tmp_path, **settings)
        self.engine.base_root = small_qwen.write_model(f"{tmp_path}/base")


def seed_of(target):
    generation, step = target.version.pair
    return 1000 * generation + step
