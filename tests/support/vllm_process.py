"""Real vLLM on the CPU as a process, and what is asked of it past the hook."""

import os
import shutil
from typing import ClassVar

from explorer_hooks.hooks.vllm import VllmHook
from explorer_hooks.proof.parameter_check import Moved
from support.engine_process import ROOT, EngineProcess
from support.real_bed import RealBed, asked, told

ENV = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
}
FLAGS = [
    "--served-model-name", "policy", "--dtype", "float32", "--enforce-eager", "--max-model-len", "512",
    "--max-num-seqs", "16", "--block-size", "32", "--host", "127.0.0.1", "--port", "{port}",
]  # fmt: skip


PLUG_IN = "[vllm.general_plugins]\nsyncd = explorer_hooks.parts.broadcast.vllm_backend:register\n"


def plugged(place):
    """Return a path for Python on which this package is there for vLLM, as if it was installed beside it."""
    info = f"{place}/plug-in/syncd-0.dist-info"
    os.makedirs(info)
    for name, text in (
        ("METADATA", "Metadata-Version: 2.1\nName: syncd\nVersion: 0\n"),
        ("entry_points.txt", PLUG_IN),
    ):
        with open(f"{info}/{name}", "w") as file:
            file.write(text)
    return os.pathsep.join([f"{place}/plug-in", ROOT])


def vllm(python, model, log, *flags, **env):
    # The command `vllm` looks for a package of this name, and the CPU build has another.
    module = ["-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return EngineProcess([python, *module, *FLAGS, *flags], {**ENV, **env}, log)


class VllmRealBed(RealBed):
    hook_type = VllmHook
    engine, hook_name, pause_path = "vLLM", "vllm", "/pause"
    cannot: ClassVar = {
        "fail_commit": "nothing makes real vLLM fail there at will",
        "stale head": "only a model with a tied head shows it",
        "gone": "a start takes a minute: see test_a_restarted_engine_gets_the_newest_version_before_it_is_ready",
        "restart": "a start takes a minute: see test_a_restarted_engine_gets_the_newest_version_before_it_is_ready",
    }

    stays = Moved.HIDDEN

    def __enter__(self):
        address = self.process.address
        told(address, "/pause?mode=abort", {})
        kwargs = {"weights_path": self.start_directory}
        told(address, "/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
        told(address, "/reset_prefix_cache", {})
        told(address, "/update_weight_version", {"new_version": "default"})
        told(address, "/resume", {})
        return self

    def answer(self, prompt, count=8):
        choice = self.completed(prompt, count, logprobs=1, return_token_ids=True)
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def completed(self, prompt, count, model="policy", **more):
        body = {"model": model, "prompt": prompt, "max_tokens": count, "ignore_eos": True, "temperature": 0}
        return told(self.process.address, "/v1/completions", {**body, **more})["choices"][0]

    def stream(self, prompt, count, model="policy", begun=None):
        """Ask for an answer and read it token by token; return how many came."""
        body = {"model": model, "prompt": prompt, "max_tokens": count, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        return self.read_stream("/v1/completions", body, begun)["usage"]["completion_tokens"]

    def is_paused(self):
        return asked(self.process.address, "GET", "/is_paused")[1]["is_paused"]

    def label(self):
        return asked(self.process.address, "GET", "/weight_info")[1]["weight_version"]

    def fail_load(self, target):
        """Take the directory away: of all failures the one that real vLLM comes back from."""
        shutil.rmtree(target.path)

    def inject(self, fault):
        assert fault == "label without load"
        self.hook._reload = lambda directory, label: None

    def load_stale(self, hook, target):
        address = self.process.address
        told(address, "/pause?mode=keep&clear_cache=false", {})  # a pause that clears would hide it
        kwargs = {"weights_path": target.path}
        told(address, "/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
        told(address, "/resume", {})

    def pause(self):
        told(self.process.address, "/pause?mode=keep", {})
