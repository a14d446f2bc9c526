"""The matrix of docs/follow-vllm.md on real vLLM: what the follower says is what transformers says."""

import re

import pytest
from support.engine_matrix import (
    BF16,
    Row,
    Watched,
    check_adapters,
    check_neighbours,
    check_row,
    running,
    vllm_answer,
)
from support.engine_models import model_of, write_start
from support.engine_process import python_of
from support.real_bed import asked
from support.vllm_process import vllm

from explorer_hooks.hook import HookOptions
from explorer_hooks.hooks.vllm import VllmHook
from explorer_hooks.hooks.vllm_lora import LoraHook
from explorer_hooks.proof import parameter_check as checksums

PYTHON = python_of("SYNCD_VLLM_PYTHON", ".venv-vllm/bin/python")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TWO = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
ROWS = [
    Row("Qwen2, untied"),
    Row("Qwen3, tied", loads=False),
    Row("Qwen3-MoE", reloads=False, loads=False),
    Row("Llama, untied"),
    Row("Llama, untied", ("--dtype", "bfloat16"), close=BF16),
    Row("Llama, untied", ("--enable-lora", "--max-lora-rank", "8")),
    Row("Qwen2, untied", ("--tensor-parallel-size", "2"), TWO, may_fail=True),
    Row("Qwen2, untied", ("--data-parallel-size", "2"), TWO, replicas=2, may_fail=True),
]


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_the_follower_says_of_each_load_what_transformers_says(tmp_path, row, record_line, monkeypatch):
    monkeypatch.setattr(checksums, "SHARE", 0.0)  # on a busy machine they take long
    start = write_start(tmp_path / "start", row.model)
    with running(vllm(PYTHON, start, tmp_path / "log", *row.flags, **row.env), row) as engine:
        hook = VllmHook.from_options(HookOptions(engine.address, timeout=120))
        answers = lambda replica: vllm_answer(engine.address, replica)  # noqa: E731
        record = lambda line: record_line(f"vLLM, {line}")  # noqa: E731
        with Watched(tmp_path, hook, model_of(row.model, 0), answers, row.replicas) as watched:
            check_row(watched, row, record)
            if row.loads and row.close < BF16:
                check_neighbours(watched, row, record, finds=False)
            if row.replicas > 1:
                assert len(answered_by(engine)) == row.replicas


def answered_by(engine):
    """Return the replicas that have read tokens of prompts, by the engine's metrics."""
    metrics = asked(engine.address, "GET", "/metrics")[1].decode()
    lines = re.findall(r'^vllm:prompt_tokens_total{.*?engine="(\d+)".*}\s+(\S+)', metrics, re.MULTILINE)
    return {rank for rank, tokens in lines if float(tokens) > 0}


ADAPTERS = [
    Row("Qwen2, untied"),
    Row("Llama, untied"),
    Row("Llama, untied", ("--dtype", "bfloat16"), close=BF16),
]


@pytest.mark.parametrize("row", ADAPTERS, ids=[f"LoRA, {row.name}" for row in ADAPTERS])
def test_an_adapter_is_proven_under_its_own_name(tmp_path, row, record_line):
    start = write_start(tmp_path / "start", row.model)
    flags = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "4", "--max-cpu-loras", "8", *row.flags]
    engine = vllm(PYTHON, start, tmp_path / "log", *flags, VLLM_ALLOW_RUNTIME_LORA_UPDATING="True")
    with running(engine, row):
        hook = LoraHook.from_options(HookOptions(engine.address, timeout=120))
        asking = {"model": "policy"}
        answers = lambda _: vllm_answer(engine.address, **asking)  # noqa: E731
        record = lambda line: record_line(f"vLLM, LoRA, {line}")  # noqa: E731
        # The head's random adapter makes logits so large that bfloat16 alone is 0.13 nats off.
        heads = ["lm_head"] if row.model.startswith("Llama") and row.close < BF16 else []
        with Watched(tmp_path, hook, model_of(row.model, 0), answers) as watched:
            check_adapters(watched, row, lambda name: asking.update(model=name), record, heads)
