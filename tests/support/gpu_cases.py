"""Cases of what needs GPUs: FSDP1, flash attention and Ulysses; on processors with the parts of `gpu_parts`."""

from dataclasses import replace

from support import gpu_parts, samples
from support.critic_cases import PPO, critic_weights
from support.engine_cases import contract, gradients, refusal, weights_of
from support.verl_cases import GRADIENTS, STILL, learn
from trainer.config.attention import DEGREE
from trainer.engines.verl.rows import rollout_rows

SDPA, FLASH = {"attn_implementation": "sdpa"}, {"attn_implementation": "flash_attention_2"}

WAYS = {
    "padded sdpa": (SDPA, False), "packed sdpa": (SDPA, True),
    "padded flash": (FLASH, False), "packed flash": (FLASH, True),
}  # fmt: skip


def _prepared(bench):
    """Return what an engine's table begins with: float32 on processors, what flash attention takes on GPUs."""
    if bench.device == "cpu":
        gpu_parts.install()
        return {}
    return {"compute_dtype": "bfloat16"}


def _apart(bench, name):
    """Return a bench whose files are in a directory of their own."""
    return replace(bench, directory=bench.place(name))


def packings(bench):
    """Return metrics of a step of rollouts and examples, padded and packed."""
    return attentions(bench, ("padded sdpa", "packed sdpa"))


def attentions(bench, names=tuple(WAYS)):
    """Return the same with each attention."""
    own, found = _prepared(bench), {}
    for name in names:
        model, packing = WAYS[name]
        engine = bench.engine_of(model=model, engine={**own, "packing": packing})
        found[name] = engine.train_step(samples.batch_of(5, weight=0.5, examples=5))
    return found


def fsdp1(bench):
    """Return what the contract's steps and a step of PPO do with both strategies of FSDP."""
    own, found = _prepared(bench), {}
    for strategy in ("fsdp", "fsdp2"):
        tables = {"engine": {**own, "strategy": strategy}}
        found["contract", strategy] = contract(_apart(bench, strategy), **tables)
        found["ppo", strategy] = bench.engine_of(**PPO, **tables).train_step(samples.batch_of(5))
    return found


def split_rows(bench):
    """Return what training does, and its gradients, where two ranks share each row and where not."""
    own, found = _prepared(bench), {}
    for degree in (1, 2):
        engine = {**own, "packing": True, "options": {DEGREE: degree}}
        tables = {"model": FLASH, "engine": engine}
        found["contract", degree] = contract(_apart(bench, f"degree-{degree}"), **tables)
        found["ppo", degree] = _ppo(bench.engine_of(**PPO, **tables))
        adapter = bench.engine_of(model={**FLASH, "lora": {"rank": 4}}, engine=engine)
        found["lora", degree] = adapter.train_step(samples.batch_of(5))
    found["gradients"] = _gradients(bench.engine_of(**tables, algorithm=STILL))
    found["blind"] = refusal(lambda: bench.engine_of(model=SDPA, engine=engine))
    return found


def _ppo(engine):
    """Return values, metrics and both models' weights of a step."""
    found = {"values": engine._critic._values(rollout_rows(samples.batch_of(5, weight=0.5)))}
    metrics = engine.train_step(samples.batch_of(5, weight=0.5))
    return found | {"metrics": metrics, "actor": weights_of(engine), "critic": critic_weights(engine)}


def _gradients(engine):
    """Return gradients and metrics of each way to learn, with rows and with tokens as the size of a micro-batch."""
    found, settings = {}, engine.model.engine_config
    for name in ("token-mean", "entropy", "sft", "mixed"):
        learn(engine, GRADIENTS[name])
        for rows, tokens in ((3, None), (8, 12)):
            settings.micro_batch_size_per_gpu, settings.infer_micro_batch_size_per_gpu = rows, rows - 1
            settings.use_dynamic_bsz, settings.max_token_len_per_gpu = tokens is not None, tokens
            batch = samples.batch_of(5, weight=0.5, examples=5 if name in ("sft", "mixed") else 0)
            with gradients(engine) as kept:
                metrics = engine.train_step(batch)
            found[name, tokens] = kept, metrics
    return found
