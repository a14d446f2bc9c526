"""Whole jobs on a GPU: trainer, daemon and explorer, weights by each transport. `make test-gpu`."""

import functools
import json

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)
pytest.importorskip("verl", reason="the trainer needs verl")

from support import lora_job, small_qwen, whole_jobs  # noqa: E402
from support.job_file import write_job  # noqa: E402

from syncd.experience.table import decode_batch  # noqa: E402

LONG = 240.0
STEPS = 4
CLOSE = 2e-3
"""Nats between the GPU and main memory, both in float32, of the same weights."""

TABLES = {
    "weights": {},
    "adapters": {"model": {"lora": {"rank": 8, "alpha": 16}}},
    "critic": {"critic": {"enabled": True}},
}


def ran(root, memory, method, kind="weights"):
    """Run a job to its end; return its experiences."""
    lora_job.prepare(root)
    job = lora_job.tables(
        root,
        STEPS,
        engine={"device": "cuda", "compute_dtype": "bfloat16"},
        algorithm={"name": "ppo" if kind == "critic" else "grpo", "optimizer": {"lr": 0.02}},
        sync={"method": method, "memory_dir": str(memory)},
        trainer={"save_interval": 2},
        explorer={"engine": {"kind": "transformers", "device": "cuda"}},
        **TABLES[kind],
    )
    write_job(root / "job.toml", job)
    whole_jobs.run_together(root, whole_jobs.TRAIN_AND_EXPLORE, LONG)
    return experiences_of(root)


def experiences_of(root):
    paths = sorted((root / "job").glob("experiences/**/*.parquet"))
    return [row for path in paths for row in decode_batch(path.read_bytes(), str(path))]


@functools.cache
def model_of(job, step, kind):
    """Return the model of a step as transformers, or peft, reads it."""
    import peft
    import transformers

    if step == 0:
        return small_qwen.model_of(0)
    directory = f"{job}/global_step_{step}/actor"
    if kind == "adapters":
        return peft.PeftModel.from_pretrained(small_qwen.model_of(0), directory).eval()
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def check(root, experiences, kind="weights"):
    """Assert that each token's log-prob is that of the version in its label, and that versions differ."""
    assert len(experiences) >= 8 * STEPS
    for row in experiences:
        model = model_of(root / "job", row.step, kind)
        wanted = small_qwen.expected(model, list(row.tokens), len(row.logprobs))
        assert list(row.logprobs) == pytest.approx(wanted, abs=CLOSE), row.step
    assert max(row.step for row in experiences) >= 1
    start, end = (
        small_qwen.expected(model_of(root / "job", step, kind), list(row.tokens), len(row.logprobs))
        for step in (0, STEPS)
    )
    assert max(abs(before - after) for before, after in zip(start, end, strict=True)) > 10 * CLOSE


@pytest.mark.parametrize("method", ["checkpoint", "memory", "nccl", "auto"])
def test_tokens_have_the_log_probs_of_their_version_by_every_method(tmp_path, shm, method):
    check(tmp_path, ran(tmp_path, shm, method))


def test_figures_of_a_gpu_are_reported(tmp_path, shm):
    ran(tmp_path, shm, "checkpoint")
    last = json.loads((tmp_path / "job" / "metrics.jsonl").read_text().splitlines()[-1])["metrics"]
    assert 0 < last["perf/max_memory_allocated_gb"] <= last["perf/max_memory_reserved_gb"]
    assert 0 < last["perf/mfu/actor"] < 1


@pytest.mark.parametrize("kind", ["adapters", "critic"])
def test_jobs_with_adapters_and_with_a_critic_train_on_a_gpu(tmp_path, shm, kind):
    check(tmp_path, ran(tmp_path, shm, "checkpoint", kind), kind)


EXPLORE_ONCE_RESUMED = """
import time
from explorer_hooks.cli.main import main
from syncd.protocol.job_end import read_end
from syncd.protocol.layout import Job
while read_end(Job.at({job!r})) is not None:
    time.sleep(0.1)
main()
"""
"""An explorer of a job that has ended would end at once."""


def test_a_job_on_a_gpu_is_resumed_from_its_full_checkpoint(tmp_path, shm):
    ran(tmp_path, shm, "checkpoint")
    text = (tmp_path / "job.toml").read_text()
    (tmp_path / "job.toml").write_text(text.replace(f"total_steps = {STEPS}", f"total_steps = {STEPS + 2}"))
    explorer = ("-c", EXPLORE_ONCE_RESUMED.format(job=f"{tmp_path}/job"), "run", "job.toml")
    whole_jobs.run_together(tmp_path, {**whole_jobs.TRAIN_AND_EXPLORE, "explorer": explorer}, LONG)
    lines = (tmp_path / "job" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == list(range(1, STEPS + 3))
    check(tmp_path, experiences_of(tmp_path))
