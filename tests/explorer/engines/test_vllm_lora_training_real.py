"""A job that trains adapters with real vLLM on the CPU: each token's log-prob is that of the version in its label.

SYNCD_LORA_VERSIONS says how many versions there are; 20 take minutes.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
from support import small_qwen
from support.engine_process import python_of
from support.paths import PYTHONPATH
from support.real_bed import CLOSE, asked
from support.vllm_process import vllm

PYTHON = python_of("SYNCD_VLLM_PYTHON", ".venv-vllm/bin/python")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

VERSIONS = int(os.environ.get("SYNCD_LORA_VERSIONS", "4"))
FLAGS = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "4", "--max-cpu-loras", "8"]
_LONG = 1500.0

CONFIG = """
[job]
dir = "{root}/job"
[model]
path = "{root}/model"
[model.lora]
rank = 4
alpha = 8
[engine]
device = "cpu"
compute_dtype = "float32"
[algorithm]
name = "grpo"
[algorithm.optimizer]
lr = 0.05
[data]
groups = 2
group_size = 4
consumed = "archive"
[sync]
dtype = "float32"
[trainer]
nproc = 1
total_steps = {versions}
[daemon]
prune = false
[explorer]
name = "e0"
tasks = "{root}/tasks.jsonl"
[explorer.engine]
kind = "vllm"
address = "{address}"
[explorer.sampling]
max_tokens = 12
[explorer.reward]
function = "lora_reward:low_tokens"
"""

REWARD = '''
def low_tokens(prompt, response, task):
    """Return the share of small bytes: something that each version changes."""
    return sum(letter < "a" for letter in response) / max(len(response), 1)
'''


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Return the directory of a job that has ended, with its steps and the batches that it learnt from."""
    root = tmp_path_factory.mktemp("lora-job")
    small_qwen.write_model(f"{root}/model")
    (root / "lora_reward.py").write_text(REWARD)
    (root / "tasks.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "hello"}\n{"prompt": "7+5="}\n')
    engine = vllm(PYTHON, f"{root}/model", root / "vllm.log", *FLAGS, VLLM_ALLOW_RUNTIME_LORA_UPDATING="True")
    engine.start()
    text = CONFIG.format(root=root, address=engine.address, versions=VERSIONS)
    (root / "job.toml").write_text(text)
    try:
        run(root)
        yield root / "job", [one["id"] for one in asked(engine.address, "GET", "/v1/models")[1]["data"]]
    finally:
        engine.kill()


def run(root):
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    explore = "from explorer_hooks.cli.main import main; main()"
    commands = {"trainer": ["-m", "trainer", "train"], "explorer": ["-c", explore, "run"]}
    logs = {name: open(root / f"{name}.log", "wb") for name in commands}  # noqa: SIM115 - closed below
    processes = {
        name: subprocess.Popen(
            [sys.executable, *words, f"{root}/job.toml"],
            env=environment, stdout=logs[name], stderr=logs[name], cwd=root,
        )
        for name, words in commands.items()
    }  # fmt: skip
    try:
        deadline = time.monotonic() + _LONG
        for name, process in processes.items():
            code = process.wait(max(deadline - time.monotonic(), 1.0))
            assert code == 0, (root / f"{name}.log").read_text()[-4000:]
    finally:
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
        for log in logs.values():
            log.close()


def experiences(job):
    from syncd.experience.table import decode_batch

    paths = sorted(job.glob("experiences/**/*.parquet"))
    return [one for path in paths for one in decode_batch(path.read_bytes(), str(path))]


def model_of(job, step):
    """Return the model of a version by transformers and peft: of step 0 the base, of others with their adapter."""
    import peft

    base = small_qwen.model_of(0)
    if step == 0:
        return base
    return peft.PeftModel.from_pretrained(base, f"{job}/global_step_{step}/actor").eval()


def test_each_token_has_the_log_prob_of_the_adapter_that_its_label_names(job, record_line):
    found, models, worst, apart = experiences(job[0]), {}, 0.0, []
    assert len(found) >= 8 * VERSIONS
    for one in found:
        assert not one.unproven
        model = models.setdefault(one.step, model_of(job[0], one.step))
        wanted = small_qwen.expected(model, list(one.tokens), len(one.logprobs))
        worst = max(worst, *(abs(a - b) for a, b in zip(one.logprobs, wanted, strict=True)))
        if one.step:
            other = small_qwen.expected(model_of(job[0], 0), list(one.tokens), len(one.logprobs))
            apart.append(max(abs(a - b) for a, b in zip(one.logprobs, other, strict=True)))
    assert worst < CLOSE
    assert set(models) >= set(range(VERSIONS - 1)), "a version has made no rollouts"
    assert max(apart) > 100 * CLOSE, "the adapters change nothing"
    record_line(
        f"vLLM, GRPO with LoRA: {len(models)} versions, {len(found)} rollouts, log-probs within {worst:.1e} nats"
        f" of peft under the adapter of the label; of the base up to {max(apart):.2f} away"
    )


def test_old_adapters_are_unloaded(job):
    adapters = [name for name in job[1] if name != "policy"]
    assert 1 <= len(adapters) <= 3
    assert any(name.startswith(f"policy-1.{VERSIONS}.") for name in adapters)
