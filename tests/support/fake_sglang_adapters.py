"""SGLang with adapters, with what the real one was measured to do: names that go at once, unloads that wait."""

import functools
import threading
import time

from support import fake_answers
from support.fake_engines import MAX_REQUEST, START, FakeAdapters, fingerprint, generation
from support.fake_servers import Answer


class FakeSglangAdapters(FakeAdapters):
    """SGLang that was started with `--enable-lora`.

    Attributes:
        half_unloaded: Names of which an unload, or a load, did not reach its end.
    """

    tells_use = False

    def boot(self):
        super().boot()
        self.half_unloaded = set()
        self._known = {}
        self._updating = threading.Lock()

    def get_v1_models(self, query, body):
        found = super().get_v1_models(query, body)
        found["data"][0]["root"] = self.base
        return found

    def get_model_info(self, query, body):
        return {"model_path": self.base_root, "weight_version": "default"}

    def get_server_info(self, query, body):
        return {
            "version": "0.5.23",
            "model_path": self.base_root,
            "enable_lora": self.enabled,
            "dp_size": self.replicas,
        }

    def post_load_lora_adapter(self, query, body):
        name, path = body["lora_name"], body["lora_path"]
        with self._updating:
            if name in self.half_unloaded:
                raise _failed(f"LoRA adapter '{name}' has an incomplete unload. Retry the unload")
            if name in self.adapters:
                raise _failed(f"Failed to load LoRA adapter {name} because it is already loaded")
            if self.fail_next_load:
                self.fail_next_load = False
                raise _failed(f"LoRA adapter {name} with rank 64 is incompatible: `--max-lora-rank`")
            self.take(name, path)
            self._known[name] = path
        return {"success": True, "error_message": "", "loaded_adapters": {}}

    def post_unload_lora_adapter(self, query, body):
        name, until = body["lora_name"], time.monotonic() + MAX_REQUEST
        with self._updating:
            if self.adapters.pop(name, None) is None and name not in self.half_unloaded:
                raise _failed(f"LoRA with name {name} does not exist. Loaded LoRAs: odict_keys([])")
            while name in self.used and time.monotonic() < until:
                time.sleep(0.01)
            self.half_unloaded.discard(name)
        return {"success": True, "error_message": "", "loaded_adapters": {}}

    def post_generate(self, query, body):
        name = body.get("lora_path")
        if name is not None and name not in self.adapters:
            if name not in self._known:
                message = f"Got LoRA adapter that has never been loaded: {name}\nAll loaded adapters:"
                raise Answer(400, {"error": {"message": message}})
            self.take(name, self._known[name])
        if "text" in body:
            return {"text": fingerprint(START) if name is None else self.adapters[name][1]}
        weights = self.merged.get(name, self.start_weights)
        generate = functools.partial(fake_answers.next_token, weights)
        evaluate = functools.partial(fake_answers.log_probs, weights)
        return [generation(body, prompt, generate, evaluate) for prompt in body["input_ids"]]


def _failed(message):
    return Answer(400, {"success": False, "error_message": message, "loaded_adapters": None})
