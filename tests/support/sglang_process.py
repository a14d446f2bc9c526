"""Real SGLang on the CPU as a process."""

from support.engine_process import EngineProcess

ENV = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
FLAGS = [
    "--served-model-name", "policy", "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native",
    "--sampling-backend", "pytorch", "--disable-overlap-schedule", "--mem-fraction-static", "0.3",
    "--max-total-tokens", "8192", "--skip-server-warmup", "--host", "127.0.0.1", "--port", "{port}",
]  # fmt: skip


def sglang(python, model, log, *flags, **env):
    argv = [python, "-m", "sglang.launch_server", "--model-path", model, *FLAGS, *flags]
    return EngineProcess(argv, {**ENV, **env}, log, "/model_info")
