"""A job that trains adapters while real engines generate: each token's log-prob is that of the version in its label.

SYNCD_LORA_VERSIONS says how many versions there are; 20 take minutes.
"""

import os

from support import small_qwen, whole_jobs
from support.job_file import job_of, write_job
from support.real_bed import CLOSE, asked
from syncd.experience.table import decode_batch

VERSIONS = int(os.environ.get("SYNCD_LORA_VERSIONS", "4"))
_LONG = 1500.0


def tables(root, steps, **more):
    """Return the tables of the job, whose explorer samples for a reward that `prepare` writes."""
    explorer = {
        "name": "e0",
        "tasks": f"{root}/tasks.jsonl",
        "sampling": {"max_tokens": 12},
        "reward": {"function": "lora_reward:low_tokens"},
    }
    job = job_of(
        job={"dir": f"{root}/job"},
        data={"groups": 2, "group_size": 4, "consumed": "archive"},
        sync={"dtype": "float32"} | more.pop("sync", {}),
        trainer={"nproc": 1, "total_steps": steps} | more.pop("trainer", {}),
        daemon={"prune": False},
        explorer=explorer | more.pop("explorer"),
    )
    job["model"] = {"path": f"{root}/model"} | more.pop("model", {})
    return job | more


REWARD = '''
def low_tokens(prompt, response, task):
    """Return the share of small bytes: something that each version changes."""
    return sum(letter < "a" for letter in response) / max(len(response), 1)
'''


def prepare(root):
    """Write the model, the tasks and the reward of a job; return the model's directory."""
    (root / "lora_reward.py").write_text(REWARD)
    (root / "tasks.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "hello"}\n{"prompt": "7+5="}\n')
    return small_qwen.write_model(f"{root}/model")


def finished(root, kind, engine, options=None):
    """Run a job with an engine to its end; return its directory and the names that the engine lists."""
    job = tables(
        root,
        VERSIONS,
        model={"lora": {"rank": 8, "alpha": 16}},
        engine={"device": "cpu", "compute_dtype": "float32"},
        algorithm={"name": "grpo", "optimizer": {"lr": 0.05}},
        explorer={"engine": {"kind": kind, "address": engine.address, "options": options or {}}},
    )
    write_job(root / "job.toml", job)
    (root / "job").mkdir()  # an explorer that is there before its trainer ends where it is missing
    whole_jobs.run_together(root, whole_jobs.TRAIN_AND_EXPLORE, _LONG)
    return root / "job", [one["id"] for one in asked(engine.address, "GET", "/v1/models")[1]["data"]]


def _experiences(job):
    paths = sorted(job.glob("experiences/**/*.parquet"))
    return [one for path in paths for one in decode_batch(path.read_bytes(), str(path))]


def _model_of(job, step):
    """Return the model of a version by transformers and peft: of step 0 the base, of others with their adapter."""
    import peft

    base = small_qwen.model_of(0)
    if step == 0:
        return base
    return peft.PeftModel.from_pretrained(base, f"{job}/global_step_{step}/actor").eval()


class TrainsAdapters:
    """The cases of every engine.

    Attributes:
        product: The engine's name.

    The fixture `job` returns what `finished` does.
    """

    product = ""

    def test_each_token_has_the_log_prob_of_the_adapter_that_its_label_names(self, job, record_line):
        found, models, worst, apart = _experiences(job[0]), {0: _model_of(job[0], 0)}, 0.0, []
        assert len(found) >= 8 * VERSIONS
        for one in found:
            assert not one.unproven
            if one.step not in models:
                models[one.step] = _model_of(job[0], one.step)
            wanted = small_qwen.expected(models[one.step], list(one.tokens), len(one.logprobs))
            worst = max(worst, *(abs(a - b) for a, b in zip(one.logprobs, wanted, strict=True)))
            if one.step:
                other = small_qwen.expected(models[0], list(one.tokens), len(one.logprobs))
                apart.append(max(abs(a - b) for a, b in zip(one.logprobs, other, strict=True)))
        assert worst < CLOSE
        assert set(models) >= set(range(VERSIONS - 1)), "a version has made no rollouts"
        assert max(apart) > 100 * CLOSE, "the adapters change nothing"
        record_line(
            f"{self.product}, GRPO with LoRA: {len(models)} versions, {len(found)} rollouts, log-probs within"
            f" {worst:.1e} nats of peft under the adapter of the label; of the base up to {max(apart):.2f} away"
        )

    def test_old_adapters_are_unloaded(self, job):
        adapters = [name for name in job[1] if name != "policy"]
        assert 1 <= len(adapters) <= 3
        assert any(name.startswith(f"policy-1.{VERSIONS}.") for name in adapters)
