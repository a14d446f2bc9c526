"""Real SGLang on the CPU as a process, and what is asked of it past the hook."""

import shutil
from typing import ClassVar

from explorer_hooks.hooks.sglang import SGLangHook
from explorer_hooks.proof.parameter_check import Moved
from support.engine_process import EngineProcess
from support.real_bed import RealBed, asked, told

ENV = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
FLAGS = [
    "--served-model-name", "policy", "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native",
    "--sampling-backend", "pytorch", "--disable-overlap-schedule", "--mem-fraction-static", "0.3",
    "--max-total-tokens", "8192", "--skip-server-warmup", "--host", "127.0.0.1", "--port", "{port}",
]  # fmt: skip
# Of SGLang's kernels for adapters these need no Triton.
LORA = [
    "--enable-lora", "--max-lora-rank", "8", "--max-loras-per-batch", "4", "--lora-backend", "torch_native",
    "--lora-target-modules", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
]  # fmt: skip


def sglang(python, model, log, *flags, **env):
    argv = [python, "-m", "sglang.launch_server", "--model-path", model, *FLAGS, *flags]
    return EngineProcess(argv, {**ENV, **env}, log, "/model_info")


class SglangRealBed(RealBed):
    hook_type = SGLangHook
    engine, hook_name, pause_path = "SGLang", "sglang", "/pause_generation"
    cannot: ClassVar = {
        "label before commit": "SGLang takes weights and version in one request",
        "fail_commit": "nothing makes real SGLang fail there at will",
        "stale head": "nothing makes real SGLang leave one",
        "gone": "a start takes a minute: see test_a_restarted_engine_gets_the_newest_version_before_it_is_ready",
        "restart": "a start takes a minute: see test_a_restarted_engine_gets_the_newest_version_before_it_is_ready",
    }

    stays = Moved.UNCHANGED

    def __enter__(self):
        told(self.process.address, "/pause_generation", {"mode": "abort"})
        body = {"model_path": self.start_directory, "weight_version": "default", "flush_cache": True}
        told(self.process.address, "/update_weights_from_disk", body)
        told(self.process.address, "/continue_generation", {})
        return self

    def answer(self, prompt, count=8, **more):
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True},
            "return_logprob": True,
            **more,
        }
        found = told(self.process.address, "/generate", body)["meta_info"]["output_token_logprobs"]
        return [one[1] for one in found], [one[0] for one in found]

    def stream(self, prompt, count, begun=None, **more):
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 1, "max_new_tokens": count, "ignore_eos": True},
            "stream": True,
            **more,
        }
        return self.read_stream("/generate", body, begun)["meta_info"]["completion_tokens"]

    def is_paused(self):
        return asked(self.process.address, "GET", "/ready")[0] == 503

    def label(self):
        return asked(self.process.address, "GET", "/model_info")[1]["weight_version"]

    def fail_load(self, target):
        """Take the directory away: of all failures the one that does not end real SGLang."""
        shutil.rmtree(target.path)

    def inject(self, fault):
        assert fault == "label without load"
        self.hook._reload = lambda _, label: self.hook.mark(label)

    def load_stale(self, hook, target):
        body = {"model_path": target.path, "weight_version": target.label, "flush_cache": False}
        told(self.process.address, "/pause_generation", {"mode": "retract"})
        told(self.process.address, "/update_weights_from_disk", body)
        told(self.process.address, "/continue_generation", {})

    def pause(self):
        told(self.process.address, "/pause_generation", {"mode": "retract"})
